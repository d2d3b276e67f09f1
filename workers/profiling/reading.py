"""Time a rank waits for a microbatch: the whole read, or with read-ahead the part that compute does not hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from workers.data.read_ahead import SLOW_READS, ReadTime, timed

MOST_READS = 4 * SLOW_READS
"""Reads that may show nothing are made again, so often in all."""


@dataclass(frozen=True)
class Reading:
    """The reads of one job."""

    ahead: bool
    """Whether they are made ahead of training."""
    seconds: float
    """Time of one read."""
    computed_s: float
    """Processor time that one read takes, within `seconds`, from a rank which computes on the host."""

    def left_s(self, work_s: float) -> float:
        """Extra time of a rank for a microbatch, beside `work_s` of work on it, where reads are made ahead."""
        return max(self.computed_s, self.seconds - work_s)


def reading(read: Callable[[int], object], device: torch.device) -> Reading:
    """Time some reads, by the rule of training (`workers.data.read_ahead`)."""
    reads: list[ReadTime] = []
    decided: list[bool] = []
    while len(decided) < SLOW_READS and len(reads) < MOST_READS:
        number = len(reads)
        reads.append(timed(lambda number=number: read(number), device)[1])
        decided += [] if reads[-1].slow is None else [reads[-1].slow]
    return Reading(
        ahead=len(decided) == SLOW_READS and all(decided),
        seconds=median(one.seconds for one in reads),
        computed_s=0.0 if device.type == "cuda" else median(one.computed_s for one in reads),
    )
