"""One run at Weights & Biases, or its offline files in the job's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from orchestrator.telemetry.loggers import StepValues


class WandbLogger:
    """The run with identity `run` of a project; a resumed job continues it.

    Args:
        folder: for `wandb/`, with the run's files.
        spec: shown as the configuration.
    """

    def __init__(
        self,
        mode: Literal["online", "offline"],
        *,
        folder: Path,
        project: str,
        name: str,
        run: str,
        spec: Mapping[str, Any],
    ) -> None:
        self._run = wandb.init(
            mode=mode,
            dir=str(folder),
            project=project,
            name=name,
            id=run,
            resume="allow",
            config=dict(spec),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )
        # A validation is reported after later steps, and W&B's own step may not go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, entries: Sequence[StepValues]) -> None:
        """Write `entries`."""
        for entry in entries:
            self._run.log({"step": entry.step, **entry.values})

    def close(self) -> None:
        """Write what waits and end the run."""
        self._run.finish()
