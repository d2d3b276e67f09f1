"""Two readings of a machine's counters, and the sample that lies between them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from planner.features import SAMPLED, FeatureSample

LEAST_BUSY_S = 0.002
"""A thread that could run for less than this says nothing about how long threads wait."""
_NAMES = tuple(feature.name for feature in SAMPLED)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at a machine. What it cannot tell is left out."""

    time_s: float
    """Time by a monotonic clock."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Feature -> its value at this moment."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Feature -> what it has added up to; its rate per second is the feature."""
    cores_s: tuple[float, ...] = ()
    """Busy seconds of each core so far."""
    own_s: float | None = None
    """CPU seconds of the rank's process so far."""
    threads: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Thread of the rank's process -> seconds that it ran, and seconds that it waited for a core, so far."""


def between(before: Reading, after: Reading) -> FeatureSample:
    """The sample of the time between two readings: values of the later one, rates over both.

    A total that has become smaller, as after a reset, and a value that is not finite are missing.

    Raises:
        ValueError: no time has passed between them.
    """
    window_s = after.time_s - before.time_s
    if window_s <= 0:
        raise ValueError(f"{window_s} s between two readings: the later one must be later")
    found = dict(after.values)
    for name, total in after.totals.items():
        if name in before.totals:
            found[name] = (total - before.totals[name]) / window_s
    found |= _cores(before, after, window_s) | _threads(before, after)
    kept = [(name, found[name]) for name in _NAMES if name in found]
    return FeatureSample(
        values=tuple((name, value) for name, value in kept if math.isfinite(value) and value >= 0),
        window_s=window_s,
    )


def _cores(before: Reading, after: Reading, window_s: float) -> dict[str, float]:
    found: dict[str, float] = {}
    # Counters of idle time may go back by a tick.
    busy = [max(0.0, now - then) for then, now in zip(before.cores_s, after.cores_s, strict=False)]
    if busy and len(before.cores_s) == len(after.cores_s):
        found["cpu_busy"] = min(1.0, sum(busy) / window_s / len(busy))
        found["cpu_busiest"] = min(1.0, max(busy) / window_s)
    if before.own_s is not None and after.own_s is not None:
        found["cpu_own"] = own = (after.own_s - before.own_s) / window_s
        if busy:
            # Clocks of the two differ by a tick.
            found["cpu_others"] = max(0.0, sum(busy) / window_s - own)
    return found


def _threads(before: Reading, after: Reading) -> dict[str, float]:
    spent = [
        (ran_s - then[0], waited_s - then[1])
        for thread, (ran_s, waited_s) in after.threads.items()
        if (then := before.threads.get(thread)) is not None
    ]
    ran_s, waited_s = max(spent, key=sum, default=(0.0, 0.0))
    if ran_s + waited_s < LEAST_BUSY_S:
        return {}
    return {"own_waiting": waited_s / (ran_s + waited_s)}


def merged(readings: Iterable[Reading]) -> Reading:
    """One reading of several sources, with the time of the first."""
    first, *others = readings
    values, totals = dict(first.values), dict(first.totals)
    for other in others:
        values |= other.values
        totals |= other.totals
    return replace(first, values=values, totals=totals)
