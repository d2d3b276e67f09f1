"""From the monitored steps of a job to what its ranks should freeze: bounds, freeze program, ratios per layer.

Pure, so that a planner that died comes to the same answer when it is told the same again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.freeze.monitoring import Bounds, MonitoringError, Observation, measure
from planner.freeze.program import FreezeSolution, layer_ratios, solve
from planner.freeze.time_to_accuracy import kappa
from planner.freezing import Phases, Ratios, Weights
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.simulation.costs import bounds as profiled_bounds
from planner.simulation.costs import outside_s
from planner.simulation.monte_carlo import expected_step_s
from planner.simulation.predict import predict
from planner.simulation.resized_cluster import resized

SAMPLES = 200
"""Steps drawn to see how much longer chance makes them."""


@dataclass(frozen=True, kw_only=True)
class FreezeQuestion:
    """What the planner is asked; it does not change while a job's plan stands."""

    plan: Plan
    schedule: Schedule
    phases: Phases
    r_max: float
    """Largest mean freeze ratio of a stage."""
    profile: Profile | None = None
    """Of the job, if it has one: its links say what messages cost whom, and it stands in for a half of the monitoring
    that was not observed. It may tell of fewer devices than the plan has by now."""


@dataclass(frozen=True, kw_only=True)
class FreezeDecision:
    """What to freeze, and what that is expected to bring."""

    solution: FreezeSolution
    ratios: Ratios
    weights: Weights
    """Measured time of every matrix, to put the ratios into practice with; empty without a profile that says it."""
    bounds: Bounds
    spread: float | None
    """Mean step over a step in which every draw takes what is expected of it, at least 1; None without a profile, whose
    matrices say how far draws spread."""

    @property
    def unfrozen_step_s(self) -> float:
        return self.solution.unfrozen_s + self.bounds.outside_s

    @property
    def expected_step_s(self) -> float:
        """Mean step with these ratios. What is outside the window stays as it is."""
        return (self.solution.solved_s + self.bounds.outside_s) * (self.spread or 1.0)

    @property
    def kappa(self) -> float:
        """Step with freezing over step without (TimelyFreeze eq. 12)."""
        return kappa(self.expected_step_s, self.unfrozen_step_s)


def decide(question: FreezeQuestion, observations: Iterable[Observation]) -> FreezeDecision:
    """Solve the freeze program with the monitored times.

    Raises:
        MonitoringError: they do not time some kind of action on some stage, and there is no profile that does.
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


def measured_weights(profile: Profile | None) -> Weights:
    """Nanoseconds of every matrix's weight gradient. Empty where the profile gives time of a layer to no matrix, as a
    part of the times says nothing of shares."""
    layers = () if profile is None else profile.model.layers
    if any(layer.weight_grad_s > 0 and not layer.matrices for layer in layers):
        return ()
    weights = tuple(
        tuple((matrix.name, round(1e9 * matrix.weight_grad_s)) for matrix in layer.matrices)
        for layer in layers
    )
    return weights if any(nanoseconds for layer in weights for _, nanoseconds in layer) else ()


def _with_devices_for(profile: Profile | None, ranks: int) -> Profile | None:
    """`profile` with a device for each of `ranks`: typical ones, each on a machine of its own, where it has too few."""
    if profile is None or len(profile.cluster.devices) >= ranks:
        return profile
    return replace(profile, cluster=resized(profile.cluster, range(ranks)))


def _spread(question: FreezeQuestion, ratios: Ratios) -> float | None:
    """By how much the draws lengthen a step, from the profile alone: monitoring does not see single matrices.

    Each matrix is drawn with its layer's ratio, as `timelyfreeze` does it. A hybrid's draws have the same expectation
    per action, but what its metric takes for settled is frozen first, so they spread less, as a rule. That is
    neglected: nobody knows yet what will have settled.
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
        # Cut anew after its monitoring, the job has only what the profile expects.
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
