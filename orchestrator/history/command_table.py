"""The commands that a job received from outside, and the answer to each. Pure: events in, answers out.

The sender chooses a command's id: a command that is sent twice is done once. What became of a move, a drain or another
number of ranks only the lifecycle knows: it logs those answers itself. The table holds the newest `KEPT`
commands. It is part of a `JobView`, so that a controller that takes over has it from snapshot and log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.events.types import (
    Answered,
    Commanded,
    Event,
    Failed,
    Finished,
    Paused,
    Regrouped,
)
from planner.freezing import FreezePlan
from workers.protocol import CheckpointReport, FreezeStarted, JobError, StepReport

KEPT = 300
"""Commands that are remembered; an older id counts as new."""


class CommandIdReused(JobError):
    """An id was given to two different commands."""


@dataclass
class Entry:
    """One command."""

    command: Commanded
    step: int
    """Steps committed when it arrived."""
    answer: Answered | None = None
    """None while it is not decided."""


@dataclass
class CommandTable:
    """The commands of one job since its newest start."""

    entries: dict[str, Entry] = field(default_factory=dict)
    """By id, the oldest first."""
    step: int = 0
    """The newest committed step."""

    def find(self, id: str, name: str, arguments: Mapping[str, Any]) -> Entry | None:
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

    def get(self, id: str) -> Entry | None:
        """The entry with this id."""
        return self.entries.get(id)

    def pending(self) -> tuple[Entry, ...]:
        """The commands that are not decided yet, the oldest first."""
        return tuple(entry for entry in self.entries.values() if entry.answer is None)

    def take(self, event: Event) -> None:
        """Fold one more event in."""
        match event:
            case Commanded(id=id):
                self.entries[id] = Entry(event, self.step)
                for old in list(self.entries)[:-KEPT]:
                    del self.entries[old]
            case Answered(id=id):
                if (entry := self.entries.get(id)) is not None and entry.answer is None:
                    entry.answer = event
            case StepReport(step=step):
                self.step = step
            case _:
                for answer in self.decided(event):
                    self.entries[answer.id].answer = answer

    def decided(self, event: Event) -> tuple[Answered, ...]:
        """The answers that `event` gives to pending commands. They are logged before the event itself."""
        return tuple(self._decided(event))

    def _decided(self, event: Event) -> Iterator[Answered]:
        pending = self.pending()
        match event:
            case CheckpointReport(step=step, path=path, error=error):
                for entry in pending:
                    if entry.command.name == "checkpoint" and step >= entry.step:
                        text = f"checkpoint of step {step} in {path}"
                        yield _answer(
                            entry, step, text if error is None else f"{text} failed: {error}", error is None
                        )
            case FreezeStarted(plan=plan):
                asked = [entry for entry in pending if entry.command.name == "freeze"]
                answered = [number for number, entry in enumerate(asked) if follows(plan, entry)]
                for entry in asked[: answered[-1]] if answered else ():
                    yield _answer(entry, self.step, "another freeze request took its place", False)
                for entry in asked[answered[-1] : answered[-1] + 1] if answered else ():
                    yield _answer(entry, self.step, f"all ranks follow it from step {plan.start} on", True)
            case Paused(step=step, requested=True):
                for entry in pending:
                    if entry.command.name == "pause":
                        yield _answer(entry, step, f"paused at step {step}", True)
            case Regrouped(step=step):
                for entry in pending:
                    if entry.command.name == "resume":
                        yield _answer(entry, step, f"trains on from step {step}", True)
            case Finished(step=step, stopped=stopped):
                for entry in pending:
                    done = entry.command.name in ("stop", "abort")
                    text = f"stopped at step {step}" if stopped else f"trained to its last step, {step}"
                    yield _answer(entry, step, text if done else f"the job ended first: {text}", done)
            case Failed(reason=reason):
                for entry in pending:
                    yield _answer(
                        entry, self.step, f"the job failed: {reason}", entry.command.name == "abort"
                    )
            case _:
                return


def follows(plan: FreezePlan, entry: Entry) -> bool:
    """Whether `plan` carries the settings that the freeze request asks for."""
    control, arguments = plan.control, entry.command.arguments
    return (
        control is not None
        and arguments.get("method") in (None, control.method)
        and arguments.get("r_max") in (None, control.r_max)
    )


def _answer(entry: Entry, step: int, text: str, done: bool) -> Answered:
    return Answered(id=entry.command.id, done=done, step=step, text=text)
