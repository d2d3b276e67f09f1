"""A change of speed is found soon, an outlier is not one, and noise raises next to no alarms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import pytest

from planner.adapt.detection import FIRST_MEASUREMENTS, SlowdownChange, SlowdownWatch, after


def run(
    slowdowns: Iterable[float], watch: SlowdownWatch | None = None, first: int = 1
) -> tuple[SlowdownWatch, list[tuple[int, SlowdownChange]]]:
    watch, found = watch or SlowdownWatch(), []
    for step, slowdown in enumerate(slowdowns, first):
        watch, change = after(watch, step, slowdown)
        if change is not None:
            found.append((step, change))
    return watch, found


def noise(seed: int, sigma: float, steps: int, level: float = 1.0) -> list[float]:
    draw = Random(seed)
    return [level * math.exp(draw.gauss(0, sigma)) for _ in range(steps)]


def test_the_first_level_is_the_median_of_the_first_measurements() -> None:
    watch, found = run([1.0, 5.0, 1.1])
    assert found == [(FIRST_MEASUREMENTS, SlowdownChange(before=None, after=1.1, since=1))]
    assert watch.level == 1.1


@pytest.mark.parametrize(("factor", "most"), [(1.8, 3), (3.2, 3), (1.2, 6), (1.1, 12)])
def test_a_change_is_found_within_a_few_steps(factor: float, most: int) -> None:
    for level in (factor, 1 / factor):
        quiet, _ = run(noise(3, 0.02, 50))
        watch, found = run(noise(4, 0.02, most, level), quiet, first=51)
        assert len(found) == 1, (level, watch)
        step, change = found[0]
        assert step - 50 <= most
        assert change.since >= 50
        assert change.after == pytest.approx(level, rel=0.06)
        assert watch.level == pytest.approx(change.after, rel=0.02)


def test_one_outlier_is_no_change_and_leaves_the_level_alone() -> None:
    watch, found = run([1.0] * 20 + [50.0] + [1.0] * 20 + [0.02] + [1.0] * 20)
    assert [change.before for _, change in found] == [None]
    assert watch.level == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("sigma", "most"), [(0.01, 0), (0.03, 0), (0.05, 0), (0.1, 6)])
def test_noise_is_next_to_no_change(sigma: float, most: int) -> None:
    alarms = [found for seed in range(8) for found in run(noise(seed, sigma, 1000))[1] if found[1].before]
    # Those that there are put an unlucky first level right.
    assert len(alarms) <= most
    assert all(abs(math.log(change.after)) < 0.15 for _, change in alarms)


def test_a_drift_is_followed() -> None:
    drifting = [1.0 + step / 1000 for step in range(1000)]
    watch, _ = run(drifting)
    assert watch.level == pytest.approx(2.0, rel=0.1)


def test_a_noisy_rank_takes_longer_but_not_for_ever() -> None:
    quiet, _ = run(noise(5, 0.15, 300))
    _, found = run(noise(6, 0.15, 30, 1.8), quiet, first=301)
    assert [change for _, change in found if change.after > 1.5]


def test_a_change_in_words() -> None:
    assert (
        SlowdownChange(before=1.0, after=1.8, since=7).reason
        == "is 1.80 times slower since step 7 (1.00 -> 1.80)"
    )
    assert (
        SlowdownChange(before=2.0, after=1.0, since=9).reason
        == "is 2.00 times faster since step 9 (2.00 -> 1.00)"
    )
    assert SlowdownChange(before=None, after=1.1, since=1).reason == "takes 1.10 times the profile's times"
