"""NCCL behind an `OrderedChannel`: each group is one coalesced NCCL call on a stream of its own.

The compute stream waits for each group; the host waits only at the end of a window, and looks meanwhile whether all
ranks are still there: NCCL itself does not notice a death inside a node. Each generation has its own communicator. A
failure raises here and never ends the process, which goes on in the next generation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workers.protocol.orders import Generation
from workers.transport.connections import UnpolledConnections
from workers.transport.ordered import RawMessage
from workers.transport.process_group import scoped_store
from workers.transport.send_queues import SendQueues

LOOK_S = 1e-4
"""Seconds between two looks whether a group is complete."""


class NcclBackend:
    """This rank's end. All ranks of the generation create theirs together.

    Args:
        rank: this process's position among the generation's members.
        device: the GPU on which all tensors live: this rank's alone, and the process's current one.
        lost: whether a member of the generation is gone; cheap.

    Raises:
        RuntimeError: the ranks' GPUs cannot reach each other.
    """

    def __init__(
        self, generation: Generation, rank: int, device: torch.device, lost: Callable[[], bool]
    ) -> None:
        # Torch reads these as it makes the group. Its watchdog would end a process that has an error or a
        # stuck thread. Instead, our own waits check for errors (`finish`), and the controller decides which
        # rank leaves.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        self.device = device
        self._lost = lost
        self._timeout = timedelta(seconds=generation.timeout_s)
        # NCCL connects each pair of ranks at its first message.
        self._queues = SendQueues(UnpolledConnections(), growing=True)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.is_high_priority_stream = True
        store = dist.PrefixStore("nccl", scoped_store(generation))
        self._group: Any = dist.ProcessGroupNCCL(store, rank, len(generation.members), options)
        # The first call makes the communicator for groups, so all ranks must make it.
        self.finish(self._group.allreduce([torch.zeros(1, device=device)]))

    def issue(self, sends: Sequence[RawMessage], receives: Sequence[RawMessage]) -> Any:
        # Torch makes NCCL's stream wait for the compute stream, and records the tensors on it, so that their
        # memory is not reused before they have left.
        self._group._start_coalescing()
        for tensor, target in sends:
            self._group.send([tensor], target, 0)
        for tensor, source in receives:
            self._group.recv([tensor], source, 0)
        return self._group._end_coalescing()

    def wait(self, handle: Any) -> None:
        if handle is not None:
            handle.wait()

    def finish(self, handle: Any) -> None:
        if handle is None:
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not handle.is_completed():
            if self._lost():
                raise RuntimeError("a connection to another rank is broken")
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_S)
        # Given a timeout, this waits for errors of the communicator too.
        handle.wait(self._timeout)

    def sending(self) -> bool:
        # Traffic over NVLink or InfiniBand does not share the host's own network.
        return self._queues.pending()

    def close(self) -> None:
        self._group.abort()
