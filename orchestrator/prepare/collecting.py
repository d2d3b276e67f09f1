"""Measures stages alone and beside neighbours, and makes the rows that a model is fitted to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev

import numpy as np

from planner.features import Sample, row
from planner.interference.dataset import ALONE, Windows
from workers.interference import neighbours
from workers.interference.stage import MeasuredStage, Size
from workers.sampling.readings import Reading, between

SIZES = (Size(1, 64), Size(2, 128), Size(1, 256), Size(4, 64))
WINDOW_S = 0.4
ALONE_ROUNDS, ROUNDS = 6, 4
"""Windows of each stage, alone and beside each neighbour."""
BUSY_CORES = 0.3
"""Others' load from which the machine counts as busy before it begins."""
NOISY = 0.1
"""Deviation of the windows alone, over their mean, from which a collection counts as noisy."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What was measured."""

    windows: Windows
    warnings: tuple[str, ...]
    """What makes the windows less trustworthy, in words."""


@dataclass(frozen=True)
class _Window:
    stage: int
    sample: Sample
    pass_s: float
    forward_share: float


Conditions = Sequence[tuple[str, str]]
"""(kind, level) of each neighbour; `alone` without one."""


def collect(
    read: Callable[[], Reading],
    say: Callable[[str], None],
    *,
    sizes: Sequence[Size] = SIZES,
    rounds: int = ROUNDS,
    window_s: float = WINDOW_S,
    conditions: Conditions = tuple((kind, level) for kind in neighbours.KINDS for level in neighbours.LEVELS),
) -> Collected:
    """Measure stages of each size, alone and beside each neighbour.

    Args:
        read: looks at the machine once.
        say: receives what is measured, in words.
        rounds: windows of each stage beside each neighbour.
        window_s: seconds of a window.
    """
    stages = [MeasuredStage(size) for size in sizes]
    for stage in stages:
        stage.run(window_s)  # warms up
    say("alone")
    warnings = list(_busy(read, window_s))
    alone = [*_rounds(stages, read, window_s, max(rounds, ALONE_ROUNDS))]
    known = [
        _alone(stage, [window for window in alone if window.stage == number])
        for number, stage in enumerate(stages)
    ]
    warnings += _noisy(alone, len(stages))
    rows, ratios, kinds, levels = [], [], [], []
    for kind, level in ((ALONE, ""), *conditions):
        if kind == ALONE:
            windows = alone
        else:
            say(f"beside a {level} neighbour: {kind}")
            with neighbours.beside(kind, level):
                windows = [*_rounds(stages, read, window_s, rounds)]
        for seen, ahead in _pairs(windows, len(stages)):
            measured = seen.pass_s / known[seen.stage]["work"]
            rows.append(row({**dict(seen.sample.values), **known[ahead.stage], "measured_ratio": measured}))
            ratios.append(ahead.pass_s / known[ahead.stage]["work"])
            kinds.append(kind)
            levels.append(level)
    return Collected(
        windows=Windows(
            rows=np.array(rows), ratios=np.array(ratios), kinds=tuple(kinds), levels=tuple(levels)
        ),
        warnings=tuple(warnings),
    )


def _rounds(
    stages: Sequence[MeasuredStage], read: Callable[[], Reading], window_s: float, rounds: int
) -> Iterator[_Window]:
    for _ in range(rounds):
        for number, stage in enumerate(stages):
            before = read()
            pass_s, share = stage.run(window_s)
            yield _Window(number, between(before, read()), pass_s, share)


def _pairs(windows: Sequence[_Window], stages: int) -> Iterator[tuple[_Window, _Window]]:
    """(what was sampled, what came next): a plan is made for stages that a rank does not hold yet, by what it sampled
    while it held others."""
    for index, ahead in enumerate(windows):
        for seen in windows[max(0, index - stages) : index]:
            yield seen, ahead


def _alone(stage: MeasuredStage, windows: Sequence[_Window]) -> dict[str, float]:
    """The features of a stage: what it is, and its times alone."""
    return {
        **stage.features,
        "work": median(window.pass_s for window in windows),
        "forward_share": median(window.forward_share for window in windows),
    }


def _busy(read: Callable[[], Reading], window_s: float) -> Iterator[str]:
    before = read()
    time.sleep(max(1.0, window_s))
    others = dict(between(before, read()).values).get("cpu_others", 0.0)
    if others > BUSY_CORES:
        yield (
            f"the machine is busy: other processes take {others:.1f} cores before any neighbour runs;"
            " times alone are not those of an idle machine"
        )


def _noisy(alone: Sequence[_Window], stages: int) -> Iterator[str]:
    noise = max(
        pstdev(times) / fmean(times)
        for number in range(stages)
        if (times := [window.pass_s for window in alone if window.stage == number])
    )
    if noise > NOISY:
        yield f"the machine is noisy: times alone differ by {noise:.0%} (standard deviation) from window to window"
