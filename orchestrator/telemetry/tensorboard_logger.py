"""TensorBoard's event files in the job's folder, written by tensorboardX."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tensorboardX import SummaryWriter

from orchestrator.telemetry.loggers import StepValues

FLUSH_S = 2
"""Between two writes to the file."""


class TensorBoardLogger:
    """One file in `folder`, which TensorBoard shows as one run with those of earlier starts."""

    def __init__(self, folder: Path) -> None:
        # Names differ by the second otherwise, and a file of that name is overwritten.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(logdir=str(folder), flush_secs=FLUSH_S, filename_suffix=suffix)

    def log(self, entries: Sequence[StepValues]) -> None:
        """Write `entries`."""
        for entry in entries:
            for name, value in entry.values.items():
                self._writer.add_scalar(name, value, entry.step, walltime=entry.time_s)

    def close(self) -> None:
        """Write what waits."""
        self._writer.close()
