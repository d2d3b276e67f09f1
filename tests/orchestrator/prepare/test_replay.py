"""A recorded run's freeze decisions in another run: what the run adopts, and which logs do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resolving import resolve_spec

from orchestrator.events.log import EventLog
from orchestrator.events.types import Event, Record, Submitted
from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.replay import recorded
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import JobConfig, PipelineConfig, Spec
from planner.freezing import FreezePlan
from workers.config import EmulatedConfig, FreezeConfig
from workers.protocol.errors import JobError
from workers.protocol.reports import FreezeStarted

FOUND = ModelOutline(
    layers=("embed", "block", "head"),
    parameters=(5, 5, 5),
    vocabulary=256,
    language=True,
    emulated=EmulatedConfig(),
)


def job(r_max: float = 0.5, microbatches: int = 2, seed: int = 0) -> Settled:
    spec = Spec(
        job=JobConfig(name="a", seed=seed),
        pipeline=PipelineConfig(microbatches=microbatches),
        freeze=FreezeConfig(method="timelyfreeze", r_max=r_max),
    )
    return resolve_spec(spec, FOUND, {}, epoch=1)


def plan(version: int, start: int, layers: int = 3) -> FreezePlan:
    weights = ((("weight", 1_234_567 + version), ("bias", 0)),) * layers
    return FreezePlan(epoch=1, version=version, ratios=((0.5, 0.25),) * layers, weights=weights, start=start)


def log(folder: Path, *told: Event) -> Path:
    path = folder / "events.jsonl"
    written = EventLog(path)
    for event in told:
        written.append(Record(time_s=0.0, event=event))
    written.close()
    return path


def submitted(resolved: Settled) -> Submitted:
    spec: dict[str, Any] = resolved.spec.model_dump(mode="json")
    return Submitted(job="a", epoch=1, spec=spec, resume=False)


def test_decisions_come_with_their_steps_and_no_new_ones_are_taken(tmp_path: Path) -> None:
    plans = plan(1, 21), plan(2, 30)
    path = log(tmp_path, submitted(job()), *(FreezeStarted(plan=each) for each in plans))
    history = recorded(path, job())
    assert history.plans == plans
    assert history.replayed


def test_what_the_method_does_not_use_may_differ(tmp_path: Path) -> None:
    told = submitted(job())
    told.spec["freeze"]["apf_threshold"] = 0.01
    path = log(tmp_path, told, FreezeStarted(plan=plan(1, 21)))
    assert recorded(path, job()).plans == (plan(1, 21),)


@pytest.mark.parametrize(
    ("here", "layers", "told"),
    [
        (job(r_max=0.8), 3, r"freeze.r_max was 0.5 there and is 0.8 here: .* set freeze.r_max alike"),
        (job(seed=3), 3, r"job.seed was 0 there and is 3 here: another seed .* set job.seed alike"),
        (job(microbatches=4), 3, "for 3 layers and 2 microbatches, this job has 3 and 4"),
        (job(), 5, "for 5 layers and 2 microbatches, this job has 3 and 2"),
    ],
)
def test_another_jobs_decisions_are_refused(tmp_path: Path, here: Settled, layers: int, told: str) -> None:
    path = log(tmp_path, submitted(job()), FreezeStarted(plan=plan(1, 21, layers)))
    with pytest.raises(JobError, match=told):
        recorded(path, here)


def test_a_log_without_a_decision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"events.jsonl: no freeze decision was taken there .*'timelyfreeze'"):
        recorded(log(tmp_path, submitted(job())), job())


def test_a_file_that_is_no_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--replay .*nowhere.jsonl: cannot read it: No such file"):
        recorded(tmp_path / "nowhere.jsonl", job())
    (tmp_path / "letter.txt").write_text("dear\n")
    with pytest.raises(JobError, match=r"--replay: .*letter.txt, line 1, is no event"):
        recorded(tmp_path / "letter.txt", job())
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(JobError, match="no job was submitted there"):
        recorded(tmp_path / "empty.jsonl", job())


def test_a_log_from_before_plans_had_weights_is_followed_without_them(tmp_path: Path) -> None:
    path = log(tmp_path, submitted(job()), FreezeStarted(plan=plan(1, 21)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[1]["plan"]["weights"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (old,) = recorded(path, job()).plans
    assert old == replace(plan(1, 21), weights=())
