"""The freeze decisions of a recorded run, for another run of the same job that makes none itself."""

from __future__ import annotations

from pathlib import Path

from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.history.job_view import fold
from orchestrator.prepare.settling import Settled
from planner.wording import counted
from workers.protocol.errors import JobError


def recorded(path: Path, settled: Settled) -> FreezeHistory:
    """The freeze decisions in the event log `path`, for the job `settled`.

    Raises:
        JobError: the log cannot be read, or its decisions do not fit this job.
    """
    try:
        records = list(read_log(path))
    except OSError as error:
        raise JobError(f"--replay {path}: cannot read it: {error.strerror or error}") from error
    except ValueError as error:
        raise JobError(f"--replay: {error}") from error
    submitted = [record.event for record in records if isinstance(record.event, events.Submitted)]
    if not submitted:
        raise JobError(f"--replay {path}: no job was submitted there; give the events.jsonl of a run")
    there_seed, here_seed = submitted[-1].spec.get("job", {}).get("seed"), settled.spec.job.seed
    if there_seed != here_seed:
        raise JobError(
            f"--replay {path}: job.seed was {there_seed!r} there and is {here_seed!r} here: another seed is another"
            " trajectory, with weights and draws of its own; set job.seed alike"
        )
    recorded_freeze = submitted[-1].spec.get("freeze", {})
    freeze = settled.spec.freeze.model_dump(mode="json")
    for key in sorted(settled.spec.freeze.used):
        value = freeze[key]
        if recorded_freeze.get(key) != value:
            raise JobError(
                f"--replay {path}: freeze.{key} was {recorded_freeze.get(key)!r} there and is {value!r} here:"
                f" decisions only fit the settings they were taken with, set freeze.{key} alike"
            )
    plans = fold(records).freeze_history().plans
    if not plans:
        raise JobError(
            f"--replay {path}: no freeze decision was taken there (freeze.method = {freeze['method']!r}): there is"
            " nothing to follow; give the log of a run that came past its monitoring phase, or leave --replay out"
        )
    here = len(settled.outline.layers), settled.plan.microbatches
    for plan in plans:
        there = len(plan.ratios), len(plan.ratios[0])
        if there != here:
            raise JobError(
                f"--replay {path}: its decisions are for {counted(there[0], 'layer')} and"
                f" {counted(there[1], 'microbatch', 'microbatches')}, this job has"
                f" {here[0]} and {here[1]}: give the log of a run of the same model and pipeline.microbatches"
            )
    return FreezeHistory(plans=plans, replayed=True)
