"""What a job has achieved, by the measures of papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from eventful_run import FLOPS_PER_SAMPLE, LAST, TRAIN_SAMPLES, eventful
from synthetic_run import RANKS, records

from orchestrator.analysis.achieved import (
    best_so_far,
    compute_now,
    epochs_done,
    goals_of,
    time_to_target_s,
    why_ended,
)
from orchestrator.analysis.job_summary import job_summary
from orchestrator.analysis.summary import summarize
from orchestrator.events.log import EventLog
from orchestrator.events.types import Finished, Record
from orchestrator.history.job_view import JobView, fold
from planner.accelerators import ACCELERATORS, REPORTED
from workers.protocol.reports import ValidationReport


def view(**cluster: Any) -> JobView:
    found = fold(eventful().records)
    found.spec["cluster"] = {**found.spec["cluster"], **cluster}
    return found


def test_passes_over_the_data_are_those_of_all_steps() -> None:
    run = view()
    assert epochs_done(run) == LAST * run.steps[LAST].samples / TRAIN_SAMPLES
    assert epochs_done(fold(records(steps=5))) is None, "an older log does not say how many samples there are"


def test_the_use_of_devices_is_that_of_the_newest_steps() -> None:
    run = view()
    newest = [run.steps[step] for step in range(LAST - 19, LAST + 1)]
    per_s = sum(each.samples for each in newest) / sum(each.step_s for each in newest)
    used = compute_now(run)
    assert used is not None
    assert used.samples_per_hour == pytest.approx(3600 * per_s)
    assert used.flops_per_s is not None
    assert used.flops_per_s == pytest.approx(FLOPS_PER_SAMPLE * per_s)
    peak = RANKS * ACCELERATORS["h200"].float32_flops
    assert used.mfu == pytest.approx(FLOPS_PER_SAMPLE * per_s / peak)
    run.spec["job"]["precision"] = "bfloat16"
    halves = compute_now(run)
    assert halves is not None
    assert halves.mfu == pytest.approx(used.flops_per_s / (RANKS * ACCELERATORS["h200"].half_flops))


def test_ranks_that_share_a_device_share_its_peak() -> None:
    alone, shared = compute_now(view()), compute_now(view(resources_per_rank={"GPU": 0.25}))
    assert alone is not None
    assert shared is not None
    assert alone.mfu is not None
    assert shared.mfu == pytest.approx(4 * alone.mfu)


def test_nothing_is_said_where_it_is_not_known() -> None:
    run = view()
    run.ranks.machines[0] = "Some Processor, AVX512, PyTorch 2.9.0"
    used = compute_now(run)
    assert used is not None
    assert used.flops_per_s is not None
    assert used.mfu is None
    emulated = compute_now(view(device="emulated"))
    assert emulated is not None
    assert (emulated.flops_per_s, emulated.mfu) == (None, None)
    paused = view()
    paused.state = "paused"
    assert compute_now(paused) is None


def test_every_name_that_a_device_reports_has_its_data_sheet() -> None:
    assert set(REPORTED.values()) == set(ACCELERATORS)


def test_the_time_to_the_target_is_that_of_the_steps_that_stand() -> None:
    run = view()
    stand_s = sum(each.step_s for each in run.recovery.commits if each.voided_by is None)
    assert time_to_target_s(run) == pytest.approx(stand_s)
    later = ValidationReport(step=LAST, loss=1.9, metrics={"perplexity": 7.5})
    run.validations[LAST] = later
    assert time_to_target_s(run) is None
    del run.spec["job"]["stop_at"]
    assert time_to_target_s(run) is None


def test_the_best_validation_is_told_beside_the_newest(tmp_path: Any) -> None:
    log = eventful().records
    log.append(replace(log[-1], event=ValidationReport(step=LAST, loss=2.0, metrics={"perplexity": 6.5})))
    end = Finished(step=LAST, stopped=False, state_sha256=None, plateau="no better than loss 1 of step 3")
    log.append(Record(time_s=log[-1].time_s, event=end))
    run = fold(log)
    assert goals_of(run).watched == "perplexity"
    best = best_so_far(run)
    assert best is not None
    assert (best.step, best.values["perplexity"]) == (LAST, 6.5)
    assert why_ended(run) == end.plateau
    told = job_summary(run)
    assert (told.watched, told.best, told.best_step, told.why) == ("perplexity", 6.5, LAST, end.plateau)
    assert (told.validation_loss, told.metrics) == (2.0, {"perplexity": 6.5})
    path = tmp_path / "events.jsonl"
    written = EventLog(path)
    for record in log:
        written.append(record)
    written.close()
    summary = summarize(path, started_s=0.0)
    assert summary.best == {"loss": 2.0, "perplexity": 6.5, "step": LAST}
    assert (summary.why, summary.epochs) == (end.plateau, told.epochs)
    assert summary.time_to_target_s == told.time_to_target_s
