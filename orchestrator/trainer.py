"""`PipelineTrainer`: a job from Python, with Ray Train's result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from orchestrator.analysis.freeze_steps import freeze_steps
from orchestrator.analysis.summary import summarize
from orchestrator.cli.text.progress import open_progress
from orchestrator.cli.text.training_lines import TrainingLines
from orchestrator.client.following import JobResult
from orchestrator.client.running import run
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.history.job_view import fold
from orchestrator.spec.job_spec import Spec
from workers.models.families.user_factory import FactoryConfig
from workers.process.import_path import import_path_of
from workers.protocol.reports import CheckpointReport, StepReport

if TYPE_CHECKING:
    import ray.train


class PipelineTrainer:
    """Trains what `spec` says.

    Args:
        spec: the same object that a TOML file gives.
        model: builds the model in place of `spec.model.factory`; called with `spec.model.arguments`.
        data: opens the data in place of `spec.data.source`; called with `spec.data.arguments`.
        resume: continue from the newest checkpoint in the job's folder.
        profile: plan with this file instead of measuring.
        replay: freeze as this event log says.
        observe: receives every event of the job as it arrives.
        progress: show the job's progress on standard output, as `freshet train` does.

    Raises:
        JobError: `model` or `data` is not a function at the top level of a module.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        model: Callable[..., Any] | None = None,
        data: Callable[..., Any] | None = None,
        resume: bool = False,
        profile: Path | None = None,
        replay: Path | None = None,
        observe: Callable[[events.Record], None] = lambda record: None,
        progress: bool = True,
    ) -> None:
        self._spec = _with_functions(spec, model, data)
        self._resume = resume
        self._profile = profile
        self._replay = replay
        self._observe = observe
        self._progress = progress

    def fit(self) -> ray.train.Result:
        """Train to the end. Ctrl-C stops the job with a checkpoint; the result of a failed job has its `error`.

        Returns:
            `metrics`, as `freshet train --summary` writes them; `checkpoint`, the newest checkpoint's folder; `path`,
            the job's folder; `metrics_dataframe`, a row per step of the newest start, with the columns of `FreezeStep`
            if the job freezes.

        Raises:
            JobError: something that the user can fix: the spec, the data, the cluster.
        """
        started_s = time.time()
        steps: list[dict[str, object]] = []
        console = Console(quiet=not self._progress)
        with open_progress(console, self._spec.job.name, self._spec.job.steps) as progress:
            show = TrainingLines(progress)

            def observe(record: events.Record) -> None:
                if isinstance(record.event, StepReport):
                    steps.append(_row(record.event))
                show(record)
                self._observe(record)

            done = run(
                self._spec,
                resume=self._resume,
                profile=self._profile,
                replay=self._replay,
                observe=observe,
                say=progress.note,
            )
        return _result(done, steps, started_s)


def _with_functions(spec: Spec, model: Callable[..., Any] | None, data: Callable[..., Any] | None) -> Spec:
    """`spec` with the import paths of the functions that are given."""
    changes: dict[str, Any] = {}
    if model is not None:
        given = spec.model.model_dump(
            exclude_unset=True, include=FactoryConfig.model_fields.keys() - {"family"}
        )
        changes["model"] = FactoryConfig(**{**given, "factory": import_path_of(model, "model")})
    if data is not None:
        changes["data"] = spec.data.model_copy(update={"source": import_path_of(data, "data")})
    return spec.model_copy(update=changes)


def _result(done: JobResult, steps: list[dict[str, object]], started_s: float) -> ray.train.Result:
    # Imported here: Ray Train imports pandas and pyarrow, which no other part of a job needs.
    import pandas
    import ray.train
    from ray.train import Checkpoint
    from ray.train.v2.api.exceptions import ControllerError

    newest = _newest_checkpoint(done)
    error = None
    if isinstance(done.end, events.Failed):
        error = ControllerError(RuntimeError(done.end.reason))
    _add_freezing(steps, done.events_path)
    return ray.train.Result(
        metrics=summarize(done.events_path, started_s=started_s).to_dict(),
        checkpoint=Checkpoint(newest) if newest is not None else None,
        error=error,
        path=done.spec.job.folder,
        metrics_dataframe=pandas.DataFrame(steps) if steps else None,
    )


def _newest_checkpoint(done: JobResult) -> str | None:
    """The newest checkpoint in the event log."""
    paths = [
        record.event.path
        for record in read_log(done.events_path)
        if isinstance(record.event, CheckpointReport) and record.event.error is None
    ]
    return paths[-1] if paths else None


def _add_freezing(steps: list[dict[str, object]], log: Path) -> None:
    """Add the event log's freezing columns to the rows of the steps that froze."""
    freezing = {row.step: asdict(row) for row in freeze_steps(fold(read_log(log)))}
    for step in steps:
        step.update(freezing.get(cast("int", step["step"]), {}))


def _row(step: StepReport) -> dict[str, object]:
    return {
        "step": step.step,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "lr": step.lr,
        "step_s": step.step_s,
        "tokens": step.tokens,
        "bubble": step.bubble,
    }
