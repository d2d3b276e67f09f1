"""A network on which each rank's groups run strictly one after the other, over real sockets. It is stricter
than NCCL, where a rank may go on computing while a group waits for its turn; here the rank may have to
wait."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.protocol.orders import Generation
from workers.transport.connections import PolledConnections
from workers.transport.ordered import OrderedChannel, RawMessage
from workers.transport.process_group import ProcessGroupChannel, scoped_store, sever
from workers.transport.send_queues import SendQueues


class SerialBackend:
    """Issues a group only when the one before is over, on its own thread; `in_the_way` blocks the caller."""

    device = torch.device("cpu")

    def __init__(self, generation: Generation, rank: int, *, in_the_way: bool) -> None:
        timeout = timedelta(seconds=generation.timeout_s)
        store = dist.PrefixStore("serial", scoped_store(generation))
        self._queues = SendQueues(PolledConnections())
        self._group = dist.ProcessGroupGloo(store, rank, len(generation.members), timeout)
        self._queues.find_new()
        self._in_the_way = in_the_way
        self._thread = ThreadPoolExecutor(1)

    def issue(self, sends: Sequence[RawMessage], receives: Sequence[RawMessage]) -> Future[None]:
        future = self._thread.submit(self._move, sends, receives)
        if self._in_the_way:
            future.result()
        return future

    def _move(self, sends: Sequence[RawMessage], receives: Sequence[RawMessage]) -> None:
        works = [self._group.send([raw], target, 0) for raw, target in sends]
        works += [self._group.recv([raw], source, 0) for raw, source in receives]
        for work in works:
            work.wait()

    def wait(self, handle: Future[None]) -> None:
        handle.result()

    def finish(self, handle: Future[None]) -> None:
        handle.result()

    def sending(self) -> bool:
        return self._queues.pending()

    def close(self) -> None:
        sever(self._group)
        self._thread.shutdown(wait=False, cancel_futures=True)


def serial_channel(generation: Generation, rank: int) -> OrderedChannel:
    control = ProcessGroupChannel(generation, rank, torch.device("cpu"))
    return OrderedChannel(control, SerialBackend(generation, rank, in_the_way=False))


def blocking_channel(generation: Generation, rank: int) -> OrderedChannel:
    control = ProcessGroupChannel(generation, rank, torch.device("cpu"))
    return OrderedChannel(control, SerialBackend(generation, rank, in_the_way=True))
