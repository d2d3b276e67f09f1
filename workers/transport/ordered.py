"""A channel over a network that carries a rank's messages one after the other, in one order for all ranks.

The engine announces the groups of a window (`lowering.py`), then sends and receives as on any channel.
Shapes, commits and the streams that no group names go over a control channel. Knows no schedule and no NCCL.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.observed import LinkTime
from workers.protocol.errors import ChannelError
from workers.reproducibility.canonical import in_memory_order
from workers.transport.channel import Channel, MessageFormat, MessageStream, Tensors

RawMessage = tuple[Tensor, int]
"""uint8[bytes], contiguous, and the rank that sends or receives it."""


class Backend(Protocol):
    """Moves groups of messages. Groups complete in the order in which they were issued."""

    device: torch.device
    """Where the tensors live."""

    def issue(self, sends: Sequence[RawMessage], receives: Sequence[RawMessage]) -> Any:
        """Start one group, after all earlier ones; messages from one rank to another match in order.

        Returns:
            A handle of the group.
        """
        ...

    def wait(self, handle: Any) -> None:
        """Make later computation wait for the group; raises RuntimeError if the group failed."""
        ...

    def finish(self, handle: Any) -> None:
        """Wait until this and all earlier groups are complete; raises RuntimeError if one of them failed."""
        ...

    def sending(self) -> bool:
        """See `Channel.sending`."""
        ...

    def close(self) -> None:
        """Close it; waiting calls raise or return."""
        ...


class OrderedChannel(Channel):
    """One rank's end.

    It issues a group as soon as the engine has queued all of its sends and the groups before it are issued.

    Args:
        control: carries everything but the messages of windows.
        backend: carries the messages of windows.
    """

    def __init__(self, control: Channel, backend: Backend) -> None:
        self.rank = control.rank
        self.size = control.size
        self._control = control
        self._backend = backend
        self._groups: deque[Sequence[MessageStream]] = deque()
        self._ordered: set[MessageStream] = set()
        self._queued: dict[MessageStream, deque[Tensors]] = defaultdict(deque)
        self._arriving: dict[MessageStream, deque[tuple[Any, Tensors]]] = defaultdict(deque)
        self._shapes: dict[MessageStream, MessageFormat] = {}
        self._newest: Any = None
        self._closed = False

    def window(self, groups: Sequence[Sequence[MessageStream]]) -> None:
        assert not self._groups, f"the window before left {len(self._groups)} groups that were never issued"
        self._groups.extend(groups)
        self._ordered = {stream for group in groups for stream in group}
        self._advance()

    def send(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        if stream not in self._ordered:
            self._control.send(stream, tensors)
            return
        shape = self._shapes.get(stream)
        if shape is None:
            shape = self._shapes[stream] = MessageFormat.of(tensors)
            self._control.send(stream, (torch.frombuffer(bytearray(shape.encode()), dtype=torch.uint8),))
        shape.check(stream, tensors)
        self._queued[stream].append(tuple(tensors))
        self._advance()

    def send_apart(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        self._control.send_apart(stream, tensors)

    def flush_apart(self) -> None:
        self._control.flush_apart()

    def expect(self, stream: MessageStream, messages: int) -> None:
        if stream not in self._ordered:
            self._control.expect(stream, messages)

    def expect_next(self, stream: MessageStream) -> None:
        self._control.expect_next(stream)

    def receive(self, stream: MessageStream, *, on_host: bool = False) -> Tensors:
        if stream not in self._ordered:
            return self._control.receive(stream, on_host=on_host)
        assert not on_host, f"{stream.name} is of a window, whose messages go to the device"
        while not self._arriving[stream]:
            self._issue()
        handle, tensors = self._arriving[stream].popleft()
        with self._failing_as(stream.name):
            self._backend.wait(handle)
        self._advance()
        return self._shapes[stream].mark(tensors)

    def flush(self) -> None:
        if self._newest is not None:
            with self._failing_as("end of the window"):
                self._backend.finish(self._newest)
            self._newest = None
        self._control.flush()

    def renew(self) -> None:
        assert not self._groups, f"{len(self._groups)} groups of the window were never issued"
        self._shapes.clear()
        self._ordered.clear()
        self._control.renew()

    def sending(self) -> bool:
        return self._control.sending() or self._backend.sending()

    def watch_links(self) -> None:
        self._control.watch_links()

    def link_times(self) -> tuple[LinkTime, ...]:
        return self._control.link_times()

    def all_gather(self, record: bytes) -> list[bytes]:
        return self._control.all_gather(record)

    def close(self) -> None:
        self._closed = True
        # The commits first: a rank that wakes when the backend closes must not reach one.
        self._control.close()
        self._backend.close()

    def _advance(self) -> None:
        """Issue the next groups whose sends are queued and whose shapes are known: this waits for nobody."""
        while self._groups and all(
            self._queued[s] if s.source == self.rank else s in self._shapes for s in self._groups[0]
        ):
            self._issue()

    def _issue(self) -> None:
        assert self._groups, "a message was asked for that no group of this window brings"
        group = self._groups.popleft()
        sends: list[RawMessage] = []
        receives: list[RawMessage] = []
        arriving: list[tuple[MessageStream, Tensors]] = []
        for stream in group:
            if stream.source == self.rank:
                assert self._queued[stream], f"{stream.name} is waited for before it was sent: wrong order"
                sends.extend((raw, stream.target) for raw in _raw(self._queued[stream].popleft()))
            else:
                tensors = self._shape(stream).allocate(partial(torch.empty, device=self._backend.device))
                receives.extend((raw, stream.source) for raw in _raw(tensors))
                arriving.append((stream, tensors))
        with self._failing_as(group[0].name):
            self._newest = self._backend.issue(sends, receives)
        for stream, tensors in arriving:
            self._arriving[stream].append((self._newest, tensors))

    def _shape(self, stream: MessageStream) -> MessageFormat:
        """The shape of `stream`, which the sender announces before its first message."""
        if stream not in self._shapes:
            (text,) = self._control.receive(stream)
            self._shapes[stream] = MessageFormat.decode(text.cpu().numpy().tobytes())
        return self._shapes[stream]

    @contextmanager
    def _failing_as(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ChannelError(f"rank {self.rank}, {what}: {error}") from error
        if self._closed:
            raise ChannelError(f"rank {self.rank}, {what}: the channel is closed")


def _raw(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [in_memory_order(t.detach()).view(torch.uint8) for t in tensors if t.numel()]
