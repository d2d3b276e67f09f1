"""A control as a form: its fields, what it will do in words, and what the simulator expects of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError

from dashboard.api.models import Answer, Model
from dashboard.pages.shown import Shown
from dashboard.service.access import Caller
from dashboard.service.mistakes import mistakes
from dashboard.service.problems import Problem
from dashboard.service.services import Services
from orchestrator.analysis.what_if import Change, Impossible, what_if
from orchestrator.client.errors import JobError
from orchestrator.history.job_view import JobView
from orchestrator.report.step.what_if_part import words

B = TypeVar("B", bound=Model)


@dataclass(frozen=True)
class Choice:
    """One of the values that a field may have."""

    value: str
    text: str


@dataclass(frozen=True)
class Field:
    """An input of a form."""

    name: str
    label: str
    kind: str = "text"
    """`type` of the HTML input."""
    hint: str = ""
    needed: bool = False
    """Whether the form cannot do without it."""
    step: str = ""
    """`step` of a number input; empty: 1."""
    most: str = ""
    """The largest number."""
    choices: Callable[[JobView], Sequence[Choice]] | None = None
    """The values to choose from; None: there are too many."""


@dataclass(frozen=True)
class Sending:
    """Who sends what to which job."""

    job: str
    parts: Services
    by: Caller
    key: str


@dataclass(frozen=True, kw_only=True)
class Control(Generic[B]):
    """A control."""

    name: str
    button: str
    model: type[B]
    fields: tuple[Field, ...] = ()
    says: Callable[[JobView, B], str]
    """Description of what the control will do."""
    change: Callable[[JobView, B], Change | str] | None = None
    """The change that the simulator is asked about, or why it is asked nothing; no function: there is nothing to
    simulate."""
    send: Callable[[Sending, B], Awaitable[Answer]]
    danger: bool = False

    def parse(self, given: Mapping[str, str]) -> B:
        """The fields of a form.

        Raises:
            Problem: they are not valid; says which.
        """
        known = {field.name for field in self.fields} | self.model.model_fields.keys()
        filled = {name: value for name, value in given.items() if name in known and value != ""}
        try:
            return self.model.model_validate(filled)
        except ValidationError as error:
            labels = {field.name: field.label for field in self.fields}
            said = mistakes(error.errors(), labels)
            raise Problem(422, said, action="Go back and correct it.") from None


@dataclass(frozen=True)
class Expected:
    """The simulator's word on a control."""

    text: str
    """Empty if there is nothing to simulate."""
    possible: bool = True
    """False: no plan does what is asked, so that the job would refuse it."""


def simulates(control: Control[B], view: JobView, body: B) -> bool:
    """Whether `expectation` asks the simulator."""
    try:
        return control.change is not None and isinstance(control.change(view, body), Change)
    except JobError:
        return False


def expectation(control: Control[B], shown: Shown, body: B) -> Expected:
    """The simulator's prediction for a control, or why it is asked nothing."""
    try:
        change = control.change(shown.view, body) if control.change is not None else None
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
