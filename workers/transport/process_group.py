"""A channel between processes: Gloo over sockets, through host memory where the tensors live on a GPU.

Each directed edge is one ordered, tagged stream; receives are posted ahead in the sender's order. A process
group belongs to one generation; closing it makes every neighbour's wait fail.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.observed import LinkTime
from workers.process.pinned_memory import pinned, to_device, to_host
from workers.protocol.errors import ChannelError
from workers.protocol.orders import Generation
from workers.reproducibility.canonical import in_memory_order
from workers.transport.channel import Channel, MessageFormat, MessageStream, Tensors
from workers.transport.connections import PolledConnections
from workers.transport.link_meter import LinkMeter
from workers.transport.outbox import MOST, Outbox
from workers.transport.peers import Peers
from workers.transport.send_queues import SendQueues
from workers.transport.tcp_state import pace
from workers.transport.waiter import Waiter

POSTED_AHEAD = 4
"""Receives posted ahead on each stream: enough to keep the link busy, few enough to cost little memory."""

HEADER_BYTES = 4096

NEVER_SENT = 2**30
"""A tag that no stream has."""


class ProcessGroupChannel(Channel):
    """One rank's end of a Gloo process group.

    Args:
        generation: the membership; the store it names must be up.
        rank: this process's rank among `generation.members`.
        device: where received tensors go.
    """

    receives_ahead = POSTED_AHEAD
    sends_kept = MOST

    def __init__(self, generation: Generation, rank: int, device: torch.device) -> None:
        self.rank = generation.members.index(rank)
        self.size = len(generation.members)
        self._device = device
        self._store = store = scoped_store(generation)
        self._queues = SendQueues(PolledConnections())
        self._group: Any = dist.ProcessGroupGloo(
            store, self.rank, self.size, timedelta(seconds=generation.timeout_s)
        )
        self._queues.find_new()
        self.lost = partial(_fewer, self._queues, self._queues.open)
        """Whether a connection to another rank is broken. Cheap, and safe to call from any thread."""
        self._out_shapes: dict[MessageStream, MessageFormat] = {}
        self._in_shapes: dict[MessageStream, MessageFormat] = {}
        self._outbox = Outbox(self.lost)
        self._apart = Outbox(self.lost, most=0)
        self._gathers = Waiter("gather", self.lost)
        self._arrivals = Waiter("receive", self.lost)
        """Waits for receives that were not posted ahead."""
        self._ahead: dict[MessageStream | int, Waiter] = {}
        """One waiter per stream: messages of different streams arrive in no fixed order. For those that do, one per
        rank that they come from."""
        self._in_line: set[MessageStream] = set()
        self._posted: dict[MessageStream, deque[Tensors]] = defaultdict(deque)
        self._due: dict[MessageStream, int] = defaultdict(int)
        self._closing = threading.Lock()
        self._closed = False
        self._meter: LinkMeter | None = None
        self._pace: float | None = None

    def send(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        self._send(stream, tensors, self._outbox)

    def send_apart(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        self._send(stream, tensors, self._apart)

    def _send(self, stream: MessageStream, tensors: Sequence[Tensor], outbox: Outbox) -> None:
        shape = self._out_shapes.get(stream)
        if shape is None:
            shape = self._out_shapes[stream] = MessageFormat.of(tensors)
            self._send_bytes(stream, _padded(shape.encode(), stream), outbox)
        shape.check(stream, tensors)
        for tensor in tensors:
            self._send_bytes(stream, to_host(tensor), outbox)

    def _send_bytes(self, stream: MessageStream, tensor: Tensor, outbox: Outbox) -> None:
        if tensor.numel():
            raw = in_memory_order(tensor.detach()).view(torch.uint8)
            if self._meter is not None:
                self._meter.sending(stream.target, raw.numel())
            with _failing_on(stream):
                outbox.put(self._group.send([raw], stream.target, stream.tag), raw)

    def expect(self, stream: MessageStream, messages: int) -> None:
        self._due[stream] += messages
        self._post(stream)

    def expect_next(self, stream: MessageStream) -> None:
        self._in_line.add(stream)
        self.expect(stream, 1)

    def _post(self, stream: MessageStream) -> None:
        shape = self._in_shapes.get(stream)
        posted = self._posted[stream]
        while shape is not None and self._due[stream] and len(posted) < POSTED_AHEAD:
            self._due[stream] -= 1
            tensors = self._allocate(shape)
            self._put(stream, tensors, self._waiter(stream))
            posted.append(tensors)

    def _allocate(self, shape: MessageFormat) -> Tensors:
        """Where a message arrives: on the host."""
        return shape.allocate(pinned) if self._device.type == "cuda" else shape.allocate()

    def _put(self, stream: MessageStream, tensors: Sequence[Tensor], waiter: Waiter) -> None:
        """Post the receives of one message and have `waiter` wait for them."""
        with _failing_on(stream):
            works = [
                self._group.recv([in_memory_order(t).view(torch.uint8)], stream.source, stream.tag)
                for t in tensors
                if t.numel()
            ]
            waiter.put(partial(_wait, works))

    def _get(self, stream: MessageStream, waiter: Waiter) -> None:
        """Wait for the oldest message that `waiter` waits for."""
        with _failing_on(stream):
            waiter.get()

    def _waiter(self, stream: MessageStream) -> Waiter:
        with self._closing:
            if self._closed:
                raise ChannelError(f"{stream.name}: the channel is closed")
            line = stream.source if stream in self._in_line else stream
            if line not in self._ahead:
                self._ahead[line] = Waiter(f"receive {stream.name}", self.lost)
            return self._ahead[line]

    def receive(self, stream: MessageStream, *, on_host: bool = False) -> Tensors:
        if stream not in self._in_shapes:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            self._put(stream, (header,), self._arrivals)
            self._get(stream, self._arrivals)
            self._in_shapes[stream] = MessageFormat.decode(_unpadded(header))
            self._post(stream)
        if self._posted[stream]:
            tensors = self._posted[stream].popleft()
            self._get(stream, self._waiter(stream))
            self._post(stream)
        else:
            tensors = self._allocate(self._in_shapes[stream])
            self._put(stream, tensors, self._arrivals)
            self._get(stream, self._arrivals)
        if not on_host:
            tensors = tuple(to_device(t, self._device, ours=True) for t in tensors)
        return self._in_shapes[stream].mark(tensors)

    def flush(self) -> None:
        self._flush(self._outbox)

    def flush_apart(self) -> None:
        self._flush(self._apart)

    def _flush(self, outbox: Outbox) -> None:
        try:
            outbox.flush()
        except RuntimeError as error:
            raise ChannelError(f"a message from rank {self.rank} could not be delivered: {error}") from error

    def renew(self) -> None:
        under_way = [stream.name for stream, posted in self._posted.items() if posted]
        assert not under_way, f"messages are still to come: {under_way}"
        self._out_shapes.clear()
        self._in_shapes.clear()
        self._posted.clear()
        self._due.clear()
        self._in_line.clear()
        with self._closing:
            for waiter in self._ahead.values():
                waiter.leave()
            self._ahead.clear()

    def sending(self) -> bool:
        return self._queues.pending()

    def watch_links(self) -> None:
        with self._closing:
            if self._meter is None and not self._closed:
                # A rank that cannot measure trains all the same, until it misses whoever took the store along.
                with suppress(OSError, RuntimeError):
                    self._meter = LinkMeter(Peers(self._store, self.rank, self._queues.sockets))

    def link_times(self) -> tuple[LinkTime, ...]:
        return () if self._meter is None else self._meter.drain()

    def pace(self, bytes_per_s: float | None) -> bool:
        if bytes_per_s == self._pace:
            return True
        paced = [pace(one, bytes_per_s) for one in self._queues.sockets if one.is_open]
        if not paced or not all(paced):
            return False
        self._pace = bytes_per_s
        return True

    def all_gather(self, record: bytes) -> list[bytes]:
        self._gathers.put(partial(_gather_records, self._group, self.size, record))
        try:
            records: list[bytes] = self._gathers.get()
        except RuntimeError as error:
            raise ChannelError(f"a rank did not come to the commit: {error}") from error
        return records

    def close(self) -> None:
        sever(self._group)
        # Wake the calls that Gloo did not wake.
        with self._closing:
            self._closed = True
            for waiter in (self._gathers, self._arrivals, *self._ahead.values()):
                waiter.leave()
            if self._meter is not None:
                self._meter.close()
        self._outbox.close()
        self._apart.close()


def scoped_store(generation: Generation) -> dist.Store:
    """The store that the controller hosts for `generation`, under a prefix that no other generation uses."""
    timeout = timedelta(seconds=generation.timeout_s)
    store = dist.TCPStore(generation.store_host, generation.store_port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"epoch-{generation.epoch}/generation-{generation.number}", store)


def sever(group: dist.ProcessGroup) -> None:
    """Close all connections of `group`: every call waiting in it fails at once, here and at the neighbours.

    Gloo's own `abort` does nothing, but an operation that times out closes every connection of its rank.
    """
    for step in range(1, group.size()):
        peer = (group.rank() + step) % group.size()
        # One peer would do, but an operation on a broken connection does not close the others.
        with suppress(RuntimeError):
            work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, NEVER_SENT)
            work.wait(timedelta(milliseconds=1))


def _fewer(connections: SendQueues, than: int) -> bool:
    """Whether fewer connections than `than` are open, so a member of the group is gone."""
    return connections.open < than


def _gather_records(group: Any, size: int, record: bytes) -> list[bytes]:
    lengths = _gather(group, size, torch.tensor([len(record)], dtype=torch.int64))
    # One byte more than the longest: an empty tensor cannot be gathered.
    longest = max(int(length) for length in lengths) + 1
    padded = torch.frombuffer(bytearray(record.ljust(longest, b"\0")), dtype=torch.uint8)
    return [
        payload.numpy().tobytes()[: int(length)]
        for payload, length in zip(_gather(group, size, padded), lengths, strict=True)
    ]


def _gather(group: Any, size: int, tensor: Tensor) -> list[Tensor]:
    out = [torch.empty_like(tensor) for _ in range(size)]
    group.allgather([out], [tensor]).wait()
    return out


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


@contextmanager
def _failing_on(stream: MessageStream) -> Iterator[None]:
    """Name the stream in Gloo's error, which a broken connection raises in posting or in waiting."""
    try:
        yield
    except RuntimeError as error:
        raise ChannelError(f"{stream.name} (rank {stream.source} -> {stream.target}): {error}") from error


def _padded(text: bytes, stream: MessageStream) -> Tensor:
    if len(text) > HEADER_BYTES - 4:
        raise ChannelError(
            f"{stream.name}: a message of so many tensors that their shapes fill {len(text)} bytes"
        )
    framed = len(text).to_bytes(4, "little") + text
    return torch.frombuffer(bytearray(framed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _unpadded(header: Tensor) -> bytes:
    raw = header.numpy().tobytes()
    return raw[4 : 4 + int.from_bytes(raw[:4], "little")]
