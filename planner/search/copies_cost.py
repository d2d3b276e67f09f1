"""What each further copy of the layers costs a plan: a prediction of the same cut with so many copies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.search.standbys import assign
from planner.simulation.predict import predict

COMPARED = 2
"""Most copies that are compared, if the job has no more."""


@dataclass(frozen=True, kw_only=True)
class CopiesCost:
    """A step of a plan whose layers have so many copies."""

    copies: int
    step_s: float
    bytes_per_step: int
    """Bytes that all owners send to standbys."""
    memory_bytes: int
    """Weights, optimizer state and gradients of copies, on the rank that keeps most."""
    fits: bool
    """Whether every rank has the memory."""


def cost_of_copies(
    profile: Profile, plan: Plan, schedule: Schedule, domains: Sequence[str], copies: int
) -> CopiesCost:
    """The cost of `copies` copies of each layer, or of as many as there are failure domains for.

    Args:
        schedule: the plan's, with an R on each stage that recomputes.
        domains: failure domains of at least all places.
    """
    sizes = [layer.parameter_bytes for layer in profile.model.layers]
    standbys = assign(plan, domains[: plan.world_size], sizes, copies) if copies else ()
    prediction = predict(profile, replace(plan, standbys=standbys), schedule)
    cost = prediction.redundancy
    return CopiesCost(
        copies=copies,
        step_s=prediction.step_s,
        bytes_per_step=cost.bytes_per_step,
        memory_bytes=cost.memory_bytes,
        fits=prediction.fits,
    )
