"""Memory limit of plans for a rank that has less than its whole device, from what happened there, and the cut that
keeps to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from planner.plan import Plan, PlanError
from planner.search import recut
from planner.search.recut import predicted
from planner.search.replan import Replanner
from planner.wording import seconds

SAFE = 0.95
"""Share of what a rank is known to hold that the next plan may take: what predictions err, and what lies between an
allocator's blocks."""


def limit_after_failure(replanner: Replanner, failed: Plan, place: int, held_bytes: int | None) -> int | None:
    """The most memory that a plan may take at `place`, where an allocation failed under the plan `failed`; None
    without a profile.

    Args:
        held_bytes: what the rank's tensors took when the allocation failed; None: unknown.
    """
    prediction = predicted(replanner, failed, ("",) * failed.world_size)
    if prediction is None:
        return None
    peak_bytes = prediction.memory.peak_bytes[failed.place(place).rank]
    return int(SAFE * (peak_bytes if held_bytes is None else min(peak_bytes, held_bytes)))


def limit_after_fall(replanner: Replanner, now: Plan, place: int, lacking_bytes: int) -> int | None:
    """The most memory that a plan may take at `place`, where `lacking_bytes` less are free than should be while the
    ranks follow `now`; None without a profile."""
    prediction = predicted(replanner, now, ("",) * now.world_size)
    if prediction is None:
        return None
    return max(1, prediction.memory.peak_bytes[now.place(place).rank] - lacking_bytes)


def relieve(
    replanner: Replanner, now: Plan, domains: Sequence[str], slowdowns: Sequence[float | None]
) -> tuple[Plan | None, str]:
    """The fastest cut for the same ranks that keeps within the limits of `replanner`, which `now` exceeds; None if
    there is none, or no need. And why.

    The order of the ranks stays: a rank that is short has no room for other layers beside its own. What orders and
    shares bring to the other ranks is weighed once there is time (`policy.py`).

    Args:
        domains: failure domain by place.
        slowdowns: by place.
    """
    before = predicted(replanner, now, domains, slowdowns)
    if before is None or before.fits:
        return None, "the plan keeps within the memory that the ranks have"
    try:
        best, _ = recut.best(replanner, now, domains, slowdowns)
    except PlanError as error:
        return None, f"no other cut keeps within the memory that the ranks have: {error}"
    best = replanner.with_standbys(best, domains)
    after = predicted(replanner, best, domains, slowdowns)
    assert after is not None, "there is a profile"
    if not after.fits:
        return (
            None,
            "with the copies that its places would keep, no other cut fits the memory that the ranks have",
        )
    over = max(range(len(before.excess_bytes)), key=lambda rank: before.excess_bytes[rank])
    taken = f"{before.memory.peak_bytes[over]:,} -> {after.memory.peak_bytes[over]:,} bytes"
    return best, (
        f"place {over} has less memory than it takes: {taken} with {list(best.layers_per_stage)} layers; expected step"
        f" {seconds(before.step_s)} -> {seconds(after.step_s)}"
    )
