"""Profile + plan + schedule -> what a step will take: time, bubble, memory, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean

from planner.freezing import Ratios
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.passes import repeat
from planner.simulation.costs import action_costs, outside_s
from planner.simulation.gradient_communication import (
    exchanged_s,
    shipped_bytes,
    shipped_s,
    standby_bytes,
    standby_update_s,
)
from planner.simulation.memory import Memory, OverTime, memory, memory_over_time
from planner.simulation.simulate import Simulation, simulate


@dataclass(frozen=True, kw_only=True)
class Redundancy:
    """What a plan's standbys cost."""

    bytes_per_step: int
    """That all owners send them."""
    seconds_per_step: float
    """That a step takes longer for them: their gradients on the way, and their updates where no rank waits anyway."""
    memory_bytes: int
    """Weights, optimizer state and gradients of copies, on the rank that keeps most."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One training step as it is expected to go. Memory is worked out when it is first asked for."""

    profile: Profile
    plan: Plan
    ratios: Ratios | None
    simulation: Simulation
    """Of one window. Each pipeline executes `plan.windows` of them in a row."""
    windows_s: float
    """All windows of a step: the makespan of the one, where there is one."""
    step_s: float
    """The windows, the exchange of gradients between replicas, those that standbys are sent, the update, the commit."""
    redundancy: Redundancy
    """Part of `step_s` and of the memory."""

    @property
    def bubble(self) -> float:
        """Mean over the ranks of the share of the makespan in which they do not compute."""
        return fmean(self.simulation.bubble)

    @cached_property
    def memory(self) -> Memory:
        return memory(self.profile, self.plan, self.simulation, self.ratios)

    def memory_over_time(self) -> tuple[OverTime, ...]:
        """What each rank's memory is used for while the window runs; worked out anew at each call."""
        return memory_over_time(self.profile, self.plan, self.simulation, self.ratios)

    @property
    def peak_memory_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(self.memory.peak_bytes)

    @property
    def excess_bytes(self) -> tuple[int, ...]:
        """Per rank, the bytes by which its peak exceeds its device's memory; 0 where it fits."""
        devices = self.profile.cluster.devices
        return tuple(
            max(0, peak - devices[rank].memory_bytes) for rank, peak in enumerate(self.memory.peak_bytes)
        )

    @property
    def fits(self) -> bool:
        return not any(self.excess_bytes)


def predict(profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios | None = None) -> Prediction:
    """Simulate one step of `plan`.

    Args:
        schedule: what the plan's name and numbers stand for; with an R for each stage that recomputes.
        ratios: `ratios[layer][microbatch]`, the frozen share of weight-gradient time; None freezes nothing.

    Raises:
        ValueError: the arguments do not fit together.
    """
    simulation = simulate(schedule, action_costs(profile, plan, schedule, ratios))
    whole = simulation if plan.windows == 1 else _all_windows(profile, plan, schedule, ratios)
    exchange_s = exchanged_s(profile, plan)
    ready_s = [end_s + more_s for end_s, more_s in zip(_ends_s(whole), exchange_s, strict=True)]
    step_s = alone_s = max(ready_s) + outside_s(profile, plan)
    if plan.standbys:
        shipped = max(shipped_s(profile, plan, ready_s * plan.pipeline_count))
        step_s = shipped + outside_s(profile, plan) + _beyond_idle_s(profile, plan, whole)
    return Prediction(
        profile=profile,
        plan=plan,
        ratios=ratios,
        simulation=simulation,
        windows_s=whole.makespan_s,
        step_s=step_s,
        redundancy=Redundancy(
            bytes_per_step=shipped_bytes(profile, plan),
            seconds_per_step=step_s - alone_s,
            memory_bytes=max(standby_bytes(profile, plan)),
        ),
    )


def _all_windows(profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios | None) -> Simulation:
    repeated = repeat(schedule, plan.windows)
    again = None if ratios is None else tuple(tuple(row) * plan.windows for row in ratios)
    return simulate(repeated, action_costs(profile, plan, repeated, again))


def _beyond_idle_s(profile: Profile, plan: Plan, whole: Simulation) -> float:
    """What updates of standbys, which run beside the window, take of the rank that has least time for them."""
    idle_s = [whole.makespan_s - busy_s for busy_s in whole.busy_s] * plan.pipeline_count
    return max(
        max(0.0, update_s - free_s)
        for update_s, free_s in zip(standby_update_s(profile, plan), idle_s, strict=True)
    )


def _ends_s(simulation: Simulation) -> list[float]:
    """Per rank, the end of its last action."""
    lengths = accumulate(len(program) for program in simulation.schedule.programs)
    return [simulation.end_s[length - 1] for length in lengths]
