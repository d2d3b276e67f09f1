"""How much memory plans may take of a rank that has less than its device, by what happened there. Pure."""

from __future__ import annotations

from planner.plan import Plan
from planner.search.recut import predicted
from planner.search.replan import Replanner

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
