"""Choice of the samples of ranks' surroundings to log: some features, now and then. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from orchestrator.events.types import Sampled, Surroundings
from planner.adapt.samples import believed
from planner.features import FeatureSample
from planner.observed import StepTimes

EVERY_S = 10.0
"""Between two logged samples of a small job."""
RANK_S = 0.1
"""The same for each rank, so that a job of many ranks logs no more per second."""
LOGGED = (
    "cpu_busy",
    "cpu_others",
    "cpu_pressure",
    "cpu_stolen",
    "own_waiting",
    "memory_free",
    "memory_pressure",
    "io_pressure",
    "disk_written",
    "network_out",
    "network_errors",
    "gpu_busy",
    "gpu_memory_busy",
    "gpu_memory_others",
    "gpu_sm_clock",
    "gpu_throttled_power",
    "gpu_throttled_heat",
)


class Thinning:
    """Keeps each rank's newest sample until the next are due."""

    def __init__(self) -> None:
        self._newest: dict[int, FeatureSample] = {}
        self._waited_s: dict[int, float] = {}
        self._logged_s: float | None = None

    def see(self, batch: Iterable[StepTimes]) -> None:
        """Remember the newest samples."""
        for observed in batch:
            if observed.surroundings is not None:
                self._newest[observed.rank] = observed.surroundings
            if observed.waited_s is not None and 0 <= observed.waited_s < math.inf:
                self._waited_s[observed.rank] = observed.waited_s

    def due(self, now_s: float, step: int, slowdowns: Mapping[int, float]) -> Sampled | None:
        """The samples to log, if it is time: those of the ranks that have a slowdown.

        Args:
            now_s: of a clock that never goes back.
        """
        found = {rank: sample for rank, sample in self._newest.items() if rank in slowdowns}
        every_s = max(EVERY_S, RANK_S * len(found))
        if not found or (self._logged_s is not None and now_s - self._logged_s < every_s):
            return None
        self._logged_s, self._newest = now_s, {}
        waited_s, self._waited_s = self._waited_s, {}
        return Sampled(
            step=step,
            ranks=tuple(
                Surroundings(
                    rank=rank,
                    slowdown=float(f"{slowdowns[rank]:.4g}"),
                    values=_logged(found[rank]),
                    waited_s=waited_s.get(rank),
                )
                for rank in sorted(found)
            ),
        )


def _logged(sample: FeatureSample) -> tuple[tuple[str, float], ...]:
    return tuple(
        (name, float(f"{value:.4g}")) for name, value in believed(sample)[0].items() if name in LOGGED
    )
