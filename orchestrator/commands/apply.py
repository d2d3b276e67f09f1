"""`freshet plan --job --apply`: a running job takes up another cut of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from orchestrator.commands.change import WhatIfChange
from orchestrator.commands.command import FieldLimits, Form, Input, PlanCommand
from orchestrator.commands.seen import SeenJob, plan_of

Layers = Annotated[int, Field(ge=1, le=100_000)]


def parse_cut(text: str) -> object:
    """The entries of a cut as a form has it: `3+2+1`."""
    return text.replace("+", ",").replace(" ", "").split(",")


class Apply(PlanCommand, json_schema_extra={"examples": [{"partition": [3, 2, 1, 2], "version": "1.2"}]}):
    """Have the ranks take up a partition while the job trains."""

    name = "plan"
    forms = (Form("plan", "Apply a cut"),)
    derived = False

    partition: Annotated[
        Sequence[Any],
        FieldLimits({"min_length": 1, "max_length": 4096}, list[Layers]),
        Input("Layers per stage", hint="such as 3+2+1+2", read=parse_cut),
    ]
    """Layers per stage."""

    def says(self, job: SeenJob) -> str:
        plan = plan_of(job)
        cut = " + ".join(map(str, self.partition))
        today = " + ".join(map(str, plan.layers_per_stage)) if plan is not None else "none"
        return (
            f"The ranks take up {cut} layers per stage, in place of {today}, while the job trains."
            " The bits stay the same."
        )

    def change(self, job: SeenJob) -> WhatIfChange | str | None:
        return WhatIfChange(cut=tuple(self.partition))
