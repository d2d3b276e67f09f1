"""Stability of parameters: the metrics of APF and AutoFreeze, from each layer's cumulative updates.

A check reads the weights before a commit and changes nothing. Its findings enter the layer's state after the commit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planner.freezing import apf_stride
from workers.commit.freezing_scores import UNKNOWN, Moves
from workers.config import FreezeConfig
from workers.freezing.mask import LayerParameters
from workers.state.layer_state import LayerState


@dataclass
class Finding:
    """Result of one check of one layer, or of a shard of it."""

    statistics: dict[str, Tensor]
    """New statistics of the layer, or shard."""
    moves: dict[str, Moves] = field(default_factory=dict)
    """For AutoFreeze's score (`score_of`): by parameter, from the second check on; other metrics leave it."""


STABLE = "settled"
"""Statistic of the stable parameters: its name in checkpoints."""


class StabilityMetric(ABC):
    """A stability metric. Its memory is in `LayerState.freezing`: `checks` made so far, `STABLE` (bool per
    parameter in name order), `reference`, the weights that it looks at as they were at the last check, and what the
    metric adds. These are flat, in name order, four bytes per parameter at most but for small layers."""

    def stride(self, scalars: int) -> int:
        """Stride at which it samples a parameter of `scalars` scalars, from the first one on."""
        return 1

    def begin(self, state: LayerState, parameters: LayerParameters) -> dict[str, Tensor]:
        """Statistics before the first check."""
        return {
            "reference": torch.zeros_like(self._looked_at(state, parameters)),
            "checks": torch.zeros((), dtype=torch.int64),
            STABLE: torch.zeros(len(parameters.names), dtype=torch.bool),
        }

    @torch.no_grad()
    def check(self, state: LayerState, parameters: LayerParameters) -> Finding:
        """Look at the updates since the last check. The first check only takes the reference."""
        checks, weights = int(state.freezing["checks"]), self._looked_at(state, parameters)
        found = Finding({"checks": torch.tensor(checks + 1), "reference": weights})
        if checks:
            self._weigh(state, parameters, weights - state.freezing["reference"], found)
        return found

    def parts(self, flat: Tensor, parameters: LayerParameters) -> Sequence[Tensor]:
        """The part of each parameter of what is flat, in name order."""
        return flat.split([-(-scalars // self.stride(scalars)) for scalars in parameters.scalars])

    def _looked_at(self, state: LayerState, parameters: LayerParameters) -> Tensor:
        """The weights, flat, in new memory."""
        flat = (state.weights[name].detach().reshape(-1) for name in parameters.names)
        parts = [values[:: self.stride(values.numel())] for values in flat]
        return torch.cat(parts) if parts else torch.zeros(0)

    @abstractmethod
    def _weigh(self, state: LayerState, parameters: LayerParameters, updates: Tensor, found: Finding) -> None:
        """Form the scores of `updates`, the sums of what the weights moved by since the last check, flat."""


class Apf(StabilityMetric):
    """Adaptive parameter freezing: eq. 2 of TimelyFreeze. What oscillates without a trend is stable.

    Per scalar, E and E_abs are moving averages of the update and of its size. A tensor's score is the mean of
    |E| / E_abs over those of its scalars that have ever moved (a gradient is skipped for a whole tensor or not at
    all; the paper's masks are per scalar), of a large tensor over every fourth: three numbers of each would be three
    copies of the weights. Below the threshold it is stable. While a whole tensor is frozen, both averages decay
    equally, so it stays stable until a hybrid lets it move again.
    """

    def __init__(self, threshold: float, alpha: float) -> None:
        self._threshold = threshold
        self._alpha = alpha

    def stride(self, scalars: int) -> int:
        return apf_stride(scalars)

    def begin(self, state: LayerState, parameters: LayerParameters) -> dict[str, Tensor]:
        statistics = super().begin(state, parameters)
        averages = {key: torch.zeros_like(statistics["reference"]) for key in ("trend", "travel")}
        return {**statistics, **averages}

    def _weigh(self, state: LayerState, parameters: LayerParameters, updates: Tensor, found: Finding) -> None:
        alpha = self._alpha
        trend = state.freezing["trend"] * alpha + updates * (1 - alpha)
        travel = state.freezing["travel"] * alpha + updates.abs() * (1 - alpha)
        scores = map(perturbation, self.parts(trend, parameters), self.parts(travel, parameters))
        stable = [score < self._threshold for score in scores]
        found.statistics |= {
            "trend": trend,
            "travel": travel,
            STABLE: torch.tensor(stable, dtype=torch.bool),
        }


def perturbation(trend: Tensor, travel: Tensor) -> float:
    """The mean of |E| / E_abs over the scalars that have moved, in [0, 1]; 1 where none has."""
    moved = int(torch.count_nonzero(travel))
    if not moved:
        return 1.0
    ratios = torch.where(travel > 0, trend.abs() / travel, 0.0)
    return float(ratios.sum(dtype=torch.float64)) / moved


class AutoFreeze(StabilityMetric):
    """AutoFreeze: eq. 1 of TimelyFreeze. Layers become stable from the input up, once the size of their updates is.

    The score compares the norms of the updates of two successive intervals; which layers are stable is decided over all
    layers' scores, by `stable_prefix`. A layer that is stable has score 0. The statistic `squares` has the squared
    norm of each parameter's updates in the last interval.
    """

    def begin(self, state: LayerState, parameters: LayerParameters) -> dict[str, Tensor]:
        squares = torch.zeros(len(parameters.names), dtype=torch.float64)
        return {**super().begin(state, parameters), "squares": squares}

    def _weigh(self, state: LayerState, parameters: LayerParameters, updates: Tensor, found: Finding) -> None:
        squares: list[float] = []
        for update in self.parts(updates, parameters):
            norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
            squares.append(norm * norm)
        before: list[float] = state.freezing["squares"].tolist()
        found.statistics["squares"] = torch.tensor(squares, dtype=torch.float64)
        found.moves = dict(zip(parameters.names, zip(before, squares, strict=True), strict=True))


def stable_prefix(scores: Mapping[int, float], percentile: float) -> int:
    """Number of layers, from the input up, that AutoFreeze takes for stable: the longest run of layers whose scores
    are among the lowest `percentile` % of all layers' scores (rounded down to whole layers)."""
    count = int(percentile * len(scores) // 100)
    if not count:
        return 0
    bound = sorted(scores.values())[count - 1]
    prefix = 0
    while prefix < len(scores) and scores[prefix] <= bound and scores[prefix] != UNKNOWN:
        prefix += 1
    return prefix


def make_metric(config: FreezeConfig) -> StabilityMetric | None:
    """The metric that `config.method` chooses by; None where it draws uniformly."""
    if config.method.endswith("apf"):
        return Apf(config.apf_threshold, config.apf_alpha)
    return AutoFreeze() if config.method.endswith("autofreeze") else None
