"""Moments between which a benchmark measures: on a GPU those of its stream, so that nothing waits for it."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


class Marks:
    """Marks moments on `device`: on a CPU by the clock, on a GPU by events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self._gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, begun: Any, ended: Any) -> float:
        if not self._gpu:
            return ended - begun
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3
