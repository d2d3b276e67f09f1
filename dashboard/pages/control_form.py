"""A control as a form: its fields, what it will do in words, and what the simulator expects of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError

from dashboard.api.models import Answer, Model
from dashboard.pages.shown import Shown
from dashboard.service.access import Caller
from dashboard.service.problems import Problem
from dashboard.service.services import Services
from orchestrator.analysis.what_if import Change, what_if
from orchestrator.client.errors import JobError
from orchestrator.history.job_view import JobView
from orchestrator.report.step.what_if_part import words

B = TypeVar("B", bound=Model)


@dataclass(frozen=True)
class Field:
    """An input of a form."""

    name: str
    label: str
    kind: str = "text"
    """Of the HTML input."""
    hint: str = ""


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
    """What will happen."""
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
            said = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"]
                for each in error.errors()[:5]
            )
            raise Problem(422, said, action="Go back and correct it.") from None


def simulates(control: Control[B], view: JobView, body: B) -> bool:
    """Whether `expectation` asks the simulator."""
    try:
        return control.change is not None and isinstance(control.change(view, body), Change)
    except JobError:
        return False


def expectation(control: Control[B], shown: Shown, body: B) -> str:
    """What the simulator expects, or why it is asked nothing, in words; empty if there is nothing to simulate."""
    try:
        change = control.change(shown.view, body) if control.change is not None else None
        if change is None:
            return ""
        if isinstance(change, str):
            return f"Nothing is simulated: {change}."
        found = what_if(shown.view, shown.profile(), change)
    except JobError as error:
        return f"The simulator says: {error}."
    text = f"The simulator expects: {words(found)}."
    return text if found.then.prediction.fits else f"{text} It does not fit the memory."
