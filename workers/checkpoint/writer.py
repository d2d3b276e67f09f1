"""Writes a rank's layers into a checkpoint while it keeps training. Knows no manifest and no other rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from workers.checkpoint.folder import write_layer
from workers.checkpoint.kept_files import KeptFiles
from workers.checkpoint.manifest import FileRecord, layer_files
from workers.checkpoint.storage import open_folder
from workers.fault_injection.points import FaultPhase, FaultPoints
from workers.protocol.errors import JobError
from workers.state.layer_state import LayerState


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """Outcome of one write."""

    folder: str
    step: int
    records: tuple[FileRecord, ...]
    """The files of its layers; none after an error."""
    bytes: int
    """Written: without files that were there."""
    seconds: float
    error: str | None = None
    """Why it failed, e.g. `No space left on device`; this rank's files are then removed."""


class CheckpointWriter:
    """One background thread, one write at a time.

    Args:
        faults: the drills armed on this rank.
    """

    def __init__(self, faults: FaultPoints | None = None) -> None:
        self._faults = faults
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._kept = KeptFiles()
        self._write: Future[WriteResult] | None = None

    def start(
        self,
        folder: str,
        step: int,
        states: list[LayerState],
        prefix: int = 0,
        there: Sequence[FileRecord] = (),
    ) -> bool:
        """Start writing `states` into the checkpoint at `folder`.

        Args:
            folder: location, see `checkpoint_folder`.
            step: copied into the result.
            states: host copies, which the writer owns from here on.
            prefix: layers of the model, from the first on, that are frozen.
            there: records of files that need not be written; the result has them too.

        Returns:
            False, without starting, if another write is running or its result has not been taken.
        """
        if self._write is not None:
            return False
        self._write = self._executor.submit(
            write_layers, folder, step, states, self._faults, prefix, self._kept, there
        )
        return True

    @property
    def running(self) -> bool:
        """Whether a write is running."""
        return self._write is not None and not self._write.done()

    def poll(self) -> WriteResult | None:
        """The result of a finished write, once; None if it still runs or there is none. Does not block."""
        if self._write is None or not self._write.done():
            return None
        return self.wait()

    def wait(self) -> WriteResult | None:
        """Wait for the write to end and take its result; None if there is none."""
        write, self._write = self._write, None
        return None if write is None else write.result()

    def close(self, *, wait: bool = True) -> None:
        """End the thread once a running write has ended; `wait` blocks until then."""
        self._executor.shutdown(wait=wait)


def write_layers(
    folder: str,
    step: int,
    states: list[LayerState],
    faults: FaultPoints | None,
    prefix: int = 0,
    kept: KeptFiles | None = None,
    there: Sequence[FileRecord] = (),
) -> WriteResult:
    """Write `states` into the checkpoint at `folder`; an error leaves none of them there.

    Args:
        prefix: layers of the model, from the first on, that are frozen: they are written once for all checkpoints.
        kept: the files that checkpoints share, as this process knows them.
        there: as in `CheckpointWriter.start`.
    """
    kept = kept or KeptFiles()
    start_s = time.monotonic()
    records = list(there)
    error: str | None = None
    try:
        for state in states:
            if faults is not None:
                faults.reach(FaultPhase.SAVING, step)
            records.extend(write_layer(folder, state, kept if state.layer < prefix else None))
    except (OSError, JobError) as failure:
        error = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
        records = []
        _remove_layers(folder, states)
    return WriteResult(
        folder=folder,
        step=step,
        records=tuple(records),
        bytes=sum(record.written_bytes for record in records),
        seconds=time.monotonic() - start_s,
        error=error,
    )


def _remove_layers(folder: str, states: list[LayerState]) -> None:
    """Free the space again. Files that remain belong to no manifest; a later prune deletes them."""
    target = open_folder(folder)
    for state in states:
        for file in layer_files(state.layer, state.name):
            try:
                target.remove(file)
            except OSError:
                return
