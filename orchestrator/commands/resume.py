"""`freshet resume`: has a paused job train on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.commands.command import Form, JobCommand
from orchestrator.commands.seen import SeenJob

if TYPE_CHECKING:
    from orchestrator.commands.entry import CommandEntry
    from orchestrator.events.types import Answered, Event


class Resume(JobCommand):
    """Have a paused job train on from its checkpoint, once the cluster has room for its ranks. A job that has ended is
    another matter: see freshet train --resume."""

    name = "resume"
    forms = (Form("resume", "Resume"),)
    repeatable = True

    @classmethod
    def offered(cls, job: SeenJob) -> bool:
        return job.state == "paused"

    def says(self, job: SeenJob) -> str:
        return "The paused job asks the cluster for its ranks and trains on from its checkpoint, with the same bits."

    @classmethod
    def answer(cls, entry: CommandEntry, event: Event, step: int) -> Answered | None:
        from orchestrator.events.types import Paused, Regrouped

        match event:
            case Paused(step=step, requested=True):
                return entry.answered(step, f"paused again at step {step}", done=False)
            case Regrouped(step=step):
                return entry.answered(step, f"trains on from step {step}", done=True)
            case _:
                return super().answer(entry, event, step)
