"""The table of commands: a row per command, in the order of the command line and of a job's page.

A row is also the method by which a client sends the command. Its effect is a case in
`orchestrator/controller/client_commands.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from pydantic import ValidationError

from orchestrator.commands.apply import Apply
from orchestrator.commands.cancel import Cancel
from orchestrator.commands.checkpoint import Checkpoint
from orchestrator.commands.command import JobCommand, refused_fields
from orchestrator.commands.drain import Drain
from orchestrator.commands.fault import InjectFault
from orchestrator.commands.freeze import Freeze
from orchestrator.commands.move import Move
from orchestrator.commands.pause import Pause
from orchestrator.commands.resume import Resume
from orchestrator.commands.scale import Scale
from orchestrator.commands.undrain import Undrain
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from orchestrator.events.types import Commanded

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Sender(Protocol[R]):
    """A client of jobs, that waits for the answer or not."""

    def send(self, job: str, command: JobCommand) -> R: ...


class Sends(Generic[P]):
    """A client's method that sends one command: the job's name, then the command's fields.

    Args:
        kind: the command.
        fixed: fields that the method sets itself.
    """

    def __init__(self, kind: Callable[P, JobCommand], **fixed: object) -> None:
        self.kind: Any = kind
        self._fixed = fixed

    @overload
    def __get__(self, client: None, owner: type[Any]) -> Sends[P]: ...

    @overload
    def __get__(self, client: Sender[R], owner: type[Any]) -> Callable[Concatenate[str, P], R]: ...

    def __get__(self, client: Any, owner: type[Any]) -> Any:
        if client is None:
            return self

        def send(job: str, *given: Any, **fields: Any) -> Any:
            names = tuple(self.kind.own_fields())
            if len(given) > len(names):
                raise TypeError(
                    f"{len(given)} values without a name, where {self.kind.name} has {len(names)}: name the others"
                )
            ordered = dict(zip(names, given, strict=False))
            try:
                command = self.kind(**ordered, **self._fixed, **fields)
            except ValidationError as error:
                raise JobError(f"{self.kind.name}: {refused_fields(error)}") from error
            return client.send(job, command)

        send.__doc__ = self.kind.__doc__
        return send


class Steering:
    """The commands, as methods of a client."""

    checkpoint = Sends(Checkpoint)
    pause = Sends(Pause)
    resume = Sends(Resume)
    stop = Sends(Cancel)
    abort = Sends(Cancel, abort=True)
    move = Sends(Move)
    drain = Sends(Drain)
    undrain = Sends(Undrain)
    scale = Sends(Scale)
    freeze = Sends(Freeze)
    apply = Sends(Apply)
    fault = Sends(InjectFault)


COMMANDS: tuple[type[JobCommand], ...] = tuple(
    dict.fromkeys(row.kind for row in vars(Steering).values() if isinstance(row, Sends))
)
"""Each command once."""
BY_LOG_NAME = {name: kind for kind in COMMANDS for name in kind.log_names()}
"""Name in the log -> command."""


def parsed(command: Commanded) -> JobCommand:
    """The command that the log records as `command`.

    Raises:
        JobError: there is no such command.
    """
    try:
        return BY_LOG_NAME[command.name].parse(command)
    except (KeyError, TypeError, ValidationError) as error:
        raise JobError(f"no such command: {command.name} {command.arguments}") from error
