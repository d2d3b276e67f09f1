"""A command as a job's log has it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.events.types import Answered, Commanded


@dataclass
class CommandEntry:
    """A command in a job's log, and its answer."""

    command: Commanded
    step: int
    """Steps committed when it arrived."""
    answer: Answered | None = None
    """None while it is not decided."""
    freeze: tuple[int, int] | None = None
    """The key of the freeze plan that a freeze request led to."""

    def answered(self, step: int, text: str, *, done: bool) -> Answered:
        """An answer to the command."""
        return Answered(id=self.command.id, done=done, step=step, text=text)
