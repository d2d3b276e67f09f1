"""`freshet cancel`: ends a running job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from orchestrator.commands.command import Flag, Form, JobCommand
from orchestrator.commands.seen import SeenJob
from planner.wording import counted

if TYPE_CHECKING:
    from orchestrator.events.types import Commanded


class Cancel(JobCommand, json_schema_extra={"examples": [{"abort": False}]}):
    """End a running job after the step in flight, with a checkpoint from which freshet train --resume goes on."""

    name = "cancel"
    forms = (
        Form("cancel", "Cancel", danger=True),
        Form("cancelnow", "Cancel now", danger=True, fixed={"abort": True}),
    )
    ends = True
    repeatable = True

    abort: Annotated[bool, Flag("--now")] = False
    """End at once, without a checkpoint."""

    @classmethod
    def log_names(cls) -> tuple[str, ...]:
        return "stop", "abort"

    @classmethod
    def parse(cls, command: Commanded) -> Cancel:
        return cls(id=command.id, by=command.by, abort=command.name == "abort", **command.arguments)

    @property
    def log_name(self) -> str:
        return "abort" if self.abort else "stop"

    def arguments(self) -> dict[str, Any]:
        return {}

    def says(self, job: SeenJob) -> str:
        if not self.abort:
            return "The job ends after the step in flight, with a checkpoint. Submitting it again with resume goes on."
        saved = max((each.step for each in job.checkpoints if each.error is None), default=0)
        lost = max(0, job.step - saved)
        return (
            "The job ends at once, without a checkpoint:"
            f" {counted(lost, 'committed step')} since the newest checkpoint {'is' if lost == 1 else 'are'} lost."
        )
