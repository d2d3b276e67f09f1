"""Predicts the pipelines of a job for each number of frozen layers: what `freeze.pack` will make of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.prepare.planning import places_of, replanner_of
from orchestrator.prepare.settling import Settled
from planner.course import times_as_many
from planner.freezing import prefix_rule
from planner.plan import Plan, PlanError
from planner.simulation.predict import predict

MOST = 24
"""Most numbers of frozen layers that are looked at."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """The pipelines while so many layers are frozen as a whole."""

    frozen: int
    """Layers, from the input up."""
    plan: Plan
    unpacked_s: float
    """A step of as many replicas with the job's first plan in place of this one."""


def layouts(settled: Settled) -> tuple[PackedLayout, ...]:
    """The layout for each number of layers that the job's rule may freeze, ascending; none where the layout stays."""
    freeze, profile = settled.spec.freeze, settled.profile
    if not freeze.by_prefix or freeze.pack == "off" or profile is None:
        return ()
    layers = len(profile.model.layers)
    numbers = sorted({layers * number // MOST for number in range(MOST)} if layers > MOST else range(layers))
    if prefix_rule(freeze.method) == "prefix":
        numbers = sorted({0, freeze.prefix or 0, *(frozen for _, frozen in freeze.schedule)})
    first, domains = settled.plan, places_of(settled.spec, profile, settled.plan.world_size)
    begun, found = replanner_of(settled), list[PackedLayout]()
    for frozen in numbers:
        replanner = replace(begun, frozen=frozen, released=frozen if freeze.lasts else 0)
        if freeze.batch == "scale":
            times = times_as_many(layers, frozen, freeze.frozen_cost)
            replanner = replanner.with_replicas(times * first.replicas)
        unpacked = replanner.first
        now = predict(replanner.profile_on(domains), unpacked, settled.schedule).step_s
        try:
            plan, _ = replanner.plan_for(first.world_size, epoch=0, version=0, reason="", domains=domains)
        except PlanError:
            plan = replace(unpacked, predicted_step_s=now)
        found.append(PackedLayout(frozen=frozen, plan=plan, unpacked_s=now))
    return tuple(found)
