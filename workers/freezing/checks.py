"""When stability is checked and what is stable: the metric's findings on their way through a commit.

A check reads the weights before a commit, travels in its record, and applies from the next step on. Without a metric
all of this is empty. Each rank, and each copy, checks the parameters whose states it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from workers.commit.freezing_scores import UNKNOWN, Moves
from workers.config import FreezeConfig
from workers.freezing.mask import LayerParameters
from workers.freezing.stability import STABLE, AutoFreeze, Finding, make_metric, stable_prefix
from workers.state.layer_state import LayerState


@dataclass(frozen=True)
class CheckFindings:
    """Findings of a check, for the commit record; empty where none was due."""

    scores: dict[int, float] = field(default_factory=dict)
    """AutoFreeze's score of each layer that it has whatever moved: all of it is stable, or this is the first check. Of
    a shard without parameters this is said too; the layer's moves, if any, count before it."""
    moves: dict[int, dict[str, Moves]] = field(default_factory=dict)
    """Moves from which the scores of the other layers follow, by parameter."""
    stable: dict[int, frozenset[str]] = field(default_factory=dict)
    """The parameters of each layer that APF calls stable."""


NOTHING_FOUND = CheckFindings()


class Checks:
    """The stability of layers, or of shards of them.

    Args:
        states: live.
        parameters: of these states.
    """

    def __init__(
        self,
        config: FreezeConfig,
        states: Mapping[int, LayerState],
        parameters: Mapping[int, LayerParameters],
    ) -> None:
        self._config = config
        self._metric = make_metric(config)
        self._states = states
        self._parameters = parameters
        self._findings: dict[int, Finding] = {}

    @property
    def on(self) -> bool:
        """Whether the method has a metric."""
        return self._metric is not None

    def look(self, step: int) -> CheckFindings:
        """Check, if one is due before the commit of `step`: every `check_every` steps, from the end of the warm-up
        on."""
        metric, warm_up = self._metric, self._config.warm_up
        if metric is None or warm_up is None:
            return NOTHING_FOUND
        since = step - 1 - warm_up
        if since < 0 or since % self._config.check_steps:
            return NOTHING_FOUND
        first = {layer: UNKNOWN for layer, state in self._states.items() if not int(state.freezing["checks"])}
        self._findings = {
            layer: metric.check(state, self._parameters[layer]) for layer, state in self._states.items()
        }
        if not isinstance(metric, AutoFreeze):
            return CheckFindings(stable={layer: self._found_stable(layer) for layer in self._findings})
        still = {layer: 0.0 for layer, state in self._states.items() if bool(state.freezing[STABLE].all())}
        scores = still | first
        moves = {layer: found.moves for layer, found in self._findings.items() if layer not in scores}
        return CheckFindings(scores=scores, moves=moves)

    def accept(self, scores: Mapping[int, float]) -> int:
        """Take over what was found, after the commit; `scores` are all layers'. Returns how many layers, from the input
        up, AutoFreeze calls stable."""
        prefix = stable_prefix(scores, self._config.autofreeze_percentile)
        for layer, found in self._findings.items():
            statistics = self._states[layer].freezing
            for key, value in found.statistics.items():
                statistics[key].copy_(value)
            if layer < prefix:
                statistics[STABLE].fill_(True)
        self._findings = {}
        return prefix

    def stable(self, layer: int) -> frozenset[str]:
        """Parameters of the layer that are stable now."""
        return self._named(layer, self._states[layer].freezing.get(STABLE))

    def _found_stable(self, layer: int) -> frozenset[str]:
        before = self._states[layer].freezing[STABLE]
        return self._named(layer, self._findings[layer].statistics.get(STABLE, before))

    def _named(self, layer: int, flags: Tensor | None) -> frozenset[str]:
        if flags is None:
            return frozenset()
        names = self._parameters[layer].names
        return frozenset(name for name, stable in zip(names, flags.tolist(), strict=True) if stable)
