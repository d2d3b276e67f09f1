"""The commands that a job received from outside, and the one answer to each. Pure: events in, answers out.

The sender chooses a command's id: a command that is sent twice is done once. Each command declares which events answer
it (`orchestrator/commands/`); what became of a move, a drain or another number of ranks only the lifecycle knows: it
logs those answers itself. All that goes into a job's log passes through `logged`, which adds the answers and drops
second ones. The table holds the newest `KEPT` commands, and all that have no answer yet. It is part of a `JobView`, so
that a controller that takes over has it from snapshot and log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.commands.command import JobCommand
from orchestrator.commands.entry import CommandEntry
from orchestrator.commands.table import BY_LOG_NAME
from orchestrator.events.types import Answered, Commanded, Event, FreezeChanged
from workers.protocol.errors import JobError
from workers.protocol.reports import StepReport

KEPT = 300
"""Commands that are remembered; an older id that has its answer counts as new. Also how many may wait for theirs."""


class CommandIdReused(JobError):
    """An id was given to two different commands."""


@dataclass
class CommandTable:
    """The commands of one job since its newest start."""

    entries: dict[str, CommandEntry] = field(default_factory=dict)
    """By id, the oldest first."""
    step: int = 0
    """The newest committed step."""

    def find(self, id: str, name: str, arguments: Mapping[str, Any]) -> CommandEntry | None:
        """The entry of a command that arrived before; None if it is new.

        Raises:
            CommandIdReused: another command had this id.
        """
        entry = self.entries.get(id)
        if entry is None:
            return None
        if (entry.command.name, entry.command.arguments) != (name, dict(arguments)):
            raise CommandIdReused(
                f"command id {id!r} was used for {entry.command.name} {entry.command.arguments or ''}".rstrip()
                + f" and cannot be used for {name}: choose another id"
            )
        return entry

    def get(self, id: str) -> CommandEntry | None:
        """The entry with this id."""
        return self.entries.get(id)

    def pending(self) -> tuple[CommandEntry, ...]:
        """The commands that are not decided yet, the oldest first."""
        return tuple(entry for entry in self.entries.values() if entry.answer is None)

    def fold(self, event: Event) -> None:
        """Fold one more event in."""
        match event:
            case Commanded(id=id):
                self.entries[id] = CommandEntry(event, self.step)
                answered = [id for id, entry in self.entries.items() if entry.answer is not None]
                for old in answered[: max(0, len(self.entries) - KEPT)]:
                    del self.entries[old]
            case Answered(id=id):
                if (entry := self.entries.get(id)) is not None and entry.answer is None:
                    entry.answer = event
            case FreezeChanged(id=id, plan=plan):
                if (entry := self.entries.get(id)) is not None:
                    entry.freeze = plan.key
            case StepReport(step=step):
                self.step = step
            case _:
                for answer in self.decided(event):
                    self.entries[answer.id].answer = answer

    def logged(self, event: Event) -> tuple[Event, ...]:
        """Events to log for `event`: the answers that it gives, then the event itself, so that a job's end is the last
        line of its log. Empty for an answer to a command that has one."""
        if isinstance(event, Answered):
            entry = self.entries.get(event.id)
            return (event,) if entry is not None and entry.answer is None else ()
        return (*self.decided(event), event)

    def decided(self, event: Event) -> tuple[Answered, ...]:
        """The answers that `event` gives to pending commands."""
        answers = (
            BY_LOG_NAME.get(entry.command.name, JobCommand).answer(entry, event, self.step)
            for entry in self.pending()
        )
        return tuple(answer for answer in answers if answer is not None)
