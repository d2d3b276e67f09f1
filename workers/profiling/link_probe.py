"""Measures the links between ranks over the channel that the job uses, and what a commit costs.

Ranks are probed in rounds of disjoint pairs: neighbours, a pair within each machine, and one between any two
machines. On CPUs all pairs of ranks on the same two machines, or on one, are alike: the medians over those that were
probed stand for all. GPUs may be linked pair by pair: of up to 16 all pairs are probed; of more, a pair that was not is
taken for the median between its two machines, or within its one. Of more than 16 machines not every two meet: where
they did not, the slowest link that was measured is taken.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from planner.codec import from_json, to_json
from planner.profile import Link
from workers.commit.commit import CommitRecord
from workers.profiling.probe_rounds import rounds
from workers.transport.channel import Channel, MessageStream, Tensors

MOST_ROUNDS = 15
"""Enough for all pairs of up to 16 GPUs, or of up to 16 machines. It bounds the time that probing takes."""
TRIPS = 9
"""Round trips per size and direction: each once with an idle receiver and once with a busy one."""
WARM_UP = 3
"""Trips at the beginning that do not count."""
WORK = 384
"""Rows of the matrices that are multiplied between messages."""
ASLEEP_S = 0.04
"""Sleep between messages on a device that sleeps: enough to leave the host's caches."""
TRIPS_ASLEEP = 6
"""In place of `TRIPS` on a device that sleeps, where each takes so long."""
SMALL_BYTES = 256
ARRIVAL_S = 2e-3
"""Until a message has surely arrived, beside twice the time of a round trip."""
FASTEST_BYTES_PER_S = 1e12
"""The bandwidth of a link on which size makes no difference."""
COMMITS = 20


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Median seconds that one end saw for messages of one size from `source` to `target`."""

    source: int
    target: int
    size_bytes: int
    held_s: float
    """Duration of the call to send, or of the call to receive a message that had arrived."""
    transfer_s: float | None = None
    """From the begin of the send to the end of the receive; the sender knows."""


def probe_links(
    channel: Channel, sizes: Sequence[int], device: torch.device, machine: str, *, sleeps: bool
) -> tuple[tuple[Link | None, ...], ...]:
    """The links between all ranks; all of them call this together and get the same.

    Args:
        sizes: of the messages that the job may send, in bytes.
        device: where messages live.
        machine: this rank's.
        sleeps: whether the device mostly sleeps.
    """
    apart = device.type == "cuda"
    probing = _Probing(channel, device, sleeps=sleeps)
    largest = max([*sizes, 2 * SMALL_BYTES])
    seen: list[Seen] = []
    machines = [name.decode() for name in channel.all_gather(machine.encode())]
    for pairs in rounds(machines, MOST_ROUNDS, apart=apart):
        for a, b in pairs:
            if channel.rank in (a, b):
                for number, size in enumerate((SMALL_BYTES, largest)):
                    seen.append(probing.probe(a, b, 4 * number, size))
                    seen.append(probing.probe(b, a, 4 * number + 2, size))
        channel.all_gather(b"")
    facts = map(json.loads, channel.all_gather(json.dumps([asdict(one) for one in seen]).encode()))
    return all_links([Seen(**fact) for rank in facts for fact in rank], machines, apart=apart)


def all_links(
    seen: Iterable[Seen], machines: Sequence[str], *, apart: bool
) -> tuple[tuple[Link | None, ...], ...]:
    """`links[source][target]` from what was seen of some of them.

    A pair of ranks has its own link where such are `apart` and it was probed; else the one between its machines, from
    all their pairs that were; where these never met, the slowest for a message of middling size.
    """
    own: dict[tuple[int, int], list[Seen]] = defaultdict(list)
    shared: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for one in seen:
        if apart:
            own[one.source, one.target].append(one)
        shared[machines[one.source], machines[one.target]].append(one)
    of_ranks = {ends: _fit(alike) for ends, alike in own.items()}
    of_machines = {ends: _fit(alike) for ends, alike in shared.items()}

    slowest = max(of_machines.values(), key=lambda link: link.transfer_s(2**16), default=None)

    def link(source: int, target: int) -> Link | None:
        if source == target:
            return None
        between = of_machines.get((machines[source], machines[target]))
        return of_ranks.get((source, target)) or between or slowest

    ranks = range(len(machines))
    return tuple(tuple(link(source, target) for target in ranks) for source in ranks)


def probe_commit(channel: Channel, layers: int, microbatches: int, *, sleeps: bool) -> float:
    """Seconds that a commit takes when all ranks come to it at once; all of them call this together.

    Args:
        sleeps: whether they come to it from a sleep.
    """
    record = CommitRecord(
        rank=channel.rank,
        generation=1,
        step=1,
        losses=dict.fromkeys(range(microbatches), 0.123456789012345678),
        shares=dict.fromkeys(range(microbatches), 1.0),
        squared_norms=dict.fromkeys(range(layers), 0.123456789012345678),
        busy_s=0.123456789012345678,
    )
    times: list[float] = []
    for _ in range(WARM_UP + COMMITS):
        if sleeps:
            time.sleep(ASLEEP_S)
        begun_s = time.perf_counter()
        for answer in channel.all_gather(to_json(record)):
            from_json(CommitRecord, answer)
        times.append(time.perf_counter() - begun_s)
    return median(times[WARM_UP:])


class _Probing:
    """One rank's part in all probes.

    Args:
        sleeps: whether the device mostly sleeps.
    """

    def __init__(self, channel: Channel, device: torch.device, *, sleeps: bool) -> None:
        self._channel = channel
        self._device = device
        self._sleeps = sleeps
        self._trips = TRIPS_ASLEEP if sleeps else TRIPS

    def probe(self, source: int, target: int, tag: int, size: int) -> Seen:
        """Messages of `size` bytes go from `source` to `target` and back.

        Each end does other work before it sends, as in training: caches are full of other things then. First the
        receiver waits for the message: that is what a rank waits for. Then it comes late to a message that lies there:
        that is what a message takes of a rank that computes.
        """
        there = MessageStream(source, target, tag, f"probe {source} -> {target}")
        back = MessageStream(target, source, tag + 1, f"probe {source} -> {target}, back")
        begins = self._channel.rank == source
        # A window as the engine announces it.
        self._channel.window([[there], [back]] * (2 * self._trips))
        self._channel.expect(back if begins else there, 2 * self._trips)
        seen = self._begin(there, back, size) if begins else self._answer(there, back, size)
        self._channel.flush()
        return seen

    def _begin(self, there: MessageStream, back: MessageStream, size: int) -> Seen:
        sends: list[float] = []
        round_trips: list[float] = []
        for trip in range(2 * self._trips):
            busy = trip >= self._trips
            self._work()
            message = self._message(size)
            begun_s = time.perf_counter()
            self._channel.send(there, message)
            if busy:
                sends.append(time.perf_counter() - begun_s)
            answer = _receive(self._channel, back)
            if not busy:
                # The other end says how long it worked before it answered.
                round_trips.append(time.perf_counter() - begun_s - float(answer[0][0]))
        return Seen(
            source=there.source,
            target=there.target,
            size_bytes=size,
            held_s=median(sends),
            transfer_s=median(round_trips[WARM_UP:]) / 2,
        )

    def _answer(self, there: MessageStream, back: MessageStream, size: int) -> Seen:
        waits: list[float] = []
        receives: list[float] = []
        for trip in range(2 * self._trips):
            busy = trip >= self._trips
            if busy:
                time.sleep(ARRIVAL_S + 2 * median(waits[WARM_UP:]))
                # Once for as long as the sender works, and once more.
                self._work()
                self._work()
            begun_s = time.perf_counter()
            _receive(self._channel, there)
            received_s = time.perf_counter()
            (receives if busy else waits).append(received_s - begun_s)
            self._work()
            answer = self._message(size)
            answer[0][0] = time.perf_counter() - received_s
            self._channel.send(back, answer)
        return Seen(source=there.source, target=there.target, size_bytes=size, held_s=median(receives))

    def _message(self, size: int) -> Tensors:
        return (torch.ones(size // 4, device=self._device),)

    def _work(self) -> None:
        """Displace what is in the host's caches, as an action does."""
        if self._sleeps:
            time.sleep(ASLEEP_S)
        elif self._device.type == "cpu":
            matrix = torch.ones(WORK, WORK)
            torch.mm(matrix, matrix)


def _receive(channel: Channel, stream: MessageStream) -> Tensors:
    """Receive, and wait until the message is in the device's memory."""
    tensors = channel.receive(stream)
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
    return tensors


def _fit(seen: Sequence[Seen]) -> Link:
    """The link on which messages take what was seen, of links that are all alike."""
    sends = [one for one in seen if one.transfer_s is not None]
    receives = [one for one in seen if one.transfer_s is None]
    sent = _by_size((one.size_bytes, one.held_s) for one in sends)
    received = _by_size((one.size_bytes, one.held_s) for one in receives)
    transferred = _by_size((one.size_bytes, one.transfer_s or 0.0) for one in sends)
    sender_s, sender_s_per_byte = _line(sent)
    receiver_s, receiver_s_per_byte = _line(received)
    latency_s, s_per_byte = _line(
        {size: max(0.0, whole_s - sent[size] - received[size]) for size, whole_s in transferred.items()}
    )
    return Link(
        latency_s=latency_s,
        bytes_per_s=1.0 / max(s_per_byte, 1.0 / FASTEST_BYTES_PER_S),
        sender_s=sender_s,
        sender_s_per_byte=sender_s_per_byte,
        receiver_s=receiver_s,
        receiver_s_per_byte=receiver_s_per_byte,
    )


def _by_size(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The median value of each size."""
    values: dict[int, list[float]] = defaultdict(list)
    for size, value in points:
        values[size].append(value)
    return {size: median(alike) for size, alike in values.items()}


def _line(values: Mapping[int, float]) -> tuple[float, float]:
    """(value at size 0, value per byte) of the line through the smallest and the largest size; neither below 0."""
    small, large = min(values), max(values)
    slope = max(0.0, (values[large] - values[small]) / (large - small))
    return max(0.0, values[small] - slope * small), slope
