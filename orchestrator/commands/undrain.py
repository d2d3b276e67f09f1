"""`freshet undrain`: has a running job use a node again that it was asked to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from orchestrator.commands.command import (
    Argument,
    FieldChoice,
    FieldLimits,
    Form,
    Input,
    JobCommand,
)
from orchestrator.commands.seen import SeenJob

if TYPE_CHECKING:
    from orchestrator.commands.entry import CommandEntry
    from orchestrator.events.types import Answered, Event


def drained_nodes(job: SeenJob) -> list[FieldChoice]:
    """The nodes that the job was asked to leave."""
    notices = job.ranks.drained.items()
    return [FieldChoice(node, f"{notice.host or 'node'} ({node[:8]})") for node, notice in notices]


class Undrain(JobCommand, json_schema_extra={"examples": [{"node": "10.0.0.7"}]}):
    """Have a running job use a node again that freshet drain had it leave."""

    name = "undrain"
    forms = (Form("undrain", "Undrain a node"),)

    node: Annotated[
        str,
        Argument("NODE"),
        FieldLimits({"min_length": 1, "max_length": 200}),
        Input("Node", choices=drained_nodes),
    ]
    """The drained node: its id, the beginning of one, or its address."""

    @classmethod
    def offered(cls, job: SeenJob) -> bool:
        return bool(job.ranks.drained)

    def says(self, job: SeenJob) -> str:
        drained = {node: notice.host for node, notice in job.ranks.drained.items()}
        if not any(node.startswith(self.node) or host == self.node for node, host in drained.items()):
            return f"The job was not asked to leave {self.node}: there is nothing to undo."
        return f"The job may start ranks on {self.node} again, once it lacks any."

    @classmethod
    def answer(cls, entry: CommandEntry, event: Event, step: int) -> Answered | None:
        from orchestrator.events.types import Undrained

        match event:
            case Undrained(id=id) as undrained if id == entry.command.id:
                return entry.answered(step, undrained.sentence, done=True)
            case _:
                return super().answer(entry, event, step)
