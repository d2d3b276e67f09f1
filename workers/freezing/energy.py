"""The gradient's energy as if nothing had been frozen, and how much of it freezing lets through (definition D.7 of
TimelyFreeze). A metric for people: no decision follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from workers.commit.freezing_scores import Energy
from workers.freezing.mask import Chance, LayerParameters


def estimate(
    parameters: LayerParameters,
    stable: frozenset[str],
    chances: Sequence[Chance],
    squared_norms: Mapping[str, float],
    known: Sequence[float],
) -> list[Energy]:
    """The energy of each parameter of one layer or shard, and the part of it that the step lets through in expectation.

    Gradients of single microbatches are mostly noise, so the squared norm of their sum grows with their number
    (docs/decisions/effective-update.md). The estimate divides the norm of those formed by their expected share, given
    that any is formed. Where none was, the last estimate stays.

    Args:
        chances: per (global) microbatch.
        squared_norms: of the summed gradients that were formed.
        known: the last estimates, in name order.
    """
    of_stable = [1.0 - chance.stable for chance in chances]
    of_others = [1.0 - chance.others for chance in chances]
    formed_shares = {True: _formed_share(of_stable), False: _formed_share(of_others)}
    through_shares = {True: sum(of_stable) / len(chances), False: sum(of_others) / len(chances)}
    energies: list[Energy] = []
    for name, energy in zip(parameters.names, known, strict=True):
        kind = name in stable
        if formed_shares[kind] > 0.0 and name in squared_norms:
            energy = squared_norms[name] / formed_shares[kind]
        energies.append((energy, through_shares[kind] * energy))
    return energies


def _formed_share(probabilities: Sequence[float]) -> float:
    """The expected share of microbatches that form a gradient, given that one does; 0 if none can.

    Args:
        probabilities: with which each of them does, by itself.
    """
    none = math.prod(1.0 - p for p in probabilities)
    if none == 1.0:
        return 0.0
    return sum(probabilities) / (1.0 - none) / len(probabilities)
