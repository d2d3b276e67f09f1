"""`freshet pause`: has a job give its ranks back for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.commands.command import Form, JobCommand
from orchestrator.commands.seen import SeenJob

if TYPE_CHECKING:
    from orchestrator.commands.entry import CommandEntry
    from orchestrator.events.types import Answered, Event


class Pause(JobCommand):
    """Pause a running job after the step in flight, with a checkpoint. The job gives its ranks back and keeps its
    controller; freshet resume has it train on."""

    name = "pause"
    forms = (Form("pause", "Pause"),)
    waits = True
    repeatable = True

    @classmethod
    def offered(cls, job: SeenJob) -> bool:
        return job.state != "paused"

    def says(self, job: SeenJob) -> str:
        return (
            "The job stops after the step in flight, writes a checkpoint and gives its ranks back to the cluster."
            " It trains on when it is resumed."
        )

    @classmethod
    def answer(cls, entry: CommandEntry, event: Event, step: int) -> Answered | None:
        from orchestrator.events.types import Paused

        match event:
            case Paused(step=step, requested=True):
                return entry.answered(step, f"paused at step {step}", done=True)
            case _:
                return super().answer(entry, event, step)
