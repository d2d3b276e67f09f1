"""`freshet freeze`: changes how much of a running job's backward passes is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field, ValidationError

from orchestrator.commands.change import KEEP, Impossible, WhatIfChange
from orchestrator.commands.command import (
    FieldChoice,
    FieldLimits,
    Form,
    Input,
    PlanCommand,
    refused_fields,
)
from orchestrator.commands.seen import NO_PLAN, SeenJob, plan_of
from planner.freezing import budget_text, prefix_rule
from planner.wording import counted

if TYPE_CHECKING:
    from orchestrator.commands.entry import CommandEntry
    from orchestrator.events.types import Answered, Event

_Budget = Union[Annotated[float, Field(ge=0, le=1)], Literal["auto"], None]  # noqa: UP007
"""Type of `r_max` over REST."""
REPLACED = "another freeze request took its place"


def methods(job: SeenJob) -> list[FieldChoice]:
    """The freeze methods."""
    from orchestrator.spec.freeze_phases import METHODS

    now = job.freeze_section_at(job.step).get("method", "none")
    return [FieldChoice(method, f"{method} (now)" if method == now else method) for method in METHODS]


class Freeze(PlanCommand, json_schema_extra={"examples": [{"method": "timelyfreeze", "r_max": 0.5}]}):
    """Change what a running job freezes, from a commit on. The change is in the event log, and freshet train --replay
    repeats it."""

    name = "freeze"
    forms = (Form("freeze", "Freeze"),)
    some = ("method", "r_max", "least_update", "alpha", "prefix")
    question = "change what?"

    method: Annotated[str | None, Input("Method", choices=methods)] = Field(
        default=None, description="As freeze.method in a spec; none turns freezing off."
    )
    r_max: Annotated[
        float | Literal["auto"] | None,
        FieldLimits({}, _Budget),
        Input("r_max", hint="0 to 1, or auto"),
    ] = None
    """Largest mean share of a stage's weight gradients to leave out, 0 to 1; auto: as much as makes the time to a given
    accuracy least."""
    least_update: Annotated[
        float | None,
        FieldLimits({"gt": 0, "le": 1}),
        Input("Least update", hint="r_max auto: 0 to 1", step="any", most="1"),
    ] = None
    """With r_max auto: least share of a step's progress that is to be left."""
    alpha: Annotated[
        float | None,
        FieldLimits({"gt": 0, "lt": 1}),
        Input("alpha", hint="pipetransformer: 0 to 1", step="any", most="1"),
    ] = None
    """With method pipetransformer or timelyfreeze+pipetransformer: largest share of the layers still trained that one
    check freezes."""
    prefix: Annotated[
        int | None, FieldLimits({"ge": 0}), Input("Layers", hint="prefix: from the input up", step="1")
    ] = None
    """With method prefix or timelyfreeze+prefix: layers to freeze, from the input up."""

    def says(self, job: SeenJob) -> str:
        if self.method == "none":
            return "Nothing is frozen any more, from a commit on. The log says so, and --replay repeats it."
        what = [f"method {self.method}" if self.method is not None else ""]
        what.append(f"r_max {budget_text(self.r_max)}" if self.r_max is not None else "")
        what.append(f"least_update {self.least_update:g}" if self.least_update is not None else "")
        what.append(f"alpha {self.alpha:g}" if self.alpha is not None else "")
        what.append(f"{counted(self.prefix, 'layer')} frozen" if self.prefix is not None else "")
        return (
            f"Freezing goes on with {' and '.join(filter(None, what))} from a commit on. This changes the trajectory;"
            " the log says from which step, and --replay repeats it."
        )

    def change(self, job: SeenJob) -> WhatIfChange | str | None:
        """Change to simulate for the freeze program; what another method freezes is not known beforehand."""
        from orchestrator.spec.job_spec import Spec

        plan = plan_of(job)
        if plan is None:
            return NO_PLAN
        wanted = self.model_dump(include=set(self.some), exclude_none=True)
        try:
            then = Spec.model_validate(
                {**job.spec, "freeze": {**job.freeze_section_at(job.step), **wanted}}
            ).freeze
        except ValidationError as error:
            if any(each["loc"][:2] == ("freeze", "method") for each in error.errors()):
                return f"{self.method} is no freeze method"
            return refused_fields(error)
        if self.r_max is not None and not then.timely:
            return f"r_max changes nothing with method {then.method}: only a timelyfreeze method has a budget"
        rule, frozen = prefix_rule(then.method), 0
        if rule == "prefix":
            due = [0, *(layers for first, layers in then.schedule if first <= job.step + 1)]
            frozen, most = due[-1] if then.prefix is None else then.prefix, plan.layers[-1][1] - 1
            if frozen > most:
                raise Impossible(
                    f"prefix = {frozen} freezes {counted(frozen, 'layer')}, and the model has {most + 1}: the last one"
                    f" is never frozen, so give at most {most}"
                )
        elif rule is not None and rule == prefix_rule(str(job.freeze_section_at(job.step).get("method"))):
            frozen = None  # those of today, until its next check
        if then.timely:
            return WhatIfChange(cut=KEEP, r_max=then.r_max, least_update=then.least_update, frozen=frozen)
        if then.method == "none" or rule == "prefix":
            return WhatIfChange(cut=KEEP, r_max=0.0, frozen=frozen)
        return f"{then.method} freezes what has settled, which only training shows"

    @classmethod
    def answer(cls, entry: CommandEntry, event: Event, step: int) -> Answered | None:
        from workers.protocol.reports import FreezeStarted

        match event:
            case FreezeStarted(plan=plan) if entry.freeze == plan.key:
                return entry.answered(step, f"all ranks follow it from step {plan.start} on", done=True)
            case FreezeStarted(plan=plan) if entry.freeze is not None and entry.freeze < plan.key:
                return entry.answered(step, REPLACED, done=False)
            case _:
                return super().answer(entry, event, step)
