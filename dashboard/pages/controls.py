"""Controls of a job: the forms of the table's commands, and what the simulator expects of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from dashboard.api.controls import BODIES, command_of
from dashboard.pages.shown import Shown
from dashboard.service.mistakes import mistakes
from dashboard.service.problems import ProblemAnswer
from orchestrator.analysis.what_if import what_if
from orchestrator.client.errors import JobError
from orchestrator.commands.change import Impossible, WhatIfChange
from orchestrator.commands.command import FieldChoice, Form, Input, JobCommand, PlanCommand, metadata
from orchestrator.commands.table import COMMANDS
from orchestrator.history.job_view import JobView
from orchestrator.report.step.what_if_part import words


@dataclass(frozen=True)
class Field:
    """A field of a form."""

    name: str
    input: Input
    kind: str
    """`type` of the HTML input."""
    needed: bool
    """Whether the form cannot do without it."""


@dataclass(frozen=True)
class Control:
    """A command behind one of its forms."""

    command: type[JobCommand]
    form: Form

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(
            Field(
                name,
                shown,
                "number" if info.annotation in (int, float, int | None, float | None) else "text",
                info.is_required(),
            )
            for name, info in self.command.own_fields().items()
            if name not in self.form.fixed and (shown := metadata(info, Input)) is not None
        )

    @property
    def planned(self) -> bool:
        """Whether it is for one plan of the job."""
        return issubclass(self.command, PlanCommand)

    @property
    def names(self) -> frozenset[str]:
        """The fields that a request may fill in."""
        return frozenset(field.name for field in self.fields) | ({"version"} if self.planned else set())

    def parse(self, given: Mapping[str, str], *, id: str | None = None, by: str = "") -> JobCommand:
        """The command that a filled-in form asks for.

        Raises:
            ProblemAnswer: its fields are not valid; says which.
        """
        inputs = {field.name: field.input for field in self.fields}
        filled = {
            name: inputs[name].read(value) if name in inputs else value
            for name, value in given.items()
            if name in self.names and value != ""
        }
        model = BODIES[self.command]
        try:
            body = model.model_validate({**filled, **self.form.fixed}) if model is not None else None
        except ValidationError as error:
            said = mistakes(error.errors(), {name: shown.label for name, shown in inputs.items()})
            raise ProblemAnswer(422, said, action="Go back and correct it.") from None
        return command_of(self.command, body, id=id, by=by)


CONTROLS = {form.name: Control(command, form) for command in COMMANDS for form in command.forms}
"""The controls of a job, by name."""


@dataclass(frozen=True)
class Expected:
    """The simulator's word on a command."""

    text: str
    """Empty if there is nothing to simulate."""
    possible: bool = True
    """False: no plan does what is asked, so that the job would refuse it."""


def simulates(view: JobView, command: JobCommand) -> bool:
    """Whether `expectation` asks the simulator."""
    try:
        return isinstance(command.change(view), WhatIfChange)
    except JobError:
        return False


def expectation(shown: Shown, command: JobCommand) -> Expected:
    """The simulator's prediction for a command, or why it is asked nothing."""
    try:
        change = command.change(shown.view)
        if change is None:
            return Expected("")
        if isinstance(change, str):
            return Expected(f"Nothing is simulated: {change}.")
        found = what_if(shown.view, shown.profile(), change)
    except Impossible as error:
        return Expected(f"This is not possible: {error}.", possible=False)
    except JobError as error:
        return Expected(f"Nothing is simulated: {error}.")
    text = f"The simulator expects: {words(found)}."
    if found.then.prediction.fits:
        return Expected(text)
    return Expected(f"{text} It does not fit the memory.", possible=False)


@dataclass(frozen=True)
class ControlsPart:
    """The controls on a job's page."""

    simple: tuple[Control, ...]
    """Controls that need nothing but a button."""
    forms: tuple[tuple[Control, tuple[tuple[Field, Sequence[FieldChoice]], ...]], ...]
    """The others, each with its fields and what there is to choose from."""


def controls_part(shown: Shown) -> ControlsPart | None:
    """The controls for who looks; None for those who may not steer, and for a job that has ended."""
    if not shown.steers:
        return None
    view = shown.view
    offered = [control for control in CONTROLS.values() if control.command.offered(view)]
    return ControlsPart(
        simple=tuple(control for control in offered if not control.fields),
        forms=tuple(
            (
                control,
                tuple(
                    (field, field.input.choices(view) if field.input.choices else ())
                    for field in control.fields
                ),
            )
            for control in offered
            if control.fields
        ),
    )
