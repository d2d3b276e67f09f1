"""When a rank has become slower or faster: change points in the sequence of its measured slowdowns.

A two-sided CUSUM (Page 1954) on the logarithm of measured over known slowdown. Deviations are clipped, so that one
outlier alone never raises an alarm, and scaled by the rank's own noise, so that a noisy rank raises no more than a
quiet one. Pure: the state goes in and comes out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

DRIFT = 0.03
"""Deviation (of the logarithm) that counts as none: changes of less than twice this are not looked for."""
THRESHOLD = 0.40
"""Sum of deviations beyond the drift that is a change."""
CLIPPED_SHARE = 0.55
"""Most that one measurement adds to a sum, as a share of the threshold: two are needed, and two in a row are enough."""
NOISE_DRIFT, NOISE_THRESHOLD = 0.75, 8.0
"""The same two in standard deviations of the noise, where these are larger."""
SMOOTHING = 0.05
"""Weight of one measurement in the level while no change is in sight; of the first ones it is larger."""
NOISE_SMOOTHING = 0.05
REBASED = 1.25
"""Factor between two bases of measurement that the profile's errors explain."""
WINDOW = 12
"""Most measurements that a new level is the median of."""
FIRST_MEASUREMENTS = 3
"""Measurements whose median is a rank's first level."""
_SD_PER_DEVIATION = 1.25
"""Standard over mean absolute deviation of normal noise."""


@dataclass(frozen=True, kw_only=True)
class SlowdownWatch:
    """Detector state for one sequence of slowdowns."""

    level: float | None = None
    """Its slowdown, as accepted; None until `FIRST_MEASUREMENTS` measurements are there."""
    noise: float = 0.02
    """Mean absolute deviation of the logarithm from the level."""
    count: int = 0
    """Measurements that the level has followed."""
    up: float = 0.0
    down: float = 0.0
    """The two sums."""
    since_up: tuple[float, ...] = ()
    since_down: tuple[float, ...] = ()
    """The measurements since each sum was 0."""
    since_up_step: int = 0
    since_down_step: int = 0
    """The first step of each."""

    @property
    def uncertainty(self) -> float:
        """Standard error of the logarithm of the level, for independent measurements."""
        of_first, of_later = 1 / (FIRST_MEASUREMENTS + self.count), SMOOTHING / (2 - SMOOTHING)
        return _SD_PER_DEVIATION * self.noise * math.sqrt(max(of_first, of_later))


@dataclass(frozen=True, kw_only=True)
class SlowdownChange:
    """A rank's slowdown is another one from a step on."""

    before: float | None
    """None: it is the first that is known of the rank."""
    after: float
    since: int
    """The first step with it."""

    @property
    def reason(self) -> str:
        """In words, after the rank's name."""
        if self.before is None:
            return f"takes {self.after:.2f} times the profile's times"
        how = "slower" if self.after > self.before else "faster"
        factor = max(self.after, self.before) / min(self.after, self.before)
        return f"is {factor:.2f} times {how} since step {self.since} ({self.before:.2f} -> {self.after:.2f})"


def after(watch: SlowdownWatch, step: int, slowdown: float) -> tuple[SlowdownWatch, SlowdownChange | None]:
    """The watch after a measurement, and the change that it completes.

    Args:
        slowdown: measured in `step`; above 0.
    """
    if watch.level is None:
        return _first_level(watch, step, slowdown)
    level = watch.level
    deviation = math.log(slowdown / level)
    noise_sd = _SD_PER_DEVIATION * watch.noise
    drift = max(DRIFT, NOISE_DRIFT * noise_sd)
    threshold = max(THRESHOLD, NOISE_THRESHOLD * noise_sd)
    clip = CLIPPED_SHARE * threshold + drift
    bounded = max(-clip, min(clip, deviation))
    up, down = max(0.0, watch.up + bounded - drift), max(0.0, watch.down - bounded - drift)
    watch = replace(
        watch,
        up=up,
        down=down,
        since_up=(*watch.since_up, slowdown)[-WINDOW:] if up else (),
        since_down=(*watch.since_down, slowdown)[-WINDOW:] if down else (),
        since_up_step=watch.since_up_step if watch.since_up else step,
        since_down_step=watch.since_down_step if watch.since_down else step,
    )
    for total, since, first in (
        (up, watch.since_up, watch.since_up_step),
        (down, watch.since_down, watch.since_down_step),
    ):
        if total > threshold:
            found = median(since)
            return SlowdownWatch(level=found, noise=watch.noise), SlowdownChange(
                before=level, after=found, since=first
            )
    noise = watch.noise + NOISE_SMOOTHING * (abs(bounded) - watch.noise)
    watch = replace(watch, noise=noise)
    if max(up, down) > threshold / 2:
        return watch, None
    weight = max(SMOOTHING, 1 / (FIRST_MEASUREMENTS + 1 + watch.count))
    return replace(watch, level=level * math.exp(weight * bounded), count=watch.count + 1), None


def rebased(watch: SlowdownWatch, slowdown: float) -> SlowdownWatch:
    """The watch where `slowdown` is the first measurement on another basis, such as other layers. If it is near the
    level, the profile's errors explain the difference: the level follows, and nothing has changed."""
    if watch.level is None or abs(math.log(slowdown / watch.level)) > math.log(REBASED):
        return watch
    return SlowdownWatch(level=slowdown, noise=watch.noise)


def _first_level(
    watch: SlowdownWatch, step: int, slowdown: float
) -> tuple[SlowdownWatch, SlowdownChange | None]:
    seen = (*watch.since_up, slowdown)
    if len(seen) < FIRST_MEASUREMENTS:
        return replace(
            watch, since_up=seen, since_up_step=watch.since_up_step if watch.since_up else step
        ), None
    level = median(seen)
    return SlowdownWatch(level=level, noise=watch.noise), SlowdownChange(
        before=None, after=level, since=watch.since_up_step
    )
