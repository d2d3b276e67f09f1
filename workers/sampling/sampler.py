"""Samples a rank's surroundings in a thread of its own: training never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from planner.features import FeatureSample
from workers.sampling.gpu import gpu_reader
from workers.sampling.host import HostReader
from workers.sampling.readings import Reading, between, merged

EVERY_S = 0.25
"""Between two samples."""


class Sampler:
    """Samples until it is closed.

    Args:
        readers: each looks at a part of the machine, the host first.
    """

    def __init__(self, readers: Sequence[Callable[[], Reading]], *, every_s: float = EVERY_S) -> None:
        self._readers = readers
        self._every_s = every_s
        self._newest: FeatureSample | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> FeatureSample | None:
        """The newest sample; None before the first, or where the machine tells nothing."""
        return self._newest

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        before = self._read()
        while not self._closing.wait(self._every_s):
            after = self._read()
            self._newest = between(before, after)
            before = after

    def _read(self) -> Reading:
        return merged(reader() for reader in self._readers)


def sampler_of(device: torch.device) -> Sampler:
    """A sampler of this host and, if `device` is a GPU that NVML knows, of that GPU."""
    readers: list[Callable[[], Reading]] = [HostReader().read]
    if device.type == "cuda":
        gpu = gpu_reader(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        if gpu is not None:
            readers.append(gpu.read)
    return Sampler(readers)
