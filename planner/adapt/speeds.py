"""Slowdown of each rank: measured stage times over those that the profile expects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.ir import ActionKind
from planner.observed import StageTime
from planner.plan import Plan
from planner.profile import Profile

LEAST, MOST = 0.05, 100.0
"""Bounds of a believable slowdown."""
NOTHING_EXPECTED = "none of its actions has an expected time"


@dataclass(frozen=True)
class RankSlowdowns:
    """Slowdown by rank number: the factor on the profile's times. Ranks that have not been measured have none."""

    by_rank: tuple[tuple[int, float], ...] = ()
    """(rank, slowdown), ascending."""

    def of(self, ranks: Sequence[int]) -> tuple[float | None, ...]:
        """Slowdown of each of `ranks`; None where nothing is known."""
        known = dict(self.by_rank)
        return tuple(known.get(rank) for rank in ranks)

    def but(self, changed: Iterable[tuple[int, float]]) -> RankSlowdowns:
        """A copy with the slowdowns that `changed` names replaced."""
        return RankSlowdowns(tuple(sorted({**dict(self.by_rank), **dict(changed)}.items())))

    def among(self, ranks: Iterable[int]) -> RankSlowdowns:
        """Slowdowns of `ranks` alone."""
        kept = frozenset(ranks)
        return RankSlowdowns(tuple(entry for entry in self.by_rank if entry[0] in kept))

    def far_from(self, other: RankSlowdowns, factor: float) -> bool:
        """Whether a rank's slowdown differs from that in `other` by more than `factor`, or is new or gone."""
        mine, theirs = dict(self.by_rank), dict(other.by_rank)
        if mine.keys() != theirs.keys():
            return True
        return any(abs(math.log(mine[rank] / theirs[rank])) > math.log(factor) for rank in mine)


NONE_KNOWN = RankSlowdowns()
"""Before anything is measured."""


def slowdown_of(
    profile: Profile,
    plan: Plan,
    pipeline_rank: int,
    times: Iterable[StageTime],
    *,
    frozen: bool,
    prefix: int = 0,
) -> tuple[float | None, str]:
    """(the slowdown of the rank at `pipeline_rank` in one step, why there is none or "").

    Args:
        plan: the plan that the step was trained with.
        frozen: whether weight gradients may have been left out: then only the other actions tell.
        prefix: layers, from the input up, that had no backward pass.
    """
    expected_s = measured_s = 0.0
    for time in times:
        if time.kind not in set(ActionKind) or not 0 <= time.stage < plan.stages:
            return None, f"no such action: {time.kind} of stage {time.stage}, of {plan.stages}"
        if plan.stage_ranks[time.stage] != pipeline_rank:
            return None, f"stage {time.stage} is rank {plan.stage_ranks[time.stage]}'s, not {pipeline_rank}'s"
        if not (math.isfinite(time.seconds) and time.seconds >= 0 and time.count > 0):
            return (
                None,
                f"{time.kind} of stage {time.stage} took {time.seconds} s in {time.count} microbatches",
            )
        kind = ActionKind(time.kind)
        # Of an update no time is expected.
        if kind is ActionKind.UPDATE or (frozen and kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)):
            continue
        once_s = _expected_s(profile, plan, kind, time.stage, prefix)
        expected_s += once_s * time.count
        measured_s += time.seconds
    if expected_s <= 0:
        return None, NOTHING_EXPECTED
    slowdown = measured_s / expected_s
    if not LEAST <= slowdown <= MOST:
        return None, f"its actions took {slowdown:.3g} times as long as expected, which is not believable"
    return slowdown, ""


def _expected_s(profile: Profile, plan: Plan, kind: ActionKind, stage: int, prefix: int) -> float:
    """Seconds of one action on a device whose slowdown is 1."""
    first, stop = plan.layers[stage]
    layers, trained = profile.model.layers, range(max(first, prefix), stop)
    match kind:
        case ActionKind.FORWARD:
            return sum(layer.forward_s for layer in layers[first:stop])
        case ActionKind.BACKWARD:
            return sum(layers[layer].backward_s for layer in trained)
        case ActionKind.INPUT_GRAD:
            return sum(layers[layer].input_grad_s for layer in trained)
        case ActionKind.WEIGHT_GRAD:
            return sum(layers[layer].weight_grad_s for layer in trained)
        case ActionKind.RECOMPUTE:
            return sum(layers[layer].forward_s for layer in trained if layer in plan.recompute)
        case ActionKind.UPDATE:
            raise AssertionError("updates are left out")
