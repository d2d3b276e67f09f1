"""A plan's own freeze ratios: the solution of the freeze program that follows a move to it.

The ratios in force are the solution for another cut: with them a plan may look slower, or faster, than it will be.
"""

from __future__ import annotations

from planner.freeze.decision import profiled_ratios
from planner.freezing import Ratios
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile

MOST_S = 1.0
"""Time limit of all solves of one search."""
MOST_PROGRAMS = 16
"""Most programs that are solved."""
PROGRAM_S = 0.15
PROGRAM_ACTIONS = 2_000
"""A program of so many actions takes so long, and another one in proportion to the square of its actions."""


def affordable_programs(schedule: Schedule) -> int:
    """Number of programs of a schedule that there is time to solve. Derived from their size, so that the same question
    always has the same answer."""
    actions = sum(map(len, schedule.programs))
    return min(MOST_PROGRAMS, int(MOST_S / (PROGRAM_S * (actions / PROGRAM_ACTIONS) ** 2)))


def evenly(plan: Plan, r_max: float) -> Ratios:
    """Ratios that every plan's program allows: none of its solutions makes a longer window than these."""
    return ((r_max,) * plan.microbatches,) * plan.layers[-1][1]


def own_ratios(profile: Profile, plan: Plan, schedule: Schedule, r_max: float) -> Ratios | None:
    """Solve the freeze program for `plan`; None: freezing saves nothing with it, so that what is frozen stays."""
    try:
        return profiled_ratios(profile, plan, schedule, r_max)
    except ValueError:
        return None
