"""A planner that is fed nonsense ignores it, says so once for each kind, and decides as if it had not come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import observed_steps
import pytest
import small_profile
from numpy.typing import NDArray

from planner.adapt.adviser import AGREEING, AHEAD_STEPS, Turns
from planner.adapt.live import MOST_SAID, Heard, LivePlanner, LiveStart, Question
from planner.adapt.samples import believed
from planner.features import NAMES, VERSION, FeatureSample
from planner.observed import LinkTime, StageTime, StepTimes
from planner.schedule.expand import schedule_of
from planner.search.replan import Replanner

PROFILE = small_profile.profile(*(small_profile.layer(f"layer{number}") for number in range(4)))
PLAN = small_profile.plan(2, 2)
MEMBERS = (7, 9)
REPLANNER = Replanner(first=PLAN, schedule=schedule_of(PLAN), parameters=(10,) * 4, copies=0, profile=PROFILE)
SAMPLE = FeatureSample(values=(("cpu_busy", 0.5), ("cpu_others", 2.0)), window_s=0.25)
times = partial(observed_steps.times, PLAN, MEMBERS, halves=True, surroundings=SAMPLE)


class OthersCores:
    """Predicts a slowdown by the cores that others take, of which it must always hear."""

    def predict(self, rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
        others = np.array(rows)[:, NAMES.index("cpu_others")]
        assert np.all(others == 2.0)
        return 1 + others


def live(mad: Callable[[StepTimes], StepTimes | None]) -> tuple[LivePlanner, list[Heard]]:
    """A planner that hears of 20 steps with rank 9 slow from step 10 on, each report of rank 7 followed by what `mad`
    makes of it."""
    planner = LivePlanner(LiveStart(profile=PROFILE))
    predictor: Any = OthersCores()
    planner._predictor = predictor
    planner.plan_with(REPLANNER)
    heard: list[Heard] = []
    for step in range(20):
        good = times(0, step, 1.0)
        odd = mad(good)
        batch = [good, times(1, step, 3.0 if step >= 10 else 1.0), *([] if odd is None else [odd])]
        heard.append(planner.observe(batch, [PLAN], MEMBERS))
    return planner, heard


def of_seconds(seconds: float) -> tuple[StageTime, ...]:
    return (StageTime(kind="F", stage=0, seconds=seconds, count=2),)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"times": of_seconds(math.nan)}, "F of stage 0 took nan s"),
        ({"times": of_seconds(-1.0)}, "took -1.0 s"),
        ({"times": of_seconds(math.inf)}, "took inf s"),
        ({"times": of_seconds(1e9)}, "not believable"),
        ({"times": (StageTime(kind="X", stage=0, seconds=1.0, count=1),)}, "no such action: X"),
        ({"times": (StageTime(kind="F", stage=-1, seconds=1.0, count=1),)}, "no such action: F of stage -1"),
        ({"halves": (of_seconds(math.nan), of_seconds(1.0))}, "F of stage 0 took nan s"),
        ({"halves": (of_seconds(4.0), of_seconds(-math.inf))}, "took -inf s"),
        ({"step": 10**9}, "step 1000000000 comes after step 0"),
        ({"step": -3}, "there is no step -3"),
        # Rank 9's place, and a rank that is none.
        ({"rank": 9}, "rank 9 does not hold place 0"),
        ({"rank": 10**12}, "does not hold place 0"),
        ({"rank": -1}, "rank -1 does not hold place 0"),
    ],
)
def test_reports_that_make_no_sense_change_nothing(changes: dict[str, Any], why: str) -> None:
    planner, heard = live(lambda good: replace(good, **changes))
    clean, known = live(lambda good: None)
    said = [reason for each in heard for _, reason in each.ignored]
    assert len(said) == 1, "it is said once"
    assert why in said[0]
    assert [replace(each, ignored=()) for each in heard] == known
    asked = Question(now=PLAN, domains=("a", "b"), members=MEMBERS, step=20, remaining_steps=1000)
    decision = planner.decide(asked)
    assert decision.plan is not None
    assert decision == clean.decide(asked)


def test_what_comes_late_is_ignored() -> None:
    _, heard = live(lambda good: times(0, good.step - 6, 30.0) if good.step in (8, 13) else None)
    _, known = live(lambda good: None)
    assert [reason for each in heard for _, reason in each.ignored] == [
        "a report of rank 7 is ignored: step 2 comes after step 8"
    ]
    assert [replace(each, ignored=()) for each in heard] == known


def test_a_plan_that_is_not_in_force_is_told_if_a_rank_stays_with_it() -> None:
    planner = LivePlanner(LiveStart(profile=PROFILE))
    said: list[tuple[int, str]] = []
    heard = planner.observe([], [PLAN], MEMBERS)
    for step in range(30):
        other = replace(times(0, step, 9.0), plan=(0, 77))
        heard = planner.observe([other, times(1, step, 1.0)], [PLAN], MEMBERS)
        said += [(step, reason) for _, reason in heard.ignored]
    assert said == [(7, "rank 7 reports on plan 0.77, which is not in force")]
    assert heard.known.of((7,)) == (None,)


@pytest.mark.parametrize("first", [True, False])
def test_nonsense_in_the_first_step_of_a_plan_breaks_nothing(first: bool) -> None:
    planner = LivePlanner(LiveStart(profile=PROFILE))
    odd = (
        replace(times(0, 0, 1.0), times=(StageTime(kind="X", stage=9, seconds=math.nan, count=0),))
        if first
        else times(0, 10**9, 1.0)
    )
    heard = planner.observe([odd], [PLAN], MEMBERS)
    for step in range(1, 12):
        heard = planner.observe([times(place, step, 1.0) for place in (0, 1)], [PLAN], MEMBERS)
    assert heard.known.of(MEMBERS) == (pytest.approx(1.0), pytest.approx(1.0))
    assert heard.age <= 12


@pytest.mark.parametrize(
    ("sample", "kept", "why"),
    [
        (replace(SAMPLE, version=VERSION + 1), {}, f"of version {VERSION + 1}"),
        (replace(SAMPLE, window_s=math.nan), {}, "sampled over nan s"),
        (replace(SAMPLE, window_s=0.0), {}, "sampled over 0.0 s"),
        (replace(SAMPLE, values=(*SAMPLE.values, ("moon", 1.0))), dict(SAMPLE.values), "no feature 'moon'"),
        (replace(SAMPLE, values=(("cpu_others", 2.0), ("cpu_busy", math.nan))), None, "cpu_busy is nan"),
        (replace(SAMPLE, values=(("cpu_others", 2.0), ("cpu_busy", -0.1))), None, "cpu_busy is -0.1"),
        (replace(SAMPLE, values=(("cpu_others", 2.0), ("cpu_busy", 55.0))), None, "cpu_busy is 55"),
        (replace(SAMPLE, values=(("cpu_others", 2.0), ("disk_read", math.inf))), None, "disk_read is inf"),
        # A stage's feature is the planner's to know.
        (replace(SAMPLE, values=(("cpu_others", 2.0), ("layers", 3.0))), None, "no feature 'layers'"),
    ],
)
def test_features_that_cannot_be_are_missing(
    sample: FeatureSample, kept: dict[str, float] | None, why: str
) -> None:
    found, wrong = believed(sample)
    assert found == ({"cpu_others": 2.0} if kept is None else kept)
    assert why in wrong
    planner, heard = live(lambda good: replace(good, surroundings=sample))
    ((rank, said),) = [each for one in heard for each in one.ignored]
    assert rank == 7
    assert "features that rank 7 sampled by step 0 are ignored: " in said
    assert why in said
    decision = planner.decide(
        Question(now=PLAN, domains=("a", "b"), members=MEMBERS, step=20, remaining_steps=1000)
    )
    assert decision.plan is not None


def test_good_features_are_believed_and_many_bad_ones_told_briefly() -> None:
    assert believed(SAMPLE) == (dict(SAMPLE.values), "")
    found, wrong = believed(replace(SAMPLE, values=tuple((f"x{number}", 1.0) for number in range(50))))
    assert found == {}
    assert wrong.endswith("there is no feature 'x2', and 47 more")


def test_links_that_make_no_sense_are_told_once() -> None:
    odd = LinkTime(target=1, size_bytes=10, seconds=math.nan, at_least=False, round_trip_s=None)
    _, heard = live(lambda good: replace(good, links=(odd, replace(odd, target=8))))
    said = [reason for each in heard for _, reason in each.ignored]
    assert said == ["a link of rank 7 in step 0 is ignored: 10 bytes passed in nan s"]
    assert all(each.links is None for each in heard)


def test_what_is_told_is_bounded() -> None:
    planner = LivePlanner(LiveStart(profile=PROFILE))
    said = 0
    for rank in range(100, 400):
        batch = [replace(times(0, step, 1.0), rank=rank) for step in range(10)]
        said += len(planner.observe(batch, [PLAN], MEMBERS).ignored)
    assert said == MOST_SAID


def test_several_reports_in_a_row_are_believed_whatever_came_before() -> None:
    turns = Turns()
    assert turns.refusal(1, 10**9) == ""
    assert [turns.refusal(1, step) == "" for step in range(5, 10)] == [
        *(False,) * (AGREEING - 1),
        *(True,) * (6 - AGREEING),
    ]
    assert turns.refusal(1, 9) == "", "a step may be trained again"
    assert turns.refusal(1, 9 + AHEAD_STEPS) == ""
    assert [turns.refusal(1, 7) for _ in range(2 * AGREEING)] == [
        f"step 7 comes after step {9 + AHEAD_STEPS}"
    ] * (2 * AGREEING)
    assert turns.refusal(2, 3) == ""
    assert turns.step == 3
