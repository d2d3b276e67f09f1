"""Cost to a plan of each way to keep copies of its layers: a prediction of the same cut with it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.search.standbys import protected
from planner.simulation.predict import predict

COMPARED = 2
"""Most copies that are compared, if the job has no more."""
LONGEST = 64
"""Most steps between two snapshots that are compared."""
SNAPSHOTS = 2
"""Numbers of steps between snapshots that are compared."""


@dataclass(frozen=True, kw_only=True)
class CopiesCost:
    """A step of a plan whose layers have so many copies."""

    copies: int
    every: int
    """1: standbys; more: snapshots, one every so many steps; 0 without copies."""
    step_s: float
    bytes_per_step: int
    """Bytes that all owners send, on average."""
    memory_bytes: int
    """Weights, optimizer state and gradients of copies, on the rank that keeps most; of its host for snapshots."""
    undone_steps: int | None
    """The most committed steps that a lost rank undoes. None: all since the newest checkpoint."""
    fits: bool
    """Whether every rank has the memory."""


def cost_of_copies(
    profile: Profile, plan: Plan, schedule: Schedule, domains: Sequence[str], copies: int, every: int = 1
) -> CopiesCost:
    """The cost of `copies` copies of each layer, or of as many as there are failure domains for.

    Args:
        schedule: the plan's, with an R on each stage that recomputes.
        domains: failure domains of at least all places.
        every: as in `CopiesCost`, from 1 on.
    """
    sizes = [layer.parameter_bytes for layer in profile.model.layers]
    prediction = predict(profile, protected(plan, domains, sizes, copies, every), schedule)
    cost = prediction.redundancy
    return CopiesCost(
        copies=copies,
        every=every if copies else 0,
        step_s=prediction.step_s,
        bytes_per_step=cost.bytes_per_step,
        memory_bytes=cost.memory_bytes,
        undone_steps=cost.undone_steps if copies else None,
        fits=prediction.fits,
    )


def costs_of_snapshots(
    profile: Profile, plan: Plan, schedule: Schedule, domains: Sequence[str], copies: int
) -> Iterator[CopiesCost]:
    """The cost of snapshots, for the least powers of 2 that leave each of them time to become complete."""
    every, found = 2, 0
    while every <= LONGEST and found < SNAPSHOTS:
        cost = cost_of_copies(profile, plan, schedule, domains, copies, every)
        if cost.undone_steps is not None and cost.undone_steps < 2 * every:
            found += 1
            yield cost
        every *= 2
