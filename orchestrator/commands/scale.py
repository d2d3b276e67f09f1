"""`freshet scale`: gives a running job more or fewer ranks."""

from __future__ import annotations

from typing import Annotated

from orchestrator.commands.change import WhatIfChange
from orchestrator.commands.command import FieldLimits, Form, Input, PlanCommand
from orchestrator.commands.seen import SeenJob
from planner.wording import counted


class Scale(PlanCommand, json_schema_extra={"examples": [{"ranks": 4, "spares": 1}]}):
    """Give a running job another number of ranks, pipelines or spares from now on, with the same bits."""

    name = "scale"
    forms = (Form("scale", "Scale"),)
    some = ("ranks", "pipelines", "spares")
    question = "scale to what?"

    ranks: Annotated[int | None, FieldLimits({"ge": 1, "le": 10**6}), Input("Ranks of the pipeline")] = None
    """Ranks of each of the job's pipelines."""
    pipelines: Annotated[int | None, FieldLimits({"ge": 0, "le": 10**6}), Input("Pipelines")] = None
    """Pipelines to run, at most the job's replicas; 0: as many as the planner chooses."""
    spares: Annotated[int | None, FieldLimits({"ge": 0, "le": 10**6}), Input("Spares")] = None
    """Idle ranks that replace lost ones."""

    def says(self, job: SeenJob) -> str:
        wanted = [counted(self.pipelines, "pipeline") if self.pipelines else ""]
        each = " each" if self.pipelines else ""
        wanted.append(f"{counted(self.ranks, 'rank')}{each}" if self.ranks is not None else "")
        wanted.append(counted(self.spares, "spare") if self.spares is not None else "")
        return (
            f"The job trains with {' and '.join(filter(None, wanted))} from now on: it shrinks at a commit, and grows"
            " once the new ranks are up. The bits stay the same."
        )

    def change(self, job: SeenJob) -> WhatIfChange | str | None:
        if self.ranks is None and self.pipelines is None:
            return "spares hold no layers and compute nothing, so that the step stays as it is"
        return WhatIfChange(ranks=self.ranks, pipelines=self.pipelines or None)
