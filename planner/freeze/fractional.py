"""Freezing for the least time to a given accuracy, in place of a budget that somebody gives (eq. 13).

A step with ratios takes kappa of its time and makes a share of its progress, so it is worth their quotient. Under SGD
that share is p_eff, the gradient's energy that reaches the weights (eq. 11, definition D.7), linear in ratios where
each layer has its own: the program minimizes the quotient, and a stage freezes its least useful layers first. Under
rules that divide by the size of gradients, as AdamW does, layers have other shares, and the first microbatches that are
left out cost less than the last ones: docs/decisions/effective-update.md has what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.freeze.program import FreezeProgram, FreezeSolution, StageLayers
from planner.freezing import Ratios
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.simulation.simulate import Costs

PIECES = (0.5, 0.25, 0.25)
"""Parts of a layer's ratio that the program weighs one by one where what they cost rises."""


def solve_for_accuracy(
    schedule: Schedule,
    plan: Plan,
    upper: Costs,
    lower: Costs,
    *,
    profile: Profile | None,
    shares: Sequence[float],
    adaptive: bool,
    rest_s: float,
    least_update: float,
) -> tuple[FreezeSolution, Ratios]:
    """The ratios of each layer with the least time to accuracy, and the solution in which a stage has the mean ratio of
    its layers.

    Args:
        profile: has the times of layers' weight gradients; None: those of a stage are alike.
        shares: per layer, of a step's progress.
        adaptive: whether the update rule divides by the size of gradients.
        rest_s: seconds of a step outside of the window.
        least_update: the least share of a step's progress that is to be left, in (0, 1].

    Raises:
        ValueError: as `FreezeProgram.solve_for_accuracy`.
    """
    stages = [_layers_of(first, stop, profile, shares, adaptive) for first, stop in plan.layers]
    solution, found = FreezeProgram(schedule).solve_for_accuracy(
        upper, lower, stages, rest_s=rest_s, least_update=least_update
    )
    freezable = {stage for stage, _, _ in solution.ratios}
    ratios = tuple(
        tuple(
            found.get((layer, microbatch), 0.0) if stage in freezable else 1.0
            for microbatch in range(plan.microbatches)
        )
        for stage, (first, stop) in enumerate(plan.layers)
        for layer in range(first, stop)
    )
    return solution, ratios


def energy_shares(energies: Sequence[float], plan: Plan, profile: Profile | None) -> tuple[float, ...]:
    """Per layer, its share of the gradient's energy. Where nobody has measured it, that of the parameters, or an equal
    one. Layers that `profile` has as frozen as a whole have none.

    Args:
        energies: per layer, squared norms of gradients; empty: not measured.
    """
    layers = plan.layers[-1][1]
    trained = [True] * layers if profile is None else [not one.frozen for one in profile.model.layers]
    sizes = [energy * free for energy, free in zip(energies, trained, strict=True)] if energies else []
    if not any(sizes):
        counts = [1] * layers if profile is None else [one.parameters for one in profile.model.layers]
        sizes = [float(count * free) for count, free in zip(counts, trained, strict=True)]
    total = sum(sizes)
    return tuple(size / total for size in sizes)


def expected_update(ratios: Ratios, shares: Sequence[float]) -> float:
    """The share of the gradient's energy that reaches the weights, in expectation (definition D.7)."""
    return sum(
        share * (1.0 - sum(of_layer) / len(of_layer)) for share, of_layer in zip(shares, ratios, strict=True)
    )


def progress_shares(
    energies: Sequence[float], plan: Plan, profile: Profile | None, *, adaptive: bool
) -> tuple[float, ...]:
    """Per layer, its share of a step's progress: its energy under SGD. An update of a rule that divides by the size of
    gradients makes progress in proportion to the sum of their sizes, which is at most the norm times the root of the
    number of parameters.

    Args:
        energies: as for `energy_shares`.
    """
    shares = energy_shares(energies, plan, profile)
    if not adaptive or not any(energies):
        return shares
    counts = [1] * len(shares) if profile is None else [layer.parameters for layer in profile.model.layers]
    sums = [math.sqrt(share * count) for share, count in zip(shares, counts, strict=True)]
    return tuple(each / sum(sums) for each in sums)


def expected_progress(ratios: Ratios, shares: Sequence[float], *, adaptive: bool) -> float:
    """The share of a step's progress that is left, in expectation."""
    return sum(
        share * sum(_left(1.0 - ratio, adaptive) for ratio in of_layer) / len(of_layer)
        for share, of_layer in zip(shares, ratios, strict=True)
    )


def _left(trained: float, adaptive: bool) -> float:
    """The progress of a layer of which the share `trained` of microbatches forms gradients. Of n unlike gradients the
    sum has a mean that falls with n and a spread that falls with its root, and an adaptive rule divides by the spread.
    """
    return math.sqrt(trained) if adaptive else trained


def _layers_of(
    first: int, stop: int, profile: Profile | None, shares: Sequence[float], adaptive: bool
) -> StageLayers:
    times = [
        1.0 if profile is None else profile.model.layers[layer].weight_grad_s for layer in range(first, stop)
    ]
    total = sum(times)
    return StageLayers(
        tuple(
            (layer, piece * time / total, cost * shares[layer])
            for layer, time in zip(range(first, stop), times, strict=True)
            if time > 0 and shares[layer] > 0  # nobody knows what freezing others would cost
            for piece, cost in _pieces(adaptive)
        )
    )


def _pieces(adaptive: bool) -> list[tuple[float, float]]:
    """(part of a ratio, share of the layer's progress that it costs), cheapest first."""
    if not adaptive:
        return [(1.0, 1.0)]
    ends = [sum(PIECES[:number]) for number in range(len(PIECES) + 1)]
    lost = [1.0 - _left(1.0 - end, adaptive) for end in ends]
    return [(piece, lost[number + 1] - lost[number]) for number, piece in enumerate(PIECES)]
