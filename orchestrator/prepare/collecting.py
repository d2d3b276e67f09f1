"""Measures stages alone and beside neighbours, and makes the rows that a model is fitted to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median, pstdev
from typing import Protocol

import numpy as np
import torch

from planner.features import FeatureSample, row
from planner.interference.dataset import ALONE, Windows
from planner.wording import counted
from workers.interference import neighbours
from workers.interference.stage import MeasuredStage, StageSize

SIZES = (StageSize(1, 64), StageSize(2, 128), StageSize(1, 256), StageSize(4, 64))
CUDA_SIZES = tuple(StageSize(size.blocks, 4 * size.width) for size in SIZES)
"""Narrower stages would only tell how long a GPU's kernels take to begin."""
ALONE_ROUNDS, ROUNDS = 4, 2
"""Windows of each stage: alone, at the beginning and in each kind of place; and beside each neighbour."""
BRIEF = 30
"""Most conditions of a brief collection, as for the model that a job makes at first use."""
ALONE_EVERY = 5
"""Neighbours after which stages run alone again: machines drift."""
BUSY_CORES = 0.3
"""Others' load from which the machine counts as busy before it begins."""
NOISY = 0.1
"""Deviation of the windows alone, over their mean, from which a collection counts as noisy."""
LONGEST_WAIT_S = 5.0
"""A sampler that gives no sample for so long has none to give."""


class Samples(Protocol):
    """Samples this process's surroundings again and again: `workers.sampling.sampler.Sampler`."""

    @property
    def newest(self) -> FeatureSample | None: ...


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Result of the measurement."""

    windows: Windows
    warnings: tuple[str, ...]
    """Reasons to trust the windows less, in words."""


@dataclass(frozen=True)
class Condition:
    """Neighbour beside the stage, and the cores of both."""

    kind: str
    """Kind of the neighbour; `alone` without one."""
    level: str
    ours: tuple[int, ...] = ()
    """The cores that the stage may use; empty: all."""
    theirs: tuple[int, ...] = ()
    """The cores that the neighbour may use; empty: all."""

    @property
    def where(self) -> str:
        """In words."""
        if self.kind in neighbours.DEVICE_KINDS:
            return "on the stage's device"
        if not self.ours:
            return "on any core"
        return "on the same core" if set(self.ours) == set(self.theirs) else "on the other cores"


@dataclass(frozen=True)
class _Window:
    stage: int
    sample: FeatureSample
    pass_s: float
    forward_share: float


def conditions(cores: Sequence[int], accelerator: str | None = None) -> tuple[Condition, ...]:
    """Neighbours of each kind on the stage's own core, on all others, and stage and neighbour on any; then those on the
    stage's own device.

    Args:
        cores: that this process may use; a single one is shared by all.
        accelerator: as in `collect`.
    """
    own, others = tuple(cores[-1:]), tuple(cores[:-1])
    places = [("heavy", (), ())]
    if others:
        places += [(level, own, own) for level in neighbours.LEVELS] + [("heavy", own, others)]
    found = [
        Condition(kind, level, ours, theirs) for kind in neighbours.KINDS for level, ours, theirs in places
    ]
    if accelerator is not None:
        found += [Condition(kind, level) for kind in neighbours.DEVICE_KINDS for level in ("light", "heavy")]
    return tuple(found)


def brief_conditions(cores: Sequence[int], accelerator: str | None = None) -> tuple[Condition, ...]:
    """At most `BRIEF` of `conditions`, evenly spread: all kinds and all places remain."""
    found = conditions(cores, accelerator)
    return found[:: ceil(len(found) / BRIEF)]


def collect(
    sampler: Samples,
    say: Callable[[str], None],
    *,
    accelerator: str | None = None,
    beside: Sequence[Condition] | None = None,
    sizes: Sequence[StageSize] | None = None,
    rounds: int = ROUNDS,
    warn: Callable[[str], None] = lambda text: None,
) -> Collected:
    """Measure stages of each size, alone and beside each neighbour. A window is what one sample covers.

    Args:
        say: receives what is measured, in words.
        accelerator: torch's name of the device that the stages run on, and neighbours of `DEVICE_KINDS` beside them;
            None: the stages run on the CPU, and there are no such neighbours.
        beside: the neighbours; None: see `conditions`.
        sizes: of the stages; None: as the device suggests.
        rounds: windows of each stage beside each neighbour.
        warn: receives what makes the windows less trustworthy, in words, as soon as it shows.

    Raises:
        ValueError: a neighbour works on the stage's device, and that is the CPU.
        RuntimeError: a neighbour did not begin, or the sampler gives no samples.
    """
    beside = conditions(usable_cores(), accelerator) if beside is None else beside
    device = torch.device(accelerator or "cpu")
    if sizes is None:
        sizes = CUDA_SIZES if device.type == "cuda" else SIZES
    stages = [MeasuredStage(size, device) for size in sizes]
    measuring = _Measuring(sampler, stages, accelerator)
    warnings = [*_busy(sampler)]
    for text in warnings:
        warn(text)
    say("alone")
    places = sorted({condition.ours for condition in beside})
    blocks = [
        (condition, measuring.windows(condition, max(rounds, ALONE_ROUNDS)))
        for condition in (Condition(ALONE, "", ours) for ours in places)
    ]
    for number, condition in enumerate(beside, start=1):
        say(f"beside a {condition.level} neighbour {condition.where}: {condition.kind}")
        blocks.append((condition, measuring.windows(condition, rounds)))
        if number % ALONE_EVERY == 0:
            alone = Condition(ALONE, "", places[number // ALONE_EVERY % len(places)])
            blocks.append((alone, measuring.windows(alone, rounds)))
    noisy = [*_noisy([windows for condition, windows in blocks if condition.kind == ALONE], len(stages))]
    for text in noisy:
        warn(text)
    warnings += noisy
    return Collected(windows=_windows(stages, blocks), warnings=tuple(warnings))


def usable_cores() -> list[int]:
    """The cores that this process may use; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class _Measuring:
    """Runs stages in turn, from one sample to the next."""

    def __init__(self, sampler: Samples, stages: Sequence[MeasuredStage], accelerator: str | None) -> None:
        self._sampler = sampler
        self._stages = stages
        self._accelerator = accelerator
        self._turn = 0
        for number in range(len(stages)):
            self._run(number)  # warms up

    def windows(self, condition: Condition, rounds: int) -> list[_Window]:
        """`rounds` windows of each stage. Another stage begins each time."""
        with _on_cores(condition.ours):
            if condition.kind == ALONE:
                return self._rounds(rounds)
            with neighbours.beside(
                condition.kind, condition.level, condition.theirs, accelerator=self._accelerator
            ):
                return self._rounds(rounds)

    def _rounds(self, rounds: int) -> list[_Window]:
        self._turn += 1
        order = [(self._turn + number) % len(self._stages) for number in range(len(self._stages))]
        self._run(order[-1])  # until a sample begins in these surroundings
        return [self._run(number) for _ in range(rounds) for number in order]

    def _run(self, number: int) -> _Window:
        before = self._sampler.newest
        limit_s = time.monotonic() + LONGEST_WAIT_S
        pass_s, share = self._stages[number].run(
            lambda: self._sampler.newest is not before or time.monotonic() > limit_s
        )
        sample = self._sampler.newest
        if sample is None or sample is before:
            raise RuntimeError(f"no sample of this machine for {LONGEST_WAIT_S:.0f} s")
        return _Window(number, sample, pass_s, share)


@contextmanager
def _on_cores(cores: Collection[int]) -> Iterator[None]:
    """All threads of this process use only `cores` while the block runs; empty: as before."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    _bind(cores)
    try:
        yield
    finally:
        _bind(before)


def _bind(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has ended
            continue


def _windows(stages: Sequence[MeasuredStage], blocks: Sequence[tuple[Condition, list[_Window]]]) -> Windows:
    alone = [window for condition, windows in blocks if condition.kind == ALONE for window in windows]
    known = [
        _alone(stage, [window for window in alone if window.stage == number])
        for number, stage in enumerate(stages)
    ]
    rows, ratios, kinds, levels = [], [], [], []
    for condition, windows in blocks:
        for seen, ahead in _pairs(windows, len(stages)):
            measured = seen.pass_s / known[seen.stage]["work"]
            rows.append(row({**dict(seen.sample.values), **known[ahead.stage], "measured_ratio": measured}))
            ratios.append(ahead.pass_s / known[ahead.stage]["work"])
            kinds.append(condition.kind)
            levels.append(condition.level and f"{condition.level} {condition.where}")
    return Windows(rows=np.array(rows), ratios=np.array(ratios), kinds=tuple(kinds), levels=tuple(levels))


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


def _busy(sampler: Samples) -> Iterator[str]:
    """Whether others use the machine while nothing runs here, for as long as one sample."""
    seen = [sampler.newest]
    limit_s = time.monotonic() + LONGEST_WAIT_S
    while len(seen) < 3 and time.monotonic() < limit_s:  # the first may have begun while the stages warmed up
        time.sleep(0.02)
        if sampler.newest is not seen[-1]:
            seen.append(sampler.newest)
    found = dict(seen[-1].values) if seen[-1] is not None else {}
    if (others := found.get("cpu_others", 0.0)) > BUSY_CORES:
        yield (
            f"the machine is busy: other processes take {others:.1f} cores before any neighbour runs;"
            " times alone are not those of an idle machine"
        )
    if processes := int(found.get("gpu_processes", 0)):
        yield (
            f"the GPU may be busy: {counted(processes, 'other process', 'other processes')} on it before any neighbour"
            " runs; times alone may not be those of an idle GPU"
        )


def _noisy(alone: Sequence[Sequence[_Window]], stages: int) -> Iterator[str]:
    noise = max(
        pstdev(times) / fmean(times)
        for number in range(stages)
        if (times := [window.pass_s for windows in alone for window in windows if window.stage == number])
    )
    if noise > NOISY:
        yield f"the machine is noisy: times alone differ by {noise:.0%} (standard deviation) from window to window"
