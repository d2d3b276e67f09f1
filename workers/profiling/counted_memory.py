"""Counts the storages that live: what tensors take, not what an allocator or the process reserves.

It watches the results of every operation, so no module reports to it: what autograd saves, what the deferral holds,
weights, optimizer state and message buffers are all storages. Knows no layer and no schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from workers.process.dispatch_mode import DispatchMode


@dataclass(frozen=True, kw_only=True)
class CountedMemory:
    """The most that lived at one time on one rank, from the report on the step before to the report on this one: in
    the window after this step, because a step is reported once all ranks have passed its commit."""

    rank: int
    step: int
    peak_bytes: int


class LiveStorages(DispatchMode):
    """Inside the context it counts the storages made on this thread, and in backward passes begun on it, until they
    die. It counts earlier ones that are `add`ed. Costs tens of microseconds per operation."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        """The most since the count began or since `restart`."""

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors`, each once."""
        for tensor in tensors:
            self._watch(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def restart(self) -> int:
        """Begin a new peak at what lives now; returns the one before."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.add(result for result in tree_iter(results) if isinstance(result, Tensor))
        return results

    def _watch(self, storage: torch.UntypedStorage) -> None:
        # Torch keeps one Python object per storage for as long as the storage lives, so a weak reference to it sees
        # the end of the storage.
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._deaths[key] = weakref.ref(storage, lambda _: self._died(key))
        self.live_bytes += self._sizes[key]

    def _died(self, key: int) -> None:
        del self._deaths[key]
        self.live_bytes -= self._sizes.pop(key)
