"""How settled parameters are: the metrics of APF and AutoFreeze, from each layer's cumulative updates.

A check reads the weights before a commit and changes nothing. Its findings enter the layer's state after the commit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.config import FreezeConfig
from workers.freezing.mask import LayerParameters
from workers.state.layer_state import LayerState

UNKNOWN = math.inf
"""The score of a layer of which too little is known."""


@dataclass
class Finding:
    """What one check found in one layer."""

    statistics: dict[str, Tensor]
    """What the layer's statistics become."""
    score: float = UNKNOWN
    """AutoFreeze's score, for all ranks to compare; other metrics leave it."""


class Metric(ABC):
    """A stability metric. Its memory is in `LayerState.freezing`: `checks` made so far, `settled` (bool per
    parameter in name order), `reference` weights of the last check, and what the metric adds."""

    def begin(self, state: LayerState, parameters: LayerParameters) -> dict[str, Tensor]:
        """Statistics before the first check."""
        zeros = {
            f"reference.{name}": torch.zeros_like(state.weights[name], requires_grad=False)
            for name in parameters.names
        }
        return {
            **zeros,
            "checks": torch.zeros((), dtype=torch.int64),
            "settled": torch.zeros(len(parameters.names), dtype=torch.bool),
        }

    @torch.no_grad()
    def check(self, state: LayerState, parameters: LayerParameters) -> Finding:
        """Look at the updates since the last check. The first check only takes the reference."""
        checks = int(state.freezing["checks"])
        found = Finding({"checks": torch.tensor(checks + 1)})
        updates: dict[str, Tensor] = {}
        for name in parameters.names:
            weight, reference = state.weights[name].detach(), f"reference.{name}"
            updates[name] = weight - state.freezing[reference]
            found.statistics[reference] = weight.clone()
        if checks:
            self._weigh(state, parameters, updates, found)
        return found

    @abstractmethod
    def _weigh(
        self,
        state: LayerState,
        parameters: LayerParameters,
        updates: Mapping[str, Tensor],
        found: Finding,
    ) -> None:
        """Form the scores of `updates`, the sums of what each parameter moved by since the last check."""


class Apf(Metric):
    """Adaptive parameter freezing: eq. 2 of TimelyFreeze. What oscillates without a trend is settled.

    Per scalar, E and E_abs are moving averages of the update and of its size. A tensor's score is the mean of
    |E| / E_abs over those of its scalars that have ever moved (a gradient is skipped for a whole tensor or not at
    all; the paper's masks are per scalar). Below the threshold it is settled. While a whole tensor is frozen, both
    averages decay equally, so it stays settled until a hybrid lets it move again.
    """

    def __init__(self, threshold: float, alpha: float) -> None:
        self._threshold = threshold
        self._alpha = alpha

    def begin(self, state: LayerState, parameters: LayerParameters) -> dict[str, Tensor]:
        statistics = super().begin(state, parameters)
        for name in parameters.names:
            statistics[f"trend.{name}"] = torch.zeros_like(state.weights[name], requires_grad=False)
            statistics[f"travel.{name}"] = torch.zeros_like(state.weights[name], requires_grad=False)
        return statistics

    def _weigh(
        self,
        state: LayerState,
        parameters: LayerParameters,
        updates: Mapping[str, Tensor],
        found: Finding,
    ) -> None:
        settled: list[bool] = []
        for name in parameters.names:
            update = updates[name]
            trend = state.freezing[f"trend.{name}"] * self._alpha + update * (1 - self._alpha)
            travel = state.freezing[f"travel.{name}"] * self._alpha + update.abs() * (1 - self._alpha)
            settled.append(perturbation(trend, travel) < self._threshold)
            found.statistics[f"trend.{name}"], found.statistics[f"travel.{name}"] = trend, travel
        found.statistics["settled"] = torch.tensor(settled, dtype=torch.bool)


def perturbation(trend: Tensor, travel: Tensor) -> float:
    """The mean of |E| / E_abs over the scalars that have moved, in [0, 1]; 1 where none has."""
    moved = int(torch.count_nonzero(travel))
    if not moved:
        return 1.0
    ratios = torch.where(travel > 0, trend.abs() / travel, 0.0)
    return float(ratios.sum(dtype=torch.float64)) / moved


class AutoFreeze(Metric):
    """AutoFreeze: eq. 1 of TimelyFreeze. Layers settle from the input up, once the size of their updates does.

    The score compares the norms of the updates of two successive intervals; which layers settle is decided over all
    layers' scores, by `settled_prefix`. A layer that is settled has score 0.
    """

    def begin(self, state: LayerState, parameters: LayerParameters) -> dict[str, Tensor]:
        return {**super().begin(state, parameters), "moved": torch.zeros((), dtype=torch.float64)}

    def _weigh(
        self,
        state: LayerState,
        parameters: LayerParameters,
        updates: Mapping[str, Tensor],
        found: Finding,
    ) -> None:
        squares = 0.0
        for name in parameters.names:
            norm = float(torch.linalg.vector_norm(updates[name], dtype=torch.float64))
            squares += norm * norm
        moved, before = math.sqrt(squares), float(state.freezing["moved"])
        found.statistics["moved"] = torch.tensor(moved, dtype=torch.float64)
        if bool(state.freezing["settled"].all()):
            found.score = 0.0
        elif before > 0.0:
            found.score = abs(before - moved) / before


def settled_prefix(scores: Mapping[int, float], percentile: float) -> int:
    """How many layers, from the input up, AutoFreeze takes for settled: the longest run of layers whose scores are
    among the lowest `percentile` % of all layers' scores (rounded down to whole layers)."""
    count = int(percentile * len(scores) // 100)
    if not count:
        return 0
    bound = sorted(scores.values())[count - 1]
    prefix = 0
    while prefix < len(scores) and scores[prefix] <= bound and scores[prefix] != UNKNOWN:
        prefix += 1
    return prefix


def make_metric(config: FreezeConfig) -> Metric | None:
    """The metric that `config.method` chooses by; None where it draws uniformly."""
    if config.method.endswith("apf"):
        return Apf(config.apf_threshold, config.apf_alpha)
    return AutoFreeze() if config.method.endswith("autofreeze") else None
