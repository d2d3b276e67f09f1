"""A pipeline that executes several replicas holds two gradients, however many replicas there are."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.parts.rank_threads import Hub, LocalChannel
from planner.shares import ReplicaPart
from workers.gradients.exchange import ReplicaExchange
from workers.gradients.parts import GradientParts
from workers.gradients.replica_sums import ReplicaSums
from workers.gradients.sink import GradientSink
from workers.state.flat import GradientBuffers

ELEMENTS = 1 << 24
"""Of 32 bits: large enough to be told from all else that a process holds."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def window_by_window(summed: dict[int, GradientBuffers], replicas: int) -> GradientSink:
    """As with siblings; here there are none."""
    windows = [(ReplicaPart(replica, 0, 1, 0),) for replica in range(replicas)]
    channel = LocalChannel(Hub(1, timeout_s=30.0), 0)
    exchange = ReplicaExchange(channel, (0,), summed, 0, [part for (part,) in windows])
    return GradientParts(exchange, 1, summed, windows)


@pytest.mark.parametrize("replicas", [2, 8])
@pytest.mark.parametrize("alone", [True, False])
def test_the_memory_of_gradients_does_not_grow_with_the_replicas(replicas: int, alone: bool) -> None:
    parameter = nn.Parameter(torch.zeros(ELEMENTS))
    summed = {0: GradientBuffers({"weight": parameter})}
    sink = ReplicaSums(summed, 1) if alone else window_by_window(summed, replicas)
    before, most = resident_bytes(), 0
    for replica in range(replicas):
        sink.begin_window()
        sink.begin(0, replica)
        parameter.grad = summed[0].home(parameter).detach().fill_(replica + 1)
        sink.end(0, replica, whole=True)
        most = max(most, resident_bytes() - before)
    sink.reduce()
    assert parameter.grad is not None
    assert (parameter.grad == sum(range(1, replicas + 1))).all()
    assert most <= 2.1 * 4 * ELEMENTS
