"""Work of a neighbour on a stage's own device, through torch: matrix products, and copies to it and back.

Apart from the other kinds, which begin sooner without torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SIDE = 2048
"""Side of the matrices: one product fills a large GPU."""
COPIED_BYTES = 1 << 26
QUEUED_S = 0.005
"""Work that the neighbour queues on the device before it waits for it: the device seldom waits for the neighbour."""


def matmul(device: torch.device) -> Callable[[], object]:
    """Products of large matrices."""
    left = torch.rand(SIDE, SIDE, device=device)
    product = torch.empty_like(left)
    return _queued(lambda: torch.mm(left, left, out=product), device)


def copy(device: torch.device) -> Callable[[], object]:
    """From the host's memory to the device and back; pinned on CUDA, so that the device's copy engines do it."""
    here = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(here, device=device)

    def there_and_back() -> None:
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)

    return _queued(there_and_back, device)


def _queued(once: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`once`, as often as takes `QUEUED_S` on this device, and at least once."""

    def repeat(times: int) -> float:
        begun_s = time.perf_counter()
        for _ in range(times):
            once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun_s

    repeat(1)  # the device, its libraries and its memory are ready
    times = max(1, int(QUEUED_S / repeat(1)))
    return lambda: repeat(times)
