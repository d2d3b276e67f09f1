"""`freshet drain`: has a running job leave a node."""

from __future__ import annotations

from typing import Annotated

from orchestrator.commands.change import KEEP, WhatIfChange
from orchestrator.commands.command import Argument, FieldChoice, FieldLimits, Flag, Form, Input, PlanCommand
from orchestrator.commands.seen import NO_PLAN, SeenJob, plan_of, ranks_on
from orchestrator.quantities import seconds
from planner.wording import named_or_counted


def occupied_nodes(job: SeenJob) -> list[FieldChoice]:
    """The nodes that the job has ranks on."""
    ranks = job.ranks
    there: dict[str, list[int]] = {}
    for rank in sorted(ranks.alive):
        if node := ranks.nodes.get(rank):
            there.setdefault(node, []).append(rank)
    return [
        FieldChoice(node, f"{ranks.hosts.get(of[0]) or 'node'} ({node[:8]}): {named_or_counted('rank', of)}")
        for node, of in there.items()
    ]


class Drain(PlanCommand, json_schema_extra={"examples": [{"node": "10.0.0.7", "deadline_s": 30.0}]}):
    """Have a running job leave a node, as before a preemption: its ranks there hand over their layers, and it starts
    none there until freshet undrain. Other jobs stay."""

    name = "drain"
    forms = (Form("drain", "Drain a node", danger=True),)

    node: Annotated[
        str,
        Argument("NODE"),
        FieldLimits({"min_length": 1, "max_length": 200}),
        Input("Node", choices=occupied_nodes),
    ]
    """The node: its id, the beginning of one, or its address."""
    deadline_s: Annotated[
        float,
        Flag("--deadline"),
        FieldLimits({"gt": 0, "le": 86_400}),
        Input("Within, s", hint="30 if empty"),
    ] = 30.0
    """Seconds that the ranks have to hand over."""

    def says(self, job: SeenJob) -> str:
        there = ranks_on(job, self.node)
        if not there:
            return f"The job has no ranks on {self.node}: there is nothing to drain."
        ranks = ", ".join(map(str, sorted(there & {*job.ranks.members}))) or "none"
        return (
            f"The job leaves {self.node} within {seconds(self.deadline_s)}: the layers of its training ranks there"
            f" ({ranks}) move to ranks elsewhere, and it starts no ranks there until the node is undrained. Other jobs"
            " stay."
        )

    def change(self, job: SeenJob) -> WhatIfChange | str | None:
        """Change to simulate: without the ranks that leave and that no spare replaces."""
        plan, there = plan_of(job), ranks_on(job, self.node)
        lost = len(there & {*job.ranks.members}) - len({*job.ranks.spares} - there)
        if plan is None:
            return NO_PLAN
        if plan.pipeline_count != 1:
            return (
                f"the job has {plan.pipeline_count} pipelines, and how many the ranks that stay form is decided once"
                " they have left"
            )
        if lost >= plan.pipeline_ranks:
            return "no rank would be left, and the job waits until it has room elsewhere"
        return WhatIfChange(ranks=plan.pipeline_ranks - lost) if lost > 0 else WhatIfChange(cut=KEEP)
