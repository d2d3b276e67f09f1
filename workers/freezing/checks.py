"""When stability is checked and what is settled: the metric's findings on their way through a commit.

A check reads the weights before a commit, travels in its record, and applies from the next step on. Without a metric
all of this is empty.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.config import FreezeConfig
from workers.freezing.mask import LayerParameters
from workers.freezing.settled import flags_of
from workers.freezing.stability import AutoFreeze, Finding, make_metric, settled_prefix
from workers.state.layer_state import LayerState


class Checks:
    """The stability of a rank's layers.

    Args:
        states: the layers that the rank holds, live.
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
        self.settled = {layer: self._names(layer) for layer in states}
        """Per layer, the parameters that are settled now."""

    def look(self, step: int) -> tuple[dict[int, float], dict[int, int]]:
        """Check, if one is due before the commit of `step`: every `check_every` steps, from the end of the warm-up on.

        Returns:
            For the commit record: AutoFreeze's score of each layer, and which parameters of each APF calls settled, in
            the form of `flags_of`.
        """
        metric, warm_up = self._metric, self._config.warm_up
        if metric is None or warm_up is None:
            return {}, {}
        since = step - 1 - warm_up
        if since < 0 or since % self._config.check_every:
            return {}, {}
        self._findings = {
            layer: metric.check(state, self._parameters[layer]) for layer, state in self._states.items()
        }
        if isinstance(metric, AutoFreeze):
            return {layer: found.score for layer, found in self._findings.items()}, {}
        return {}, {layer: self._found_flags(layer) for layer in self._findings}

    def take(self, scores: Mapping[int, float]) -> int:
        """Take over what was found, after the commit; `scores` are all layers'. Returns how many layers, from the input
        up, AutoFreeze calls settled."""
        prefix = settled_prefix(scores, self._config.autofreeze_percentile)
        for layer, found in self._findings.items():
            statistics = self._states[layer].freezing
            for key, value in found.statistics.items():
                statistics[key].copy_(value)
            if layer < prefix:
                statistics["settled"].fill_(True)
            self.settled[layer] = self._names(layer)
        self._findings = {}
        return prefix

    def flags(self, layer: int) -> int:
        """Which parameters of the layer are settled now."""
        names = self._parameters[layer].names
        return flags_of([name in self.settled[layer] for name in names])

    def _found_flags(self, layer: int) -> int:
        found = self._findings[layer].statistics.get("settled", self._states[layer].freezing["settled"])
        return flags_of(found.tolist())

    def _names(self, layer: int) -> frozenset[str]:
        flags = self._states[layer].freezing.get("settled")
        if flags is None:
            return frozenset()
        names = self._parameters[layer].names
        return frozenset(name for name, settled in zip(names, flags.tolist(), strict=True) if settled)
