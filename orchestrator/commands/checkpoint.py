"""`freshet checkpoint`: has a running job write a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.commands.command import Form, JobCommand
from orchestrator.commands.seen import SeenJob
from orchestrator.quantities import seconds

if TYPE_CHECKING:
    from orchestrator.commands.entry import CommandEntry
    from orchestrator.events.types import Answered, Event


class Checkpoint(JobCommand):
    """Have a running job write a checkpoint after the step in flight; the job trains on."""

    name = "checkpoint"
    forms = (Form("checkpoint", "Checkpoint"),)
    waits = True
    repeatable = True

    def says(self, job: SeenJob) -> str:
        written = [each for each in job.checkpoints if each.error is None]
        last = f" The last one took {seconds(written[-1].seconds)}." if written else ""
        return f"The job writes a checkpoint after the step in flight, beside training.{last}"

    @classmethod
    def answer(cls, entry: CommandEntry, event: Event, step: int) -> Answered | None:
        from orchestrator.events.types import Paused
        from workers.protocol.reports import CheckpointReport

        match event:
            case CheckpointReport(step=saved, path=path, error=error) if saved >= entry.step:
                text = f"checkpoint of step {saved} in {path}"
                failed = "" if error is None else f" failed: {error}"
                return entry.answered(saved, f"{text}{failed}", done=error is None)
            case Paused(step=step, requested=True):
                return entry.answered(step, f"paused with a checkpoint of step {step}", done=True)
            case _:
                return super().answer(entry, event, step)
