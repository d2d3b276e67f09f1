"""What the engine sees of the network: ordered streams of tensors between ranks, and one collective.

A `Stream` is one directed edge: its messages arrive in the order they were sent, and all of one shape.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """A directed edge between two ranks."""

    source: int
    target: int
    tag: int
    """Tells apart the streams of one pair of ranks; the same number on both sides."""
    name: str
    """For people, e.g. `forward stage 1 -> 2`."""


class ChannelError(RuntimeError):
    """A message that does not fit its stream, or a peer that is gone."""


@dataclass(frozen=True)
class Shape:
    """What a stream carries: fixed by its first message."""

    tensors: tuple[tuple[tuple[int, ...], str, bool], ...]
    """(shape, dtype, carries a gradient) of each tensor of a message."""

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Shape:
        return Shape(
            tuple((tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in tensors)
        )

    def allocate(self, device: torch.device | str = "cpu") -> Tensors:
        """Fresh tensors of this shape; alignment is a fresh allocation's, so that kernels see what they see uncut."""
        return tuple(
            torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype, _ in self.tensors
        )

    def mark(self, tensors: Sequence[Tensor]) -> Tensors:
        """`tensors` with `requires_grad` set as the sender's were."""
        return tuple(
            t.requires_grad_(carries) for t, (_, _, carries) in zip(tensors, self.tensors, strict=True)
        )

    def encode(self) -> bytes:
        return json.dumps(self.tensors).encode()

    @staticmethod
    def decode(text: bytes) -> Shape:
        return Shape(tuple((tuple(shape), dtype, carries) for shape, dtype, carries in json.loads(text)))

    def check(self, stream: Stream, tensors: Sequence[Tensor]) -> None:
        """Raises:
        ChannelError: `tensors` are not of this shape; names the stream and both shapes.
        """
        got = Shape.of(tensors)
        if got != self:
            raise ChannelError(
                f"{stream.name} (rank {stream.source} -> {stream.target}) carries {self.tensors},"
                f" but this message is {got.tensors}; every microbatch must have the same shape"
            )


class Channel(ABC):
    """One rank's end of all its streams, for one generation."""

    rank: int
    size: int
    receives_ahead: int = 0
    """Messages of a stream for which memory is set aside before they come."""
    sends_kept: int = 0
    """Messages that have left whose memory is kept, on all streams together; with the next one all but half go."""

    @abstractmethod
    def send(self, stream: Stream, tensors: Sequence[Tensor]) -> None:
        """Queue `tensors` (canonical, not to be changed until `flush`) as the stream's next message; does not wait."""

    @abstractmethod
    def expect(self, stream: Stream, messages: int) -> None:
        """Announce that `messages` more messages will be received, so that receives can be posted ahead."""

    def window(self, groups: Sequence[Sequence[Stream]]) -> None:
        """Announce the messages to come, as the streams of each group of messages that go at the same time.

        All ranks' groups follow one order (`lowering.py`); a channel whose streams do not hinder each other need not
        know it.
        """
        return

    @abstractmethod
    def receive(self, stream: Stream) -> Tensors:
        """The stream's next message, in fresh tensors; waits for it."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all that was sent has left."""

    def renew(self) -> None:
        """Forget what the streams have carried: from here on they are others, with shapes of their own. Every rank
        calls it after the same message, with none under way: after a commit."""
        return

    def sending(self) -> bool:
        """Whether bytes of this rank are still on their way out, into a network that others could keep them from.

        A message whose receiver is not ready for it is not: nothing of it has been sent. Any thread may ask, often.
        """
        return False

    @abstractmethod
    def all_gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, in rank order; returns when all have come."""

    @abstractmethod
    def close(self) -> None:
        """Give up the channel; calls that wait in it, here or at a neighbour, raise."""
