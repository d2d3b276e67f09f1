"""The weights that a rank computes with, where siblings share out the states of its layers.

They are no state: each sibling updates those of its own shard, and all bring them together again before they are next
used. So whatever breaks off leaves nothing to repair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from workers.state.flat import Cut
from workers.transport.channel import Channel, MessageStream


class ComputeWeights:
    """The weights of one layer, as its module holds them, by shard.

    Args:
        parameters: those that the layer trains.
        buffers: the flat buffers of which they are views.
        cuts: the layer's, by shard number.
        number: of the shard that this rank trains.
    """

    def __init__(
        self, parameters: Iterable[Tensor], buffers: Sequence[Tensor], cuts: Sequence[Cut], number: int
    ) -> None:
        self._parameters = tuple(parameters)
        self.buffers = tuple(buffers)
        self.cuts = tuple(cuts)
        self.number = number

    @property
    def own(self) -> Cut:
        """The part of the buffers that this rank trains."""
        return self.cuts[self.number]

    def of(self, number: int) -> list[Tensor]:
        """The weights of one shard, as parts of the buffers."""
        return [self.buffers[buffer][elements] for buffer, elements in self.cuts[number].parts]

    @torch.no_grad()
    def receive(self, number: int, weights: Sequence[Tensor]) -> None:
        """Take the weights of another rank's shard."""
        for mine, theirs in zip(self.of(number), weights, strict=True):
            mine.copy_(theirs)

    def renewed(self) -> None:
        """The buffers have changed: what autocast has cast of a parameter is made again."""
        increment_version(self._parameters)


class WeightExchange:
    """Brings the weights of one rank's layers together from its siblings.

    Args:
        siblings: places that hold the same layers, by pipeline, and so by shard number.
        layers: those of which states are shared out.
        tags: first free tag on the channel; one per layer of the model is used.
    """

    def __init__(
        self, channel: Channel, siblings: Sequence[int], layers: Mapping[int, ComputeWeights], tags: int
    ) -> None:
        self._channel = channel
        self._siblings = tuple(siblings)
        self._layers = dict(sorted(layers.items()))
        self._tags = tags
        self._stale = set(self._layers)
        """Layers whose weights are not all those of the newest commit."""

    @property
    def together(self) -> bool:
        """Whether all weights are those of the newest commit."""
        return not self._stale

    def changed(self, untouched: Collection[int] = ()) -> None:
        """Each sibling has updated its own shards, but of the layers `untouched`."""
        self._stale |= self._layers.keys() - {*untouched}

    def bring(self) -> None:
        """Have all weights be those of the newest commit, if they are not yet; all siblings call it together.

        Raises:
            ChannelError: a rank is gone. Own shards are as they were, and the next generation brings the rest.
        """
        if not self._stale:
            return
        stale = {layer: weights for layer, weights in self._layers.items() if layer in self._stale}
        own = self._siblings.index(self._channel.rank)
        others = [number for number in range(len(self._siblings)) if number != own]
        groups = [
            [
                *(self._stream(layer, own, other) for other in others if weights.of(own)),
                *(self._stream(layer, other, own) for other in others if weights.of(other)),
            ]
            for layer, weights in stale.items()
        ]
        self._channel.window([group for group in groups if group])
        for layer, weights in stale.items():
            for other in others:
                self._send(self._stream(layer, own, other), weights.of(own))
        for layer, weights in stale.items():
            for other in others:
                if weights.of(other):
                    weights.receive(other, self._channel.receive(self._stream(layer, other, own)))
            weights.renewed()
        self._channel.flush()
        self._stale.clear()

    def _send(self, stream: MessageStream, weights: Sequence[Tensor]) -> None:
        if weights:
            self._channel.send(stream, weights)

    def _stream(self, layer: int, source: int, target: int) -> MessageStream:
        return MessageStream(
            self._siblings[source],
            self._siblings[target],
            self._tags + layer,
            f"weights of layer {layer}, pipeline {source} -> {target}",
        )
