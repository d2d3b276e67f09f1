"""Devices that ranks compute on, and the clock that times their actions."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import psutil
import torch

from planner.ir import Action
from workers.devices.machine import host_memory_bytes
from workers.process.host_memory import free_host_bytes, give_freed_pages_back
from workers.protocol.reports import ActionSpan


class Device(ABC):
    """A device and the record of what ran on it since the last commit."""

    torch_device: torch.device
    slowdown: float = 1.0
    """Factor on the time of each action; more than 1 only under fault injection."""
    waited_s: float = 0.0
    """Time that the action under way has waited for other ranks: a slowdown does not multiply it."""

    @abstractmethod
    def start_window(self) -> None:
        """Begin a window: times count from here."""

    @abstractmethod
    def begin(self) -> None:
        """An action's computation begins; its input has arrived."""

    @abstractmethod
    def end(self, action: Action, layers: Sequence[int], frozen: Sequence[float] = ()) -> None:
        """The computation of `action` on `layers` has been issued.

        Args:
            frozen: per layer, the share of its weight-gradient time that was left out; empty for none of any.
        """

    @abstractmethod
    def spans(self) -> tuple[ActionSpan, ...]:
        """The window's actions so far, complete: waits for the device to finish them."""

    def forward_s(self, layers: Sequence[int], measured_s: float) -> float:
        """The time that a forward pass of `layers` takes which was measured as `measured_s`."""
        return measured_s

    def memory_bytes(self) -> int:
        """Device memory that this process takes: here the host's."""
        return psutil.Process().memory_info().rss

    def held_bytes(self) -> int | None:
        """Device memory that this process's tensors take now; None where nobody counts them."""
        return None

    def free_bytes(self) -> int:
        """Device memory that this process could still take: here the host's."""
        return free_host_bytes()

    def total_bytes(self) -> int:
        """The device's memory, shared with other processes: here the host's."""
        return host_memory_bytes()

    def release(self) -> None:
        """Give back memory that nothing uses: to the host, and to other processes on the device."""
        gc.collect()
        give_freed_pages_back()


class CpuDevice(Device):
    """The host's own cores."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._window_s = self._begun_s = time.perf_counter()
        self._spans: list[tuple[Action, float, float]] = []

    def start_window(self) -> None:
        self._window_s = time.perf_counter()
        self._spans = []

    def begin(self) -> None:
        self._begun_s, self.waited_s = time.perf_counter(), 0.0

    def end(self, action: Action, layers: Sequence[int], frozen: Sequence[float] = ()) -> None:
        if self.slowdown > 1.0:
            computed_s = time.perf_counter() - self._begun_s - self.waited_s
            time.sleep((self.slowdown - 1.0) * max(0.0, computed_s))
        self._record(action)

    def _record(self, action: Action) -> None:
        self._spans.append((action, self._begun_s, time.perf_counter()))

    def spans(self) -> tuple[ActionSpan, ...]:
        return tuple(
            ActionSpan(action=str(action), start_s=start - self._window_s, end_s=end - self._window_s)
            for action, start, end in self._spans
        )
