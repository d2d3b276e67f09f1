"""`freshet move`: layers of a running job change ranks."""

from __future__ import annotations

from typing import Annotated

from orchestrator.commands.change import Impossible, WhatIfChange
from orchestrator.commands.command import FieldChoice, FieldLimits, Flag, Form, Input, PlanCommand
from orchestrator.commands.seen import NO_PLAN, SeenJob, plan_of

LAYERS = r"^\d{1,6}(-\d{1,6})?$"


def members(job: SeenJob) -> list[FieldChoice]:
    """The ranks that train."""
    return [FieldChoice(str(rank), str(rank)) for rank in sorted(job.ranks.members)]


class Move(PlanCommand, json_schema_extra={"examples": [{"layers": "3-4", "rank": 1}]}):
    """Move layers of a running job to another rank while it trains, as elastic.migration says: live, with the same
    bits; deferred, as DynPipe does; or stop, between two steps."""

    name = "move"
    forms = (Form("move", "Move layers"),)

    layers: Annotated[str, FieldLimits({"pattern": LAYERS}), Input("Layers", hint="such as 3 or 3-4")]
    """A layer, or a run of them: 3, or 3-4."""
    rank: Annotated[int, Flag("--to"), FieldLimits({"ge": 0, "le": 10**6}), Input("To rank", choices=members)]
    """Number of the rank that gets them; it has the layers before or after them."""

    def says(self, job: SeenJob) -> str:
        one = self.layers.isdecimal()
        return (
            f"{'Layer' if one else 'Layers'} {self.layers} {'moves' if one else 'move'} to rank {self.rank} while the"
            " job trains. The bits stay the same."
        )

    def change(self, job: SeenJob) -> WhatIfChange | str | None:
        from planner.plan import PlanError
        from planner.search.layer_move import parse_layers, with_layers

        plan, ranks = plan_of(job), job.ranks.members
        if plan is None:
            return NO_PLAN
        if self.rank not in ranks:
            there = ", ".join(map(str, sorted(ranks))) or "none"
            raise Impossible(f"rank {self.rank} has no place in the pipeline; ranks with a place: {there}")
        place = plan.place(ranks.index(self.rank)).rank
        try:
            return WhatIfChange(cut=with_layers(plan, *parse_layers(self.layers), place).layers_per_stage)
        except PlanError as error:
            raise Impossible(str(error)) from error
