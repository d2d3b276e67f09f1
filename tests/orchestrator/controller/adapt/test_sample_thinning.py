"""What is logged of the ranks' surroundings: now and then, and no more per second for many ranks."""

from __future__ import annotations

from orchestrator.controller.adapt.sample_thinning import EVERY_S, RANK_S, Thinning
from orchestrator.events.types import Surroundings
from planner.features import FeatureSample
from planner.observed import StepTimes


def seen(rank: int, others: float) -> StepTimes:
    sample = FeatureSample(values=(("cpu_others", others), ("switches", 900.0)), window_s=0.25)
    return StepTimes(rank=rank, place=rank, step=1, plan=(1, 1), times=(), frozen=False, surroundings=sample)


def test_the_newest_sample_of_each_rank_is_logged_now_and_then() -> None:
    thinning = Thinning()
    thinning.see([seen(0, 0.1), seen(1, 0.2), seen(0, 0.31234567)])
    first = thinning.due(100.0, 5, {0: 1.00004, 1: 3.0})
    assert first is not None
    assert first.step == 5
    assert first.ranks == (
        Surroundings(rank=0, slowdown=1.0, values=(("cpu_others", 0.3123),)),
        Surroundings(rank=1, slowdown=3.0, values=(("cpu_others", 0.2),)),
    )
    thinning.see([seen(0, 0.5)])
    assert thinning.due(100.0 + EVERY_S - 0.1, 6, {0: 1.0}) is None
    second = thinning.due(100.0 + EVERY_S, 7, {0: 1.0, 1: 3.0})
    assert second is not None
    assert [each.rank for each in second.ranks] == [0]


def test_a_job_of_many_ranks_logs_less_often() -> None:
    thinning, ranks = Thinning(), 1000
    slowdowns = dict.fromkeys(range(ranks), 1.0)
    times = []
    for second in range(0, 400, 5):
        thinning.see([seen(rank, 0.0) for rank in range(ranks)])
        if thinning.due(float(second), 1, slowdowns) is not None:
            times.append(second)
    assert times == [0, 100, 200, 300]
    assert RANK_S * ranks == 100


def test_ranks_without_a_slowdown_and_without_samples_are_left_out() -> None:
    thinning = Thinning()
    assert thinning.due(0.0, 1, {0: 1.0}) is None
    thinning.see([seen(0, 0.1)])
    assert thinning.due(0.0, 1, {1: 1.0}) is None
