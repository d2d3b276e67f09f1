"""Evaluates the cuts of a shape: simulates each once. A cut that does not fit the memory loses.

Connects the partition programs, which see stages, with `planner/simulation/predict.py`, which sees steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property

from planner.ir import Schedule
from planner.partition import bottleneck, dynpipe, memory, parameter, time
from planner.partition.stage_costs import Ranges, StageCosts
from planner.plan import Plan, recomputable
from planner.profile import Profile
from planner.schedule.expand import frozen_stages, recomputing_stages, with_recompute
from planner.schedule.passes import freeze_stages
from planner.search.least_step import can_take
from planner.search.shapes import PipelineShape
from planner.search.standbys import protected
from planner.simulation.costs import memory_limits, rank_slowdowns
from planner.simulation.memory import most_bytes
from planner.simulation.predict import Prediction, predict, with_copies_of

LEAST_MEMORY = "memory"
PROGRAMS: Mapping[str, Callable[[StageCosts, bool], Ranges]] = {
    "parameter": lambda costs, limited: parameter.partition(
        [layer.parameters for layer in costs.profile.model.layers], costs.stages
    ),
    LEAST_MEMORY: lambda costs, limited: memory.partition(costs),
    "time": lambda costs, limited: time.partition(costs, limited=limited),
    "bottleneck": lambda costs, limited: bottleneck.partition(costs, limited=limited),
    "dynpipe": lambda costs, limited: dynpipe.partition(costs, limited=limited),
}
"""The partition programs by name: (costs, whether memory limits hold) -> cut."""
_TIGHTENINGS = 6
"""Most reruns of a program with tighter limits."""


@dataclass(eq=False)
class Evaluator:
    """Simulates the cuts of one shape on one profile."""

    profile: Profile
    shape: PipelineShape
    _: KW_ONLY
    replicas: int
    recompute: tuple[int, ...]
    frozen: int = 0
    """Layers that no step trains, as in `Plan`."""
    pipelines: int | None = None
    """Copies of the shape that run; None: one per replica."""
    shard: str = "none"
    """Sharing among replicas, as in `Plan`."""
    domains: Sequence[str] | None = None
    """Failure domains of at least all places, which determine the standbys. None: there are no standbys."""
    copies: int = 1
    """Copies that each layer has beside itself."""
    copy_every: int = 1
    """Steps from one copy to the next, as in `standbys.protected`."""
    _schedules: dict[tuple[int, frozenset[int]], Schedule] = field(init=False, default_factory=dict)
    _bare: dict[Ranges, Prediction] = field(init=False, default_factory=dict)
    _with_copies: dict[Ranges, Plan] = field(init=False, default_factory=dict)
    _predictions: dict[Ranges, Prediction] = field(init=False, default_factory=dict)
    _picks: dict[str, Ranges] = field(init=False, default_factory=dict)

    @cached_property
    def _pipeline_profile(self) -> Profile:
        return _of_one_pipeline(self.profile, self.shape.ranks, self.pipelines or self.replicas)

    @cached_property
    def _costs(self) -> StageCosts:
        shards = 1 if self.shard == "none" else self.pipelines or self.replicas
        gradient_shards = shards if self.shard == "gradients" else 1
        return StageCosts.of(
            self._pipeline_profile, self.shape.schedule, self.recompute, shards, gradient_shards
        )

    @property
    def layers(self) -> int:
        return len(self.profile.model.layers)

    @cached_property
    def actions(self) -> int:
        """Actions of one simulation, a measure of its cost."""
        return sum(map(len, self.shape.schedule.programs))

    @cached_property
    def ideal_s(self) -> float:
        """Seconds per microbatch if no rank ever waited and messages took no time: a lower bound for all cuts."""
        devices = self._pipeline_profile.cluster.devices[: self.shape.ranks]
        compute_s = sum(
            layer.forward_s * (2 if number in self.recompute else 1) + layer.backward_s
            for number, layer in enumerate(self.profile.model.layers)
        )
        return self._windows * compute_s / sum(1 / device.slowdown for device in devices)

    def can_be_within(self, per_microbatch_s: float) -> bool:
        """False: no cut takes so little time per microbatch. True says nothing. Needs no schedule."""
        if self.ideal_s > per_microbatch_s:
            return False
        if self.frozen:  # ranks without backward passes do not wait for what that bound has them wait for
            return True
        profile, step_s = self._pipeline_profile, per_microbatch_s * self.shape.microbatches
        return can_take(profile, self.shape, self.recompute, self._windows, step_s)

    @property
    def _windows(self) -> int:
        return -(-self.replicas // (self.pipelines or self.replicas))

    def recomputing(self) -> Evaluator | None:
        """The same with all layers but the last recomputing; None if this one already has that."""
        every = tuple(sorted({*recomputable(self.layers), *self.recompute}))
        return None if self.recompute == every else replace(self, recompute=every)

    def without_copies(self) -> Evaluator | None:
        """The same without standbys; None if this one has none."""
        return None if self.domains is None else replace(self, domains=None)

    def predict(self, layers: Ranges) -> Prediction:
        """The prediction of one step with this cut."""
        known = self._predictions.get(layers)
        if known is None:
            known = self._without_copies(layers)
            if self.domains is not None:
                known = with_copies_of(known, self._protected(known.plan))
            self._predictions[layers] = known
        return known

    def bare_s(self, layers: Ranges) -> float:
        """The step with this cut and without copies, which never make it shorter: less work than `predict`."""
        return self._without_copies(layers).step_s

    def _without_copies(self, layers: Ranges) -> Prediction:
        known = self._bare.get(layers)
        if known is None:
            known = predict(self.profile, self._plan(layers), self.schedule(layers))
            self._bare[layers] = known
        return known

    def better(self, layers: Ranges, than: Ranges) -> bool:
        """Whether a cut lacks less memory, or is faster where neither lacks any."""
        other = self.predict(than)
        if other.fits and self.bare_s(layers) >= other.step_s:
            return False
        this = self.predict(layers)
        if other.fits:
            # Memory is worked out late: most cuts are not faster.
            return this.step_s < other.step_s and this.fits
        return (sum(this.excess_bytes), this.step_s) < (sum(other.excess_bytes), other.step_s)

    def pick(self, program: str) -> Ranges:
        """The cut that `program` proposes; if it does not fit, the one that it proposes under memory limits.

        A program does not see working memory and messages. Its limits are tightened by the excess of its last cut.

        Raises:
            PlanError: no cut fits the limits that the program sees; says how much is missing.
        """
        if program not in self._picks:
            self._picks[program] = self._pick(program)
        return self._picks[program]

    def _pick(self, program: str) -> Ranges:
        layers = PROGRAMS[program](self._costs, False)
        if self._surely_fits(layers):
            return layers
        reserved: dict[int, int] = {}
        for _ in range(_TIGHTENINGS):
            lacking = self.predict(layers).excess_bytes
            if not any(lacking):
                break
            costs = replace(self._costs, reserved_bytes=dict(reserved))
            layers = PROGRAMS[program](costs, True)
            for rank, more in enumerate(self.predict(layers).excess_bytes):
                reserved[rank] = reserved.get(rank, 0) + more
        return layers

    def excess_bytes(self, layers: Ranges) -> int:
        """The bytes that a cut lacks on all ranks together; less work than `predict` where there is plenty."""
        return 0 if self._surely_fits(layers) else sum(self.predict(layers).excess_bytes)

    def _surely_fits(self, layers: Ranges) -> bool:
        """Whether a cut fits the memory, as far as is known without simulating it."""
        if self._fits_all_at_once(layers):
            return True
        known = self._predictions.get(layers)
        return known is not None and known.fits

    def _fits_all_at_once(self, layers: Ranges) -> bool:
        """Whether a cut fits the memory even if all that ranks ever hold came together. Less work than what they hold
        at each moment, even of a cut that was simulated."""
        plan = self._plan(layers)
        limits = memory_limits(self.profile.cluster, plan.pipeline_ranks, plan.pipeline_count)
        taken = most_bytes(self.profile, plan, self.schedule(layers), self._costs.in_flight)
        if self.domains is None:
            return all(most <= limit for most, limit in zip(taken, limits, strict=True))
        if self.shard == "none" and self.copy_every == 1 and not self.profile.cluster.refresh_every:
            # As if one place held the copies of all layers.
            whole = sum(layer.state_bytes + layer.gradient_bytes for layer in self.profile.model.layers)
            room = min(limit - most for most, limit in zip(taken, limits, strict=True))
            if room >= self.copies * whole:
                return True
        plan = self._protected(plan)
        taken = most_bytes(self.profile, plan, self.schedule(layers), self._costs.in_flight)
        return all(most <= limit for most, limit in zip(taken, limits, strict=True))

    def schedule(self, layers: Ranges) -> Schedule:
        """The shape's schedule with an R where a stage of the cut recomputes, and no backward pass where all of its
        layers are frozen."""
        frozen = frozen_stages(self.shape.name, layers, self.frozen)
        again = recomputing_stages(layers, self.recompute)
        if (frozen, again) not in self._schedules:
            schedule = with_recompute(freeze_stages(self.shape.schedule, frozen), again)
            self._schedules[frozen, again] = schedule
        return self._schedules[frozen, again]

    def _plan(self, layers: Ranges) -> Plan:
        return Plan(
            epoch=0,
            version=1,
            reason="",
            layers=layers,
            stage_ranks=self._costs.stage_ranks,
            schedule=self.shape.name,
            chunks=self.shape.chunks,
            microbatches=self.shape.microbatches,
            replicas=self.replicas,
            pipelines=self.pipelines,
            shard=self.shard,
            recompute=self.recompute,
            frozen=self.frozen,
        )

    def _protected(self, plan: Plan) -> Plan:
        assert self.domains is not None
        if plan.layers not in self._with_copies:
            sizes = [layer.parameter_bytes for layer in self.profile.model.layers]
            self._with_copies[plan.layers] = protected(
                plan, self.domains, sizes, self.copies, self.copy_every
            )
        return self._with_copies[plan.layers]


def _of_one_pipeline(profile: Profile, ranks: int, pipelines: int) -> Profile:
    """`profile` as a program sees it that cuts one pipeline for all: each rank as slow as its slowest sibling, and with
    the memory of the smallest."""
    devices = profile.cluster.devices
    slowest = rank_slowdowns(profile.cluster, ranks, pipelines)
    limits = memory_limits(profile.cluster, ranks, pipelines)
    first = tuple(
        replace(device, slowdown=slow, memory_bytes=limit)
        for device, slow, limit in zip(devices, slowest, limits, strict=False)
    )
    if first == devices[: len(first)]:
        return profile
    return replace(profile, cluster=replace(profile.cluster, devices=(*first, *devices[ranks:])))
