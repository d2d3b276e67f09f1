"""Stable parameters of every layer, on whichever rank it lives: a metric chooses by them, and a hybrid spreads a
stage's budget by them.

Ranks tell each other which parameters are stable, and not their weights: those are the freeze plan's, and a new plan
may start between two checks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict

from planner.freezing import Weights
from workers.freezing.mask import LayerParameters
from workers.freezing.ratios import Share
from workers.transport.channel import Channel


class StableLayers:
    """All layers of the model, as every rank knows them; of none before `meet`."""

    def __init__(self, layers: int) -> None:
        self.shares = [Share(0, 0) for _ in range(layers)]
        """Per layer. Live."""
        self.names = [frozenset[str]() for _ in range(layers)]
        """Per layer, the parameters that are stable. Live."""
        self._parameters: dict[int, LayerParameters] = {}
        self._flags: dict[int, int] = {}
        self._weights: Weights = ()

    def meet(self, channel: Channel, mine: Mapping[int, tuple[LayerParameters, int]]) -> None:
        """Learn of the other ranks' layers; all ranks call it.

        Args:
            mine: layer -> its parameters, unmeasured, and which of those that this rank keeps the states of are
                stable: see `flags_of`.
        """
        flags_of_layers: dict[int, int] = {}
        record = json.dumps({layer: (asdict(held), flags) for layer, (held, flags) in mine.items()})
        for others in channel.all_gather(record.encode()):
            for layer, (held, flags) in json.loads(others).items():
                tuples = {key: tuple(value) for key, value in held.items() if key != "name"}
                self._parameters[int(layer)] = LayerParameters(name=held["name"], **tuples)
                flags_of_layers[int(layer)] = flags_of_layers.get(int(layer), 0) | flags
        self._flags.update(flags_of_layers)
        self._weigh(self._parameters)

    def follow(self, weights: Weights) -> None:
        """From here on use the weights of a freeze plan."""
        self._weights = weights
        self._weigh(self._parameters)

    def accept(self, flags: Mapping[int, int], prefix: int) -> None:
        """Take over a check's findings: `flags` of layers, and that the first `prefix` layers are stable as a
        whole."""
        self._flags.update(flags)
        for layer in range(prefix):
            self._flags[layer] = (1 << len(self._parameters[layer].names)) - 1
        self._weigh({*flags, *range(prefix)})

    def _weigh(self, layers: Iterable[int]) -> None:
        for layer in layers:
            held, flags = self._parameters[layer], self._flags[layer]
            if self._weights:
                held = held.weighed(self._weights[layer])
            stable = frozenset(name for bit, name in enumerate(held.names) if flags >> bit & 1)
            self.names[layer] = stable
            self.shares[layer] = Share(held.weight(stable), sum(held.weights))


def flags_of(parameters: LayerParameters, stable: Collection[str]) -> int:
    """One bit for each of `parameters`, in name order, the first one the lowest: set if it is among `stable`."""
    return sum(1 << bit for bit, name in enumerate(parameters.names) if name in stable)
