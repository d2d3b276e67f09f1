"""A replanner for four layers on two ranks."""

from __future__ import annotations

from made_profile import made_profile

from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.registry import build
from planner.search.replan import Replanner

FIRST = Plan(
    epoch=1,
    version=1,
    reason="first",
    layers=((0, 2), (2, 4)),
    stage_ranks=(0, 1),
    schedule="1f1b",
    chunks=1,
    microbatches=2,
    replicas=1,
)
TIGHT = 100_000_000
"""On one rank the four layers take some 64 MB, and 112 MB with three copies of their weights."""


def profiled(memory_bytes: int = TIGHT) -> Profile:
    """Four layers of a million parameters, 16 MB each with gradients and optimizer state."""
    return made_profile(["a", "b", "c", "d"], [10**6] * 4, 2, memory_bytes=memory_bytes)


def replanner(profile: Profile | None) -> Replanner:
    return Replanner(
        first=FIRST,
        schedule=build("1f1b", 2, 2, None),
        parameters=(10**6,) * 4,
        copies=0,
        profile=profile,
    )
