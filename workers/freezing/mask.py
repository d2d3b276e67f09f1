"""Freezing masks of one layer in one microbatch: independent Bernoulli draws, keyed by what they are for.

Knows neither why a parameter is likely to be frozen nor what freezing does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from workers.reproducibility import rng
from workers.state.layer_state import LayerState


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of one layer that can be frozen, in name order."""

    name: str
    """The layer's."""
    names: tuple[str, ...]
    scalars: tuple[int, ...]
    """Elements of each parameter."""
    weights: tuple[int, ...]
    """Nanoseconds of weight gradient where they are known: see `weighed`. Else elements of each matrix, 0 for the
    others, of which the small ones have almost no such time; in a layer without matrices all parameters count."""

    @staticmethod
    def of(state: LayerState) -> LayerParameters:
        """Parameters of a live layer, or of a shard of it, without those that the model itself holds fixed."""
        return LayerParameters.among(state.name, {name: state.weights[name] for name in state.updates})

    @staticmethod
    def among(name: str, trained: Mapping[str, Tensor]) -> LayerParameters:
        """Parameters of the layer `name`, which trains `trained`."""
        free = sorted(trained)
        scalars = tuple(trained[each].numel() for each in free)
        matrices = tuple(
            count if trained[each].dim() >= 2 else 0 for each, count in zip(free, scalars, strict=True)
        )
        return LayerParameters(name, tuple(free), scalars, matrices if any(matrices) else scalars)

    def weighed(self, nanoseconds: Sequence[tuple[str, int]]) -> LayerParameters:
        """The same parameters by the measured times of their weight gradients: one row of `FreezePlan.weights`. What is
        not among those has none."""
        known = dict(nanoseconds)
        return replace(self, weights=tuple(known.get(name, 0) for name in self.names))

    def weight(self, names: Collection[str]) -> int:
        """The weight of the parameters `names`."""
        return sum(weight for name, weight in zip(self.names, self.weights, strict=True) if name in names)


@dataclass(frozen=True)
class Chance:
    """Probability that a parameter is frozen, by whether the method's metric calls it stable."""

    stable: float
    others: float


@dataclass(frozen=True)
class Mask:
    """Parameters that one layer freezes in one microbatch."""

    frozen: frozenset[str]
    """Names of the parameters whose gradient is not formed."""
    planned: float
    """Expected share of the layer's weight; of its scalars, if it has none."""
    actual: float
    """Drawn share of the same."""
    parameters: int
    """Elements of the frozen parameters."""


NOTHING = Mask(frozenset(), 0.0, 0.0, 0)


def draw(
    parameters: LayerParameters,
    stable: frozenset[str],
    chance: Chance,
    *,
    seed: int,
    step: int,
    microbatch: int,
) -> Mask:
    """The mask of one layer and (global) microbatch; the same on whichever rank the layer lives. The weights of
    the parameters change what it reports, and no draw."""
    weights = parameters.weights if any(parameters.weights) else parameters.scalars
    weight = sum(weights)
    if not weight or not (chance.others or (chance.stable and stable)):
        return NOTHING
    numbers = rng.uniforms(len(parameters.names), seed, "freeze", step, microbatch, parameters.name)
    frozen: list[str] = []
    expected, drawn, elements = 0.0, 0, 0
    for name, scalars, own, number in zip(
        parameters.names, parameters.scalars, weights, numbers, strict=True
    ):
        probability = chance.stable if name in stable else chance.others
        expected += probability * own
        if number < probability:
            frozen.append(name)
            drawn += own
            elements += scalars
    return Mask(frozenset(frozen), expected / weight, drawn / weight, elements)


def topped_up_or_thinned(ratio: float, stable_share: float) -> Chance:
    """Chances by which a stable share becomes an expected share of `ratio` (Algorithm 2 of TimelyFreeze).

    The stable parameters are all frozen and the others topped up uniformly, or, where there are too many of them,
    they are thinned uniformly. Independent draws keep the expectation exact, where the paper takes a fixed number.
    """
    if stable_share > ratio:
        return Chance(ratio / stable_share, 0.0)
    others = 1.0 - stable_share
    return Chance(1.0, (ratio - stable_share) / others if others else 0.0)
