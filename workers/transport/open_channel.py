"""Chooses the network of a generation: NCCL where each rank has a GPU of its own, else Gloo."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from workers.protocol.errors import ChannelError
from workers.protocol.orders import Generation
from workers.transport.channel import Channel
from workers.transport.nccl import NcclBackend
from workers.transport.ordered import OrderedChannel
from workers.transport.process_group import ProcessGroupChannel


def open_channel(generation: Generation, rank: int, device: torch.device) -> Channel:
    """The channel of global rank `rank`; waits for all members of the generation.

    Raises:
        ChannelError: a member is gone, or the GPUs cannot reach each other.
    """
    control = ProcessGroupChannel(generation, rank, device)
    try:
        # All ranks compute on devices of one kind, so either all of them reach the all-gather or none does.
        if device.type != "cuda" or not each_has_its_own_gpu(control.all_gather(_gpu(device))):
            return control
        return OrderedChannel(control, NcclBackend(generation, control.rank, device, control.lost))
    except ChannelError:
        control.close()
        raise
    except RuntimeError as error:
        control.close()
        raise ChannelError(
            f"rank {rank}: NCCL could not connect the GPUs: {error}; NCCL_DEBUG=INFO in the ranks' environment"
            " says more"
        ) from error


def each_has_its_own_gpu(gpus: Sequence[bytes]) -> bool:
    """Whether there are several ranks, each on a GPU of its own that NCCL can use.

    Args:
        gpus: each rank's `_gpu`.
    """
    return len(gpus) > 1 and all(gpus) and len(set(gpus)) == len(gpus)


def _gpu(device: torch.device) -> bytes:
    """Host and identity of the GPU; empty where this torch has no NCCL."""
    if not dist.is_nccl_available():
        return b""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}".encode()
