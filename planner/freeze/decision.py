"""Monitored steps of a job -> what its ranks should freeze: bounds, freeze program, ratios per layer.

Pure, so that a restarted planner reaches the same decision from the same observations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner.freeze.fractional import (
    energy_shares,
    expected_progress,
    expected_update,
    progress_shares,
    solve_for_accuracy,
)
from planner.freeze.monitoring import Bounds, MonitoringError, Observation, measure, observed_energies
from planner.freeze.program import FreezeSolution, layer_ratios, solve
from planner.freeze.time_to_accuracy import kappa, pays
from planner.freezing import AUTO, Budget, FreezeOverrides, FreezePlan, Phases, Ratios, Weights
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.simulation.costs import bounds as profiled_bounds
from planner.simulation.costs import outside_s
from planner.simulation.monte_carlo import expected_step_s
from planner.simulation.predict import predict
from planner.simulation.resized_cluster import resized

LEAST_UPDATE = 0.5
"""Unless the job says how much."""
SAMPLES = 200
"""Sampled steps, to estimate how much randomness lengthens a step."""


@dataclass(frozen=True, kw_only=True)
class FreezeQuestion:
    """The input of a decision apart from observations; constant while a job's plan is in effect."""

    plan: Plan
    schedule: Schedule
    phases: Phases
    r_max: Budget
    """Largest mean freeze ratio of a stage; `AUTO`: that with the least time to a given accuracy."""
    least_update: float = LEAST_UPDATE
    """With `AUTO`: the least share of a step's progress that is to be left, in (0, 1]."""
    adaptive: bool = False
    """Whether the update rule divides by the size of gradients."""
    energies: tuple[float, ...] = ()
    """Per layer, the energy of its gradient, where other steps than the monitored ones tell it; empty: these do."""
    confirmed: float = 1.0
    """`FreezeDecision.confirmed`, where other steps than the monitored ones tell it: if a half was not observed."""
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
    p_eff: float | None
    """Expected share of the gradient's energy that reaches the weights (definition D.7); None: nobody has measured the
    energy of layers."""
    progress: float | None = None
    """With `AUTO`: the expected share of a step's progress that is left."""
    energies: tuple[float, ...] = ()
    """Per layer, the energy of its gradient that this rests on; empty: nobody has measured it."""

    @property
    def confirmed(self) -> float:
        """See `Bounds.confirmed`."""
        return self.bounds.confirmed(self.solution.unfrozen_s - self.solution.all_frozen_s)

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
        """Mean step with these ratios, which save what the monitored steps confirm. Freezing does not change the time
        outside the window."""
        saved_s = self.confirmed * (self.solution.unfrozen_s - self.solution.solved_s)
        return (self.unfrozen_step_s - saved_s) * (self.spread or 1.0)

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
    seen = tuple(observations)
    bounds = _bounds(question, seen)
    energies = question.energies or observed_energies(seen, question.phases)
    if question.r_max != AUTO:
        return _by_budget(question, bounds, energies, question.r_max)
    nothing = replace(_by_budget(question, bounds, energies, 0.0), progress=1.0)
    if not nothing.confirmed:
        return nothing
    adaptive = question.adaptive
    shares = progress_shares(energies, question.plan, question.profile, adaptive=adaptive)
    solution, ratios = solve_for_accuracy(
        question.schedule,
        question.plan,
        bounds.upper,
        bounds.lower,
        profile=question.profile,
        shares=shares,
        adaptive=adaptive,
        # So that the program's savings are to the step as those that are confirmed are to it.
        rest_s=bounds.outside_s + nothing.unfrozen_step_s * (1.0 / nothing.confirmed - 1.0),
        least_update=question.least_update,
    )
    progress = expected_progress(ratios, shares, adaptive=adaptive)
    found = replace(_decision(question, bounds, energies, solution, ratios), progress=progress)
    # Draws lengthen a step beyond the program's.
    return found if pays(found.kappa, progress) else nothing


def _by_budget(
    question: FreezeQuestion, bounds: Bounds, energies: Sequence[float], r_max: float
) -> FreezeDecision:
    solution = solve(question.schedule, bounds.upper, bounds.lower, r_max)
    return _decision(question, bounds, energies, solution, layer_ratios(solution.ratios, question.plan))


def _decision(
    question: FreezeQuestion,
    bounds: Bounds,
    energies: Sequence[float],
    solution: FreezeSolution,
    ratios: Ratios,
) -> FreezeDecision:
    profile = question.profile
    return FreezeDecision(
        solution=solution,
        ratios=ratios,
        weights=measured_weights(profile),
        bounds=bounds,
        spread=_spread(question, ratios),
        p_eff=expected_update(ratios, energy_shares(energies, question.plan, profile)) if energies else None,
        energies=tuple(energies),
    )


def profiled_ratios(profile: Profile, plan: Plan, schedule: Schedule, r_max: Budget) -> Ratios:
    """The ratios of `profiled`."""
    return profiled(profile, plan, schedule, r_max)[1]


def profiled(
    profile: Profile,
    plan: Plan,
    schedule: Schedule,
    r_max: Budget,
    least_update: float = LEAST_UPDATE,
    *,
    adaptive: bool = False,
) -> tuple[FreezeSolution, Ratios]:
    """The solution of `decide` without observations, and its ratios to the bit. With `AUTO`, layers count by their
    parameters.

    Args:
        profile: with a device for each place.

    Raises:
        ValueError: the program has no solution.
    """
    upper, lower = profiled_bounds(profile, plan, schedule)
    if r_max != AUTO:
        solution = solve(schedule, upper, lower, r_max)
        return solution, layer_ratios(solution.ratios, plan)
    return solve_for_accuracy(
        schedule,
        plan,
        upper,
        lower,
        profile=profile,
        shares=progress_shares((), plan, profile, adaptive=adaptive),
        adaptive=adaptive,
        rest_s=outside_s(profile, plan),
        least_update=least_update,
    )


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
            known_share=question.confirmed,
        )
    return replace(
        measured,
        upper=replace(measured.upper, messages=upper.messages),
        lower=replace(measured.lower, messages=upper.messages),
    )
