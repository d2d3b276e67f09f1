"""The summary: exact numbers from a log, over one start and over two."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from synthetic_run import freezing_records, records

from orchestrator.analysis.summary import summarize
from orchestrator.events import types as events
from orchestrator.events.log import EventLog
from planner.plan import Plan
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import StepReport, ValidationReport

PLAN = Plan(
    epoch=1,
    version=1,
    reason="first",
    layers=((0, 2), (2, 5)),
    stage_ranks=(0, 1),
    schedule="1f1b",
    chunks=1,
    microbatches=2,
    replicas=1,
)


def step(number: int, step_s: float, *, tokens: int = 100) -> StepReport:
    return StepReport(
        generation=1,
        step=number,
        loss=10.0 - number,
        grad_norm=1.0,
        lr=0.1,
        samples=4,
        tokens=tokens,
        step_s=step_s,
        bubble=0.1,
        skipped=False,
    )


def formed(start: CheckpointRef | None) -> events.Formed:
    generation = Generation(number=1, epoch=1, members=(0, 1), store_host="h", store_port=1, timeout_s=1.0)
    return events.Formed(generation=generation, start=start, step=start.step if start else 0)


def logged(folder: Path, *given: tuple[float, events.Event]) -> Path:
    path = folder / "events.jsonl"
    log = EventLog(path)
    for time_s, event in given:
        log.append(events.Record(time_s=time_s, event=event))
    log.close()
    return path


def submitted(resume: bool) -> events.Submitted:
    return events.Submitted(job="j", epoch=1, spec={}, resume=resume)


FIRST = (
    (100.0, submitted(False)),
    (100.0, events.Issued(plan=PLAN)),
    (105.0, formed(None)),
    (107.0, step(1, 2.0)),
    (108.0, step(2, 1.0)),
    (109.0, step(3, 0.5)),
    (110.0, step(4, 0.5)),
    (110.0, ValidationReport(step=4, loss=6.5)),
    (111.0, events.Finished(step=4, stopped=True, state_sha256="aa")),
)


def test_one_start(tmp_path: Path) -> None:
    path = logged(tmp_path, *FIRST)
    assert summarize(path, started_s=95.0).to_dict() == {
        "name": "j",
        "steps": 4,
        "first_loss": 9.0,
        "final_loss": 6.0,
        "validation_loss": 6.5,
        "metrics": {},
        "best": {"loss": 6.5, "step": 4},
        "time_to_target_s": None,
        "why": "",
        "epochs": None,
        "tokens_per_s": 150.0,
        "samples_per_hour": 3600 * 4 * 3 / 2.0,
        "flops_per_s": None,
        "mfu": None,
        "step_time_s": 0.5,
        "first_step_after_s": 12.0,
        "state_sha256": "aa",
        "partition": (2, 3),
        "events": str(path),
    }


def test_after_a_resume_losses_are_the_jobs_and_times_the_newest_starts(tmp_path: Path) -> None:
    path = logged(
        tmp_path,
        *FIRST,
        (200.0, submitted(True)),
        (200.0, events.Issued(plan=PLAN)),
        (205.0, formed(CheckpointRef(path="p", step=3))),
        (206.0, step(4, 1.0, tokens=0)),
        (207.0, step(5, 0.25, tokens=0)),
        (208.0, events.Finished(step=5, stopped=False, state_sha256="bb")),
    )
    summary = summarize(path, started_s=199.0)
    assert (summary.steps, summary.first_loss, summary.final_loss) == (5, 9.0, 5.0)
    assert (summary.tokens_per_s, summary.step_time_s) == (16.0, 0.25)
    assert summary.first_step_after_s == 7.0
    assert summary.state_sha256 == "bb"


def test_a_run_without_a_step_has_no_numbers(tmp_path: Path) -> None:
    path = logged(tmp_path, (1.0, submitted(False)), (2.0, events.Failed(reason="x", user_error=False)))
    summary = summarize(path, started_s=0.0)
    assert summary.steps == 0
    assert summary.first_loss is summary.tokens_per_s is summary.first_step_after_s is None


def test_a_job_that_freezes_says_what_it_brought(tmp_path: Path) -> None:
    path = logged(tmp_path, *((record.time_s, record.event) for record in freezing_records()))
    freeze = summarize(path, started_s=0.0).to_dict()["freeze"]
    assert isinstance(freeze, dict)
    assert freeze["method"] == "timelyfreeze"
    assert freeze["predicted_kappa"] == 0.763
    assert freeze["p_eff"] == pytest.approx(0.37)
    assert freeze["time_to_accuracy"] == pytest.approx(freeze["kappa"] / freeze["p_eff"])
    assert 0.5 < freeze["average_freeze_ratio"] < 0.6


def test_a_number_that_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    nothing_through = [
        replace(record.event, effective_update=0.0) if isinstance(record.event, StepReport) else record.event
        for record in freezing_records()
    ]
    path = logged(tmp_path, *((float(number), event) for number, event in enumerate(nothing_through)))
    told = json.loads(summarize(path, started_s=0.0).to_json(), parse_constant=lambda name: pytest.fail(name))
    assert told["freeze"]["time_to_accuracy"] == "Infinity"
    assert told["steps"] == summarize(path, started_s=0.0).steps


def test_a_job_that_does_not_freeze_has_no_such_field(tmp_path: Path) -> None:
    path = logged(tmp_path, *((record.time_s, record.event) for record in records(steps=3)))
    summary = summarize(path, started_s=0.0)
    assert summary.to_dict() == {key: value for key, value in asdict(summary).items() if key != "freeze"}
