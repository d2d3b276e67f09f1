"""An NVIDIA GPU. Actions are timed with events on the stream, so that timing does not make the host wait."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch

from planner.ir import Action
from workers.devices.device import Device
from workers.protocol.errors import JobError
from workers.protocol.reports import ActionSpan

BFLOAT16_SINCE = (8, 0)
"""Compute capability of the first GPUs that multiply in bfloat16; on older ones torch emulates it, slowly."""


def check_gpu(precision: str, name: str, capability: tuple[int, int]) -> None:
    """Raises:
    JobError: a GPU of this compute capability does not compute in `precision`.
    """
    if precision.startswith("bfloat16") and capability < BFLOAT16_SINCE:
        has, since = (".".join(map(str, version)) for version in (capability, BFLOAT16_SINCE))
        raise JobError(
            f"job.precision = {json.dumps(precision)}, but {name} has compute capability {has}, and GPUs compute in"
            f' bfloat16 from {since} on: set job.precision to "float16" or "float32", or use newer GPUs'
        )


class CudaDevice(Device):
    """GPU number `index` of this process."""

    def __init__(self, index: int = 0) -> None:
        if index >= torch.cuda.device_count():
            raise JobError(
                f"GPU {index} was asked for, but this process sees {torch.cuda.device_count()};"
                " set cluster.device to cpu, or give each rank a GPU with cluster.resources_per_rank"
            )
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        self._window = self._mark()
        self._begun = self._window

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start_window(self) -> None:
        self._window = self._mark()
        self._events = []

    def begin(self) -> None:
        self._begun, self.waited_s = self._mark(), 0.0

    def end(self, action: Action, layers: Sequence[int], frozen: Sequence[float] = ()) -> None:
        if self.slowdown > 1.0:
            done = self._mark()
            done.synchronize()
            computed_s = self._begun.elapsed_time(done) / 1e3 - self.waited_s
            time.sleep((self.slowdown - 1.0) * max(0.0, computed_s))
        self._events.append((action, self._begun, self._mark()))

    def spans(self) -> tuple[ActionSpan, ...]:
        if self._events:
            self._events[-1][2].synchronize()  # the actions alone, not what other threads have the device do
        return tuple(
            ActionSpan(
                action=str(action),
                start_s=self._window.elapsed_time(start) / 1e3,
                end_s=self._window.elapsed_time(end) / 1e3,
            )
            for action, start, end in self._events
        )

    def memory_bytes(self) -> int:
        """The most that tensors have taken so far."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def free_bytes(self) -> int:
        """Bytes that the driver has left, plus bytes that the allocator has reserved and does not use."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + kept

    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    def release(self) -> None:
        super().release()
        torch.cuda.empty_cache()
