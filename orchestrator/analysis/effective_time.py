"""Node-seconds of a rehearsal by use: the share in committed steps, and the causes of the rest.

Pure: history in, numbers out; `node_time.py` divides the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from orchestrator.analysis.node_time import PARTS, PER_EVENT, NodeUse, parts, spend
from orchestrator.events.rehearsed import CopiesSaved, Rehearsed
from orchestrator.history.recovery_history import LoggedGeneration, RecoveryHistory


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one membership change."""

    at_s: float
    """When the new generation began to train, in seconds of the rehearsal since the trace's beginning."""
    step: int
    cause: str
    reason: str
    lost: tuple[str, ...]
    """Names of nodes in the trace."""
    joined: tuple[str, ...]
    members: int
    """Ranks of the new generation."""
    rerun: int
    steps_lost: int
    parts_s: tuple[float, ...]
    """Parts of the recovery, as in `PARTS`."""
    node_seconds: dict[NodeUse, float]
    until_commit_s: float | None
    """From the first node's failure to the next commit."""

    @property
    def total_node_seconds(self) -> float:
        return sum(self.node_seconds.values())


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Percentiles of durations, in seconds."""

    p50: float
    p95: float
    max: float


@dataclass(frozen=True, kw_only=True)
class EffectiveTime:
    """A rehearsal in numbers."""

    ratio: float
    """Effective training time ratio: node-seconds that ended in committed steps over live node-seconds."""
    ratio_at_speed_1: float
    """The ratio without speedup: costs per event as measured, everything else as long as in the trace."""
    emulated: bool
    """Whether the steps' computation was modelled."""
    speedup: float
    seconds: float
    """Length of the rehearsal."""
    node_seconds: dict[NodeUse, float]
    losses: int
    """Nodes that failed."""
    joins: int
    """Nodes that joined after the beginning."""
    steps: int
    """Steps that were committed in the rehearsal and stand."""
    step_s: float
    """Median step."""
    rerun: int
    """Steps in flight that were run again, over the whole job: a recovery may end after the rehearsal does."""
    steps_lost: int
    """Committed steps that were run again because no checkpoint had them, over the whole job. The ledger of `freshet
    verify` counts the same."""
    lost_per_loss: float
    """Node-seconds per failed node: steps in flight, recovery, steps undone."""
    lost_per_join: float
    """Node-seconds per joined node: until it trained, and the regroupings for it."""
    recovery_s: dict[str, Spread]
    """After failures: each of `PARTS`, their `total`, and `commit`: from a node's failure to the next commit."""
    costs: tuple[Cost, ...]
    copies: tuple[CopiesSaved, ...]
    """Savings of layer copies on the whole trace; empty if unknown."""

    @property
    def live(self) -> float:
        """Live node-seconds."""
        return sum(self.node_seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return {
            **asdict(self),
            "live_node_seconds": self.live,
            "costs": [
                {
                    **asdict(cost),
                    "parts_s": dict(zip(PARTS, cost.parts_s, strict=True)),
                    "total_node_seconds": cost.total_node_seconds,
                }
                for cost in self.costs
            ],
        }


def effective_time(history: RecoveryHistory, *, emulated: bool) -> EffectiveTime | None:
    """Use of the node-seconds; None if no trace was replayed."""
    rehearsed = history.rehearsed
    if rehearsed is None:
        return None
    spent = spend(history, rehearsed)
    costs = tuple(
        _cost(history, rehearsed, generation, spent.by_generation.get(index, {}))
        for index, generation in enumerate(history.generations)
        if generation.trains_s is not None and rehearsed.began_s <= generation.trains_s <= rehearsed.ended_s
    )
    return _numbers(history, rehearsed, emulated, spent.by_use, costs)


def _cost(
    history: RecoveryHistory, rehearsed: Rehearsed, generation: LoggedGeneration, price: dict[NodeUse, float]
) -> Cost:
    regrouped, trains_s = generation.regrouped, generation.trains_s
    assert regrouped is not None
    assert trains_s is not None
    names = {life.node: life.name for life in rehearsed.lives}
    downs = {life.node: life.down_s for life in rehearsed.lives}

    def named(ranks: Sequence[int]) -> tuple[str, ...]:
        homes = [history.homes.get(rank, "") for rank in ranks]
        return tuple(names.get(home, f"rank {rank}") for rank, home in zip(ranks, homes, strict=True))

    died = [
        down_s for rank in regrouped.lost if (down_s := downs.get(history.homes.get(rank, ""))) is not None
    ]
    commit_s, until_commit_s = generation.committed_s, None
    if regrouped.cause == "loss" and died and commit_s is not None and min(died) < commit_s:
        until_commit_s = commit_s - min(died)
    return Cost(
        at_s=trains_s - rehearsed.began_s,
        step=regrouped.step,
        cause=regrouped.cause,
        reason=regrouped.reason,
        lost=named(regrouped.lost),
        joined=named(regrouped.joined),
        members=len(generation.members),
        rerun=regrouped.rerun,
        steps_lost=regrouped.steps_lost,
        parts_s=parts(regrouped),
        node_seconds=price,
        until_commit_s=until_commit_s,
    )


def _numbers(
    history: RecoveryHistory,
    rehearsed: Rehearsed,
    emulated: bool,
    spent: dict[NodeUse, float],
    costs: tuple[Cost, ...],
) -> EffectiveTime:
    live = sum(spent.values())
    fixed = sum(spent[use] for use in PER_EVENT)
    lasting = live - fixed - spent[NodeUse.TRAINED]
    lives = rehearsed.lives
    losses = sum(
        life.down_s is not None and rehearsed.began_s <= life.down_s <= rehearsed.ended_s for life in lives
    )
    joins = sum(rehearsed.began_s < life.up_s <= rehearsed.ended_s for life in lives)
    inside = [commit for commit in history.commits if rehearsed.began_s < commit.time_s <= rehearsed.ended_s]
    for_joins = sum(cost.total_node_seconds for cost in costs if cost.cause == "join")
    after_losses = [cost for cost in costs if cost.cause == "loss"]
    durations = {part: [cost.parts_s[index] for cost in after_losses] for index, part in enumerate(PARTS)}
    durations["total"] = [sum(cost.parts_s) for cost in after_losses]
    durations["commit"] = [cost.until_commit_s for cost in after_losses if cost.until_commit_s is not None]
    return EffectiveTime(
        ratio=spent[NodeUse.TRAINED] / live if live else 0.0,
        ratio_at_speed_1=1 - (fixed / rehearsed.speedup + lasting) / live if live else 0.0,
        emulated=emulated,
        speedup=rehearsed.speedup,
        seconds=rehearsed.ended_s - rehearsed.began_s,
        node_seconds=spent,
        losses=losses,
        joins=joins,
        steps=sum(commit.steps for commit in inside if commit.voided_by is None),
        step_s=median((b.time_s - a.time_s) / b.steps for a, b in pairwise(inside))
        if len(inside) > 1
        else 0.0,
        rerun=sum(each.regrouped.rerun for each in history.generations if each.regrouped is not None),
        steps_lost=history.undone,
        lost_per_loss=(fixed - spent[NodeUse.JOINING] - for_joins) / losses if losses else 0.0,
        lost_per_join=(spent[NodeUse.JOINING] + for_joins) / joins if joins else 0.0,
        recovery_s={part: spread(times) for part, times in durations.items() if times},
        costs=costs,
        copies=rehearsed.copies,
    )


def spread(durations_s: Sequence[float]) -> Spread:
    """Percentiles of at least one duration."""
    p50, p95 = np.percentile(durations_s, [50, 95])
    return Spread(p50=float(p50), p95=float(p95), max=max(durations_s))
