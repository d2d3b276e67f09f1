"""A checkpoint that ranks write while they do not train: each writes its layers, and one completes it once all have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.plan import Plan
from workers.checkpoint.coordination import seal
from workers.checkpoint.manifest import FileRecord
from workers.checkpoint.writer import write_layers
from workers.config import WorkerConfig
from workers.fault_injection.points import FaultPoints
from workers.protocol.carried import Carried
from workers.protocol.errors import JobError
from workers.protocol.goals import PastValidation
from workers.protocol.orders import StateSource
from workers.state.layer_state import LayerState


@dataclass(frozen=True, kw_only=True)
class CheckpointSaver:
    """One rank's part in it."""

    config: WorkerConfig
    rank: int
    """Its number."""
    names: tuple[str, ...]
    """The names of all the model's layers, in order."""
    faults: FaultPoints
    copies: Callable[[int, Sequence[int], Sequence[StateSource]], list[LayerState]]
    """Step, layers, sources of all their shards -> host copies of the whole layers."""
    carried: Callable[[int], Carried | None]
    """Step -> state besides layers that the step after it follows, where this rank knows that."""
    validations: Callable[[], tuple[PastValidation, ...]]
    """Returns the job's validations, as far as this rank knows them."""
    log_sha256: Callable[[], str | None]
    """Returns the hash of a line of the job's event log, if one is known."""

    def save(
        self, folder: str, step: int, layers: Sequence[int], sources: Sequence[StateSource] = ()
    ) -> tuple[FileRecord, ...]:
        """Write `layers` into the checkpoint of `step` at `folder`.

        Args:
            sources: of all shards of those layers of which this rank holds shards only.

        Raises:
            JobError: this rank is at another step, or the file system refused.
            StateStreamError: a source is gone.
        """
        try:
            copies = self.copies(step, layers, sources)
        except MemoryError as error:
            raise JobError(f"rank {self.rank} could not write to {folder}: {error}") from error
        carried = self.carried(step) or Carried()
        result = write_layers(folder, step, copies, self.faults, carried.prefix.layers)
        if result.error is not None:
            raise JobError(f"rank {self.rank} could not write to {folder}: {result.error}")
        return result.records

    def seal(
        self, folder: str, step: int, plan: Plan, generation: int, records: Sequence[FileRecord]
    ) -> None:
        """Complete the checkpoint of `step` at `folder`, once all ranks have written their parts.

        Args:
            plan: the plan that was in force.
            generation: the generation in its manifest.

        Raises:
            JobError: the file system refused.
        """
        carried = self.carried(step)
        if carried is None:
            raise JobError(
                f"rank {self.rank} does not know the loss scale and the frozen prefix after step {step}: {folder} is"
                " not whole"
            )
        files = {record.name: record for record in records}
        try:
            log = self.log_sha256()
            seal(
                self.config,
                self.names,
                plan,
                folder,
                step,
                generation,
                files,
                carried,
                log,
                self.validations(),
            )
        except OSError as error:
            raise JobError(f"could not complete {folder}: {error.strerror or error}") from error
