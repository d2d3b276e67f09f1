"""`JobCommand`: all that a command to a running job declares once, for the command line, REST, pages, clients and log.

A field's annotation carries how each face shows it: `Flag` or `Argument` on the command line, `FieldLimits` over REST,
`Input` on a page. Its docstring is its help.

The command line imports the commands for each of its calls: they import the events' types and the planner, which take
as long as all else, only in the methods that look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo

from orchestrator.commands.change import WhatIfChange
from orchestrator.commands.seen import SeenJob
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from orchestrator.commands.entry import CommandEntry
    from orchestrator.events.types import Answered, Commanded, Event

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """An option of the command line with another name than its field."""

    name: str


@dataclass(frozen=True)
class Argument:
    """A field that is an argument of the command line."""

    metavar: str


@dataclass(frozen=True)
class FieldLimits:
    """Bounds of a field over REST; whatever passes them, the controller checks."""

    bounds: Mapping[str, Any]
    """Arguments of pydantic's `Field`."""
    kind: Any = None
    """The type over REST, if it is another one."""


@dataclass(frozen=True)
class FieldChoice:
    """One of the values that an input may have."""

    value: str
    text: str


@dataclass(frozen=True)
class Input:
    """A field's input on a form."""

    label: str
    hint: str = ""
    step: str = ""
    """`step` of a number input; empty: 1."""
    most: str = ""
    """The largest number."""
    choices: Callable[[SeenJob], Sequence[FieldChoice]] | None = None
    """The values to choose from; None: there are too many."""
    read: Callable[[str], object] = str
    """Makes the field's value of the text."""


@dataclass(frozen=True)
class Form:
    """A form for a command on a job's page."""

    name: str
    """In its address."""
    button: str
    danger: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the form sets itself."""


class JobCommand(BaseModel):
    """A command to a running job."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    id: str | None = None
    """Chosen by the sender: a command that is sent twice with one id is done once; None: a random one."""
    by: str = ""
    """The sender, for the log; over REST the service logs the token's role and the sender's address instead."""

    name: ClassVar[str]
    """On the command line, and in the log."""
    route: ClassVar[str] = ""
    """Below the job's address over REST; empty: the name."""
    forms: ClassVar[tuple[Form, ...]] = ()
    """None: a page does not send it."""
    derived: ClassVar[bool] = True
    """Whether its line on the command line is made from its fields; otherwise `orchestrator/cli/commands` has it."""
    waits: ClassVar[bool] = False
    """Whether the command line waits for its outcome unless told otherwise."""
    ends: ClassVar[bool] = False
    """Whether the job's end is what it asks for."""
    repeatable: ClassVar[bool] = False
    """Whether a controller that takes over carries it out once more, if the one before it may not have."""
    at_once: ClassVar[bool] = False
    """Whether it is done once the controller has carried it out; otherwise an event, or the lifecycle, answers it."""
    some: ClassVar[tuple[str, ...]] = ()
    """Fields of which one must be given."""
    question: ClassVar[str] = ""
    """Asked of a user who gives none of them."""

    @classmethod
    def own_fields(cls) -> dict[str, FieldInfo]:
        """The fields that this command has and others have not."""
        shared = PlanCommand.model_fields
        return {name: info for name, info in cls.model_fields.items() if name not in shared}

    @classmethod
    def log_names(cls) -> tuple[str, ...]:
        """Names that it goes by in the log."""
        return (cls.name,)

    @classmethod
    def parse(cls, command: Commanded) -> JobCommand:
        """The command that `command` records.

        Raises:
            ValueError: its arguments are not those of this command.
        """
        return cls(id=command.id, by=command.by, **command.arguments)

    @property
    def key(self) -> str:
        """Its id, once it has one."""
        assert self.id is not None
        return self.id

    @property
    def log_name(self) -> str:
        """Its name in the log, and for the controller."""
        return self.name

    def arguments(self) -> dict[str, Any]:
        """Its arguments in the log, and for the controller, as JSON values."""
        return self.model_dump(mode="json", include={*self.own_fields()})

    def body(self) -> Mapping[str, Any] | None:
        """Its body over REST."""
        return self.model_dump(mode="json", include={*self.own_fields()}) or None

    @classmethod
    def offered(cls, job: SeenJob) -> bool:
        """Whether a job's page has its forms."""
        return True

    def says(self, job: SeenJob) -> str:
        """Its effect, for someone who has the button before them."""
        return self.__doc__ or ""

    def change(self, job: SeenJob) -> WhatIfChange | str | None:
        """The change that the simulator is asked about, or why it is asked nothing; None: there is nothing to simulate.

        Raises:
            Impossible: no plan can do it.
        """
        return None

    @classmethod
    def simulates(cls) -> bool:
        """Whether some of its values can be simulated."""
        return cls.change is not JobCommand.change

    @classmethod
    def answer(cls, entry: CommandEntry, event: Event, step: int) -> Answered | None:
        """The answer that `event` gives to the pending command `entry`; None: none.

        Args:
            step: steps committed.
        """
        from orchestrator.events.types import Failed, Finished

        match event:
            case Finished(step=last, stopped=stopped):
                done = f"trained to its last step, {last}"
                if event.reached:
                    done = f"reached {event.reached} at step {last}"
                elif event.plateau:
                    done = f"done at step {last}, {event.plateau}"
                text = f"stopped at step {last}" if stopped else done
                return entry.answered(
                    last, text if cls.ends else f"the job ended first: {text}", done=cls.ends
                )
            case Failed(reason=reason):
                # A job that is to end at once has no checkpoint to fail at.
                return entry.answered(step, f"the job failed: {reason}", done=entry.command.name == "abort")
            case _:
                return None


class PlanCommand(JobCommand):
    """A command that is for one plan of the job."""

    base: tuple[int, int] | None = None
    """(epoch, version) of the plan that the sender decided on: `PlanChanged` is raised if the job has a newer one;
    None: whichever is the newest."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | ({} if self.base is None else {"base": list(self.base)})

    @field_validator("base", mode="before")
    @classmethod
    def _is_version(cls, base: object) -> object:
        match base:
            case None | [int(), int()]:
                return base
            case other:
                raise JobError(
                    f"{other!r} is no version of a plan: give its epoch and version, such as [1, 2]"
                )


def metadata(info: FieldInfo, kind: type[T]) -> T | None:
    """The first value of `kind` in the annotation of a field; None: there is none."""
    return next((each for each in info.metadata if isinstance(each, kind)), None)


def refused_fields(error: ValidationError) -> str:
    """Fields that `error` refuses, each with the reason."""
    reasons: dict[str, list[str]] = {}
    for each in error.errors():  # one for each branch of a union
        reasons.setdefault(str(each["loc"][0]) if each["loc"] else "", []).append(each["msg"])
    return "; ".join(f"{field}: {' or '.join(dict.fromkeys(said))}" for field, said in reasons.items())
