"""All ranks of a job as threads of this process, and the channel between them: references through queues."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from workers.launch.ranks import LaunchedJob, LaunchedRun, generation_of, host_rank, react
from workers.process.pinned_memory import to_host
from workers.protocol.errors import ChannelError
from workers.protocol.reports import Outcome, Report
from workers.rank import Rank
from workers.transport.channel import Channel, MessageFormat, MessageStream, Tensors


class Hub:
    """Where the threads of one generation meet."""

    def __init__(self, size: int, timeout_s: float = 600.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.closed = threading.Event()
        self.barrier = threading.Barrier(size)
        self.records: list[bytes] = [b""] * size
        self._queues: dict[MessageStream, queue.Queue[Tensors | None]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()

    def queue_of(self, stream: MessageStream) -> queue.Queue[Tensors | None]:
        with self._lock:
            return self._queues[stream]

    def close(self) -> None:
        self.closed.set()
        self.barrier.abort()
        with self._lock:
            for waiting in self._queues.values():
                waiting.put(None)


class LocalChannel(Channel):
    """One thread's end of a `Hub`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self._hub = hub
        self._shapes: dict[MessageStream, MessageFormat] = {}

    def send(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        self._shapes.setdefault(stream, MessageFormat.of(tensors)).check(stream, tensors)
        # Whoever sends may change them after `flush`, whether they have been received or not.
        self._hub.queue_of(stream).put(self._shapes[stream].mark([t.detach().clone() for t in tensors]))

    def expect(self, stream: MessageStream, messages: int) -> None:
        pass

    def receive(self, stream: MessageStream, *, on_host: bool = False) -> Tensors:
        waiting = self._hub.queue_of(stream)
        if self._hub.closed.is_set():
            raise ChannelError(f"{stream.name}: the channel is closed")
        try:
            tensors = waiting.get(timeout=self._hub.timeout_s)
        except queue.Empty:
            raise ChannelError(
                f"{stream.name}: nothing from rank {stream.source} for {self._hub.timeout_s} s"
            ) from None
        if tensors is None:
            raise ChannelError(f"{stream.name}: the channel is closed")
        return tuple(map(to_host, tensors)) if on_host else tensors

    def flush(self) -> None:
        pass

    def renew(self) -> None:
        self._shapes.clear()

    def all_gather(self, record: bytes) -> list[bytes]:
        try:
            self._hub.records[self.rank] = record
            self._hub.barrier.wait(self._hub.timeout_s)
            records = list(self._hub.records)
            self._hub.barrier.wait(self._hub.timeout_s)
        except threading.BrokenBarrierError:
            raise ChannelError("the channel is closed, or a rank did not come to the commit") from None
        return records

    def close(self) -> None:
        self._hub.close()


def run_threads(job: LaunchedJob) -> LaunchedRun:
    """Every rank a thread of this process."""
    world = job.plan.world_size
    hub = Hub(world, timeout_s=120.0)
    reports: list[Report] = []
    results: list[Outcome | BaseException | None] = [None] * world
    ranks: list[Rank] = []

    def accept(number: int, report: Report) -> None:
        reports.append(report)
        react(job, ranks[number], report)

    def host(number: int) -> None:
        try:
            results[number] = host_rank(
                job,
                number,
                ranks[number],
                lambda r: r.join(generation_of(job, 0), LocalChannel(hub, number)),
            )
        except BaseException as error:
            results[number] = error
            hub.close()

    ranks.extend(
        Rank(job.config, number, partial(accept, number), secret=job.secret) for number in range(world)
    )
    threads = [threading.Thread(target=host, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.close()
    _raise_first(results)
    return LaunchedRun([r for r in results if isinstance(r, Outcome)], reports)


def _raise_first(results: list[Outcome | BaseException | None]) -> None:
    errors = [r for r in results if isinstance(r, BaseException)]
    # A rank that lost its channel only tells that another one failed first.
    for error in sorted(errors, key=lambda e: type(e).__name__ == "ChannelError"):
        raise error
