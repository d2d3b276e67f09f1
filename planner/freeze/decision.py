"""Monitored steps of a job -> what its ranks should freeze: bounds, freeze program, ratios per layer.

Pure, so that a restarted planner reaches the same decision from the same observations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.freeze.monitoring import Bounds, MonitoringError, Observation, measure
from planner.freeze.program import FreezeSolution, layer_ratios, solve
from planner.freeze.time_to_accuracy import kappa
from planner.freezing import FreezeOverrides, FreezePlan, Phases, Ratios, Weights
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.simulation.costs import bounds as profiled_bounds
from planner.simulation.costs import outside_s
from planner.simulation.monte_carlo import expected_step_s
from planner.simulation.predict import predict
from planner.simulation.resized_cluster import resized

SAMPLES = 200
"""Sampled steps, to estimate how much randomness lengthens a step."""


@dataclass(frozen=True, kw_only=True)
class FreezeQuestion:
    """The input of a decision apart from observations; constant while a job's plan is in effect."""

    plan: Plan
    schedule: Schedule
    phases: Phases
    r_max: float
    """Largest mean freeze ratio of a stage."""
    profile: Profile | None = None
    """The job's profile, if it has one: its links give the cost of messages, and it replaces a half of the monitoring
    that was not observed. It may have fewer devices than the plan now uses."""


@dataclass(frozen=True, kw_only=True)
class FreezeDecision:
    """Freeze ratios, and the expected gain."""

    solution: FreezeSolution
    ratios: Ratios
    weights: Weights
    """Measured time of every matrix, to apply the ratios; empty without a profile that has these times."""
    bounds: Bounds
    spread: float | None
    """Mean step over a step of mean times, at least 1; None without a profile, whose matrices determine the
    variance."""

    def freeze_plan(
        self, plan: Plan, *, epoch: int, version: int = 1, control: FreezeOverrides | None = None
    ) -> FreezePlan:
        """The freeze plan `version` of `epoch`, for a job that runs `plan`."""
        return FreezePlan(
            epoch=epoch,
            version=version,
            ratios=self.ratios,
            stages=plan.layers,
            weights=self.weights,
            control=control,
        )

    @property
    def unfrozen_step_s(self) -> float:
        return self.solution.unfrozen_s + self.bounds.outside_s

    @property
    def expected_step_s(self) -> float:
        """Mean step with these ratios. Freezing does not change the time outside the window."""
        return (self.solution.solved_s + self.bounds.outside_s) * (self.spread or 1.0)

    @property
    def kappa(self) -> float:
        """Step with freezing over step without (TimelyFreeze eq. 12)."""
        return kappa(self.expected_step_s, self.unfrozen_step_s)


def decide(question: FreezeQuestion, observations: Iterable[Observation]) -> FreezeDecision:
    """Solve the freeze program with the monitored times.

    Raises:
        MonitoringError: the observations and the profile lack the time of some kind of action on some stage.
        ValueError: the program has no solution.
    """
    question = replace(question, profile=_with_devices_for(question.profile, question.plan.pipeline_ranks))
    bounds = _bounds(question, observations)
    solution = solve(question.schedule, bounds.upper, bounds.lower, question.r_max)
    ratios = layer_ratios(solution.ratios, question.plan)
    return FreezeDecision(
        solution=solution,
        ratios=ratios,
        weights=measured_weights(question.profile),
        bounds=bounds,
        spread=_spread(question, ratios),
    )


def profiled_ratios(profile: Profile, plan: Plan, schedule: Schedule, r_max: float) -> Ratios:
    """The ratios of `decide` without observations, to the bit.

    Args:
        profile: with a device for each place.

    Raises:
        ValueError: the program has no solution.
    """
    upper, lower = profiled_bounds(profile, plan, schedule)
    return layer_ratios(solve(schedule, upper, lower, r_max).ratios, plan)


def measured_weights(profile: Profile | None) -> Weights:
    """Nanoseconds of every matrix's weight gradient. Empty if the profile has the time of some layer without matrices:
    shares need all times."""
    layers = () if profile is None else profile.model.layers
    if any(layer.weight_grad_s > 0 and not layer.matrices for layer in layers):
        return ()
    weights = tuple(
        tuple((matrix.name, round(1e9 * matrix.weight_grad_s)) for matrix in layer.matrices)
        for layer in layers
    )
    return weights if any(nanoseconds for layer in weights for _, nanoseconds in layer) else ()


def _with_devices_for(profile: Profile | None, ranks: int) -> Profile | None:
    """`profile` with at least `ranks` devices: if it has fewer, typical ones, each on its own machine."""
    if profile is None or len(profile.cluster.devices) >= ranks:
        return profile
    return replace(profile, cluster=resized(profile.cluster, range(ranks)))


def _spread(question: FreezeQuestion, ratios: Ratios) -> float | None:
    """Factor by which random masks lengthen a step, from the profile alone: monitoring does not see single matrices.

    Each matrix is sampled with its layer's ratio, as in `timelyfreeze`. A hybrid's masks have the same expectation per
    action, but it freezes stable parameters first, so its steps vary less as a rule. The estimate neglects this: which
    parameters will be stable is not known yet.
    """
    profile, plan, schedule = question.profile, question.plan, question.schedule
    if profile is None:
        return None
    if all(ratio in (0.0, 1.0) for row in ratios for ratio in row):
        return 1.0
    sampled_s = expected_step_s(profile, plan, schedule, ratios, SAMPLES, seed=0)
    return max(1.0, sampled_s / predict(profile, plan, schedule, ratios).step_s)


def _bounds(question: FreezeQuestion, observations: Iterable[Observation]) -> Bounds:
    profile, plan, schedule = question.profile, question.plan, question.schedule
    if profile is None:
        return measure(schedule, question.phases, observations)
    upper, lower = profiled_bounds(profile, plan, schedule)
    try:
        measured = measure(schedule, question.phases, observations)
    except MonitoringError:
        # The job got a new cut after its monitoring: only the profile has times for it.
        return Bounds(
            upper=upper,
            lower=lower,
            outside_s=outside_s(profile, plan),
            upper_step_s=None,
            lower_step_s=None,
        )
    return replace(
        measured,
        upper=replace(measured.upper, messages=upper.messages),
        lower=replace(measured.lower, messages=upper.messages),
    )
