"""A replanner for four layers on two ranks."""

from __future__ import annotations

from lifecycle_jobs import plan_of
from made_profile import made_profile

from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.search.replan import Replanner

FIRST = plan_of(2, layers=4)
TIGHT = 70_000_000
"""On one rank the four layers take some 64 MB, and 76 MB with what APF keeps of them."""


def profiled(memory_bytes: int = TIGHT) -> Profile:
    """Four layers of a million parameters, 16 MB each with gradients and optimizer state."""
    return made_profile(["a", "b", "c", "d"], [10**6] * 4, 2, memory_bytes=memory_bytes)


def replanner(profile: Profile | None) -> Replanner:
    return Replanner(
        first=FIRST,
        schedule=schedule_of(FIRST),
        parameters=(10**6,) * 4,
        copies=0,
        profile=profile,
    )
