"""Network interface of the engine: ordered streams of tensors between ranks, and one collective.

A `MessageStream` is one directed edge: its messages arrive in the order they were sent, and all have the same shape.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.observed import LinkTime
from workers.protocol.errors import JobError
from workers.reproducibility.canonical import CHANNELS_LAST, first_of_each, has_channels_last

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class MessageStream:
    """A directed edge between two ranks."""

    source: int
    target: int
    tag: int
    """Distinguishes the streams between one pair of ranks; both sides use the same number."""
    name: str
    """For error messages, e.g. `forward stage 1 -> 2`."""


@dataclass(frozen=True)
class MessageFormat:
    """Format of a stream's messages, fixed by the first one."""

    tensors: tuple[tuple[tuple[int, ...], str, bool], ...]
    """(shape, dtype, carries a gradient) of each tensor of a message."""
    firsts: tuple[int, ...]
    """Per tensor that carries a gradient, the first that is the same one: they are one again where they arrive."""
    channels_last: frozenset[int] = frozenset()
    """Tensors that are images whose channels lie last."""

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> MessageFormat:
        return MessageFormat(
            tuple((tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in tensors),
            tuple(
                first if t.requires_grad else number
                for number, (t, first) in enumerate(zip(tensors, first_of_each(tensors), strict=True))
            ),
            frozenset(number for number, t in enumerate(tensors) if has_channels_last(t)),
        )

    def allocate(self, empty: Callable[..., Tensor] = torch.empty) -> Tensors:
        """Fresh tensors of this shape. Each has the alignment of a fresh allocation, so that kernels compute
        on it as they do without a pipeline cut.

        Args:
            empty: allocates one of a shape, `dtype` and `memory_format`.
        """
        return tuple(
            empty(
                shape,
                dtype=getattr(torch, dtype),
                memory_format=CHANNELS_LAST[len(shape)]
                if number in self.channels_last
                else torch.contiguous_format,
            )
            for number, (shape, dtype, _) in enumerate(self.tensors)
        )

    def mark(self, tensors: Sequence[Tensor]) -> Tensors:
        """`tensors`, with `requires_grad` set as on the sender's, and those one that are one there."""
        marked = [t.requires_grad_(carries) for t, (_, _, carries) in zip(tensors, self.tensors, strict=True)]
        return tuple(marked[first] for first in self.firsts)

    def encode(self) -> bytes:
        if self.channels_last:
            return json.dumps([self.tensors, self.firsts, sorted(self.channels_last)]).encode()
        plain = self.firsts == tuple(range(len(self.tensors)))
        return json.dumps([self.tensors] if plain else [self.tensors, self.firsts]).encode()

    @staticmethod
    def decode(text: bytes) -> MessageFormat:
        tensors, *more = json.loads(text)
        return MessageFormat(
            tuple((tuple(shape), dtype, carries) for shape, dtype, carries in tensors),
            tuple(more[0]) if more else tuple(range(len(tensors))),
            frozenset(more[1]) if len(more) > 1 else frozenset(),
        )

    def check(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        """Raises:
        JobError: `tensors` are not of this shape, nor would they be if the step were repeated; names the stream and
            both shapes.
        """
        got = MessageFormat.of(tensors)
        if got != self:
            raise JobError(
                f"{stream.name} (rank {stream.source} -> {stream.target}) carries {self}, but this message is {got}:"
                " every microbatch must have the same shape, so pad or crop its samples in the data source, and what a"
                " layer makes of them in the layer"
            )

    def __str__(self) -> str:
        return ", ".join(
            f"{dtype} {list(shape)}{' with a gradient' if carries else ''}"
            f"{', channels last' if number in self.channels_last else ''}"
            for number, (shape, dtype, carries) in enumerate(self.tensors)
        )


class Channel(ABC):
    """One rank's end of all its streams, for one generation."""

    rank: int
    size: int
    receives_ahead: int = 0
    """Messages per stream for which memory is allocated before they arrive."""
    sends_kept: int = 0
    """Sent messages whose memory is still kept, over all streams. The next one frees all but half of them."""

    @abstractmethod
    def send(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        """Queue `tensors` as the stream's next message; does not wait.

        They are canonical, and nobody changes them until `flush`.
        """

    def send_apart(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        """Send large messages like `send`: none is kept once it has left, and `flush_apart` waits for them alone."""
        self.send(stream, tensors)

    def flush_apart(self) -> None:
        """Wait until all that was sent apart has left; `flush` does not."""
        return

    @abstractmethod
    def expect(self, stream: MessageStream, messages: int) -> None:
        """Announce `messages` more messages, so that receives can be posted ahead."""

    def expect_next(self, stream: MessageStream) -> None:
        """Announce one more message, which comes after all from that rank that were announced so: one thread can wait
        for them."""
        self.expect(stream, 1)

    def window(self, groups: Sequence[Sequence[MessageStream]]) -> None:
        """Announce the next messages: for each group of messages that travel together, their streams.

        The groups of all ranks follow one order (`lowering.py`). A channel whose streams are independent can
        ignore it.
        """
        return

    @abstractmethod
    def receive(self, stream: MessageStream, *, on_host: bool = False) -> Tensors:
        """The stream's next message, in fresh tensors; waits for it.

        Args:
            on_host: leave it in host memory. Not for streams of a `window`.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until every queued message has left."""

    def renew(self) -> None:
        """Forget the shapes of all streams: from here on they may carry messages of other shapes.

        Every rank calls it after the same message, a commit, while no message is in flight.
        """
        return

    def sending(self) -> bool:
        """Whether bytes of this rank are still on their way out, into a network shared with other traffic.

        A message whose receiver is not ready does not count: none of its bytes have been sent. Cheap, and
        safe to call from any thread.
        """
        return False

    def watch_links(self) -> None:
        """Measure from now on how fast this rank's messages travel, where they travel over a network."""
        return

    def link_times(self) -> tuple[LinkTime, ...]:
        """Link times measured since the last call; empty if nothing is measured here."""
        return ()

    def pace(self, bytes_per_s: float | None) -> bool:
        """Send to each rank at no more than `bytes_per_s` from now on, None: as fast as the link can.

        Returns:
            Whether this channel does so.
        """
        return False

    @abstractmethod
    def all_gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, in rank order; returns when all have arrived."""

    @abstractmethod
    def close(self) -> None:
        """Close the channel. Calls waiting in it, here or at a neighbour, raise."""
