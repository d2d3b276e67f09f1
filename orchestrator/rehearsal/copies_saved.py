"""Savings of layer copies on a trace: the losses that take the last holder of a layer, and their price in steps.

Pure. It replays the trace against the plans that the job's planner makes for the nodes that are there, one rank on
each. Between two losses every copy becomes current, and every step takes as long as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from orchestrator.events.rehearsed import CopiesSaved
from orchestrator.rehearsal.traces import NodeChangeKind, NodeTrace
from planner.plan import PlanError
from planner.search.replan import Replanner

COMPARED = 2
"""Most copies that are compared, if the job has no more."""


@dataclass(frozen=True)
class GroupLoss:
    """Nodes with a place that go in one instant."""

    time_ms: int
    """Since the trace's beginning."""
    nodes: tuple[str, ...]
    ranks: int
    """Ranks of the job until then."""
    last: bool
    """They are the last that hold some layer."""


def group_losses(trace: NodeTrace, replanner: Replanner) -> list[GroupLoss]:
    """The losses of a job that has one rank on each node of `trace`, with the copies that `replanner` plans.

    What goes at a time goes in one instant. Survivors keep their order, newcomers fill the gaps, then follow.
    """
    most = replanner.first.world_size
    members: list[str] = []
    spare: list[str] = []
    losses: list[GroupLoss] = []
    for time_ms, changes in groupby(trace.changes, key=lambda change: change.time_ms):
        gone: set[str] = set()
        for change in changes:
            spare.append(change.node) if change.kind is NodeChangeKind.ADD else gone.add(change.node)
        lost = [node for node in members if node in gone]
        if lost:
            losses.append(
                GroupLoss(time_ms, tuple(lost), len(members), _takes_last(members, gone, replanner))
            )
        spare = [node for node in spare if node not in gone]
        filled = [node if node not in gone else (spare.pop(0) if spare else "") for node in members]
        members = [node for node in filled if node]
        while spare and len(members) < most:
            members.append(spare.pop(0))
    return losses


def _takes_last(members: Sequence[str], gone: set[str], replanner: Replanner) -> bool:
    """Whether no node is left that holds some layer of the plan for `members`."""
    try:
        plan, _ = replanner.plan_for(len(members), epoch=0, version=0, reason="", domains=members)
    except PlanError:  # the job waits for nodes; those that are there hold what they held
        return gone.issuperset(members)
    left = {place for place in range(plan.world_size) if members[place] not in gone}
    return any(
        left.isdisjoint((*plan.holders_of(piece), *plan.copies_of_piece(piece))) for piece in plan.pieces
    )


def copies_saved(
    trace: NodeTrace, replanner: Replanner, *, steps_per_s: float, every_steps: int, first_step: int = 0
) -> tuple[CopiesSaved, ...]:
    """Losses on `trace` with no copy, one copy and each further one, up to those of `replanner`.

    Args:
        steps_per_s: steps in a second of the trace.
        every_steps: between checkpoints; 0: there are none.
        first_step: committed when the trace begins.
    """
    most = max(COMPARED, replanner.copies)
    found: list[CopiesSaved] = []
    for copies in range(most + 1):
        # Without a profile: where copies are depends on the nodes, and a cut by parameters is at hand.
        losses = group_losses(trace, replace(replanner, copies=copies, copy_every=1, profile=None))
        lost = steps_lost(losses, steps_per_s=steps_per_s, every_steps=every_steps, first_step=first_step)
        last = sum(loss.last for loss in losses)
        found.append(CopiesSaved(copies=copies, losses=len(losses), last_holders=last, steps_lost=lost))
    return tuple(found)


def steps_lost(
    losses: Sequence[GroupLoss], *, steps_per_s: float, every_steps: int, first_step: int = 0
) -> int:
    """Committed steps that must be trained again after `losses`; a loss of a layer's last holder goes back to the
    newest checkpoint. The arguments are those of `copies_saved`."""
    lost, undone = 0, 0.0
    for loss in losses:
        done = int(first_step + loss.time_ms / 1e3 * steps_per_s - undone)
        if loss.last and done > 0:
            back = done - done // every_steps * every_steps if every_steps else done
            lost += back
            undone += back
    return lost
