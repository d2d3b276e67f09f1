"""NCCL behind an `OrderedChannel`: each group is one coalesced NCCL call on a stream of its own.

The computing stream waits for a group, the host does not, but at the end of a window. One generation has its own
communicator; a failure raises here and never ends the process, which has a future in the next generation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workers.protocol import Generation
from workers.transport.connections import UnpolledConnections
from workers.transport.ordered import RawMessage
from workers.transport.process_group import scoped_store
from workers.transport.send_queues import SendQueues


class NcclBackend:
    """This rank's end; made by all ranks of the generation together.

    Args:
        rank: this process's position among the generation's members.
        device: the GPU, no other rank's, on which all tensors live; the process's current one.

    Raises:
        RuntimeError: the ranks' GPUs cannot reach each other.
    """

    def __init__(self, generation: Generation, rank: int, device: torch.device) -> None:
        # Read as the group is made. Torch's watchdog would end the process that sees an error or a stuck thread: our
        # own waits look for errors instead (`finish`), and the controller decides who has to go.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        self.device = device
        self._timeout = timedelta(seconds=generation.timeout_s)
        # NCCL connects pair by pair, at their first message.
        self._queues = SendQueues(UnpolledConnections(), growing=True)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.is_high_priority_stream = True
        store = dist.PrefixStore("nccl", scoped_store(generation))
        self._group: Any = dist.ProcessGroupNCCL(store, rank, len(generation.members), options)
        # The communicator of groups is made at the first call, which must be one that all ranks make.
        self.finish(self._group.allreduce([torch.zeros(1, device=device)]))

    def issue(self, sends: Sequence[RawMessage], receives: Sequence[RawMessage]) -> Any:
        # Torch makes NCCL's stream wait for the computing one, and records the tensors on it, so that their memory
        # is not used again before they have left.
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
        if handle is not None:
            # With a time given it is the host that waits; it looks for errors of the communicator all the while.
            handle.wait(self._timeout)

    def sending(self) -> bool:
        # What goes over NVLink or InfiniBand does not meet the host's own network.
        return self._queues.pending()

    def close(self) -> None:
        self._group.abort()
