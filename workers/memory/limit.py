"""A limit on what a rank's tensors may take in a window, for drills: allocations beyond it fail.

What is alive is counted as the planner counts it (`planner/simulation/memory.py`), so a plan whose predicted peak is
below the limit passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from workers.profiling.counted_memory import LiveStorages
from workers.state.layer_state import LayerState


class LimitReached(MemoryError):
    """A drill's limit: the operation's result does not fit beside what is alive."""

    def __init__(self, limit_bytes: int, held_bytes: int, needed_bytes: int) -> None:
        super().__init__(f"a drill leaves this rank {limit_bytes:,} bytes for its tensors")
        self.limit_bytes = limit_bytes
        self.held_bytes = held_bytes
        self.needed_bytes = needed_bytes


class LimitedMemory(LiveStorages):
    """Inside the context, an operation whose result takes the storages beyond `limit_bytes` raises.

    Args:
        states: of the layers that are there already.
    """

    def __init__(self, limit_bytes: int, states: Iterable[LayerState]) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        for state in states:
            self.add(_tensors(state))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        held_bytes = self.live_bytes
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live_bytes > max(self._limit_bytes, held_bytes):
            raise LimitReached(self._limit_bytes, held_bytes, self.live_bytes - held_bytes)
        return results


def _tensors(state: LayerState) -> Iterable[Tensor]:
    yield from state.weights.values()
    yield from state.buffers.values()
    for slots in state.slots.values():
        yield from slots.values()
    yield from state.freezing.values()
    yield from (flat.cast for flat in state.flats if flat.cast is not None)
