"""What reading a microbatch costs a rank that needs it: all the time it takes, or where it is read ahead what the work
of the rank does not cover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from workers.data.read_ahead import SLOW_READS, timed


@dataclass(frozen=True)
class Reading:
    """The reads of one job."""

    ahead: bool
    """Whether they are made ahead of training."""
    seconds: float
    """Of one read."""
    computed_s: float
    """Of it, processor time that the read takes from a rank which computes on the host."""

    def left_s(self, work_s: float) -> float:
        """How much longer a rank takes for a microbatch, beside `work_s` of work on it, where reads are made ahead."""
        return max(self.computed_s, self.seconds - work_s)


def reading(read: Callable[[int], object], device: torch.device) -> Reading:
    """Time some reads, by the rule of training (`workers.data.read_ahead`)."""
    reads = [timed(lambda number=number: read(number), device)[1] for number in range(SLOW_READS)]
    return Reading(
        ahead=all(one.slow for one in reads),
        seconds=median(one.seconds for one in reads),
        computed_s=0.0 if device.type == "cuda" else median(one.computed_s for one in reads),
    )
