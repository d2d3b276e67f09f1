"""Measured stage times become slowdowns per rank; what cannot be is ignored, and said."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import observed_steps
import pytest
import small_profile

from planner.adapt.adviser import Adviser
from planner.adapt.detection import SlowdownChange
from planner.adapt.past import LASTING_STEPS, Past
from planner.adapt.speeds import NONE_KNOWN, RankSlowdowns
from planner.observed import StageTime, StepTimes

LAYERS = tuple(small_profile.layer(f"layer{number}") for number in range(4))
PROFILE = small_profile.profile(*LAYERS)
PLAN = small_profile.plan(3, 1)
MEMBERS = (7, 9)
times = partial(observed_steps.times, PLAN, MEMBERS)


def halved(step: int, *factors: float) -> StepTimes:
    """As `times` of place 0, with a factor for each half."""
    halves = tuple(times(0, step, factor).times for factor in factors)
    return replace(times(0, step, sum(factors) / len(factors)), halves=halves)


def take(adviser: Adviser, observed: StepTimes) -> tuple[SlowdownChange | None, str]:
    """The change, and why it was ignored."""
    change, ignored = adviser.observe(observed, [PLAN], MEMBERS)
    return change, "" if ignored is None else ignored.reason


def before(adviser: Adviser) -> tuple[float | None, ...] | None:
    """The slowdowns before the last change, by place."""
    found = adviser.past.known_before(adviser.known)
    return None if found is None else found.of(MEMBERS)


def warm(known: RankSlowdowns = NONE_KNOWN) -> Adviser:
    """An adviser that has seen the first step."""
    adviser = Adviser(PROFILE, known)
    assert take(adviser, times(0, 0, 9.0)) == (None, "")
    return adviser


def test_each_rank_has_its_own_slowdown() -> None:
    adviser = warm()
    for step in range(1, 5):
        for place, factor in ((0, 1.0), (1, 2.5)):
            assert take(adviser, times(place, step, factor))[1] == ""
    assert adviser.known.of((9, 7, 8)) == (pytest.approx(2.5), pytest.approx(1.0), None)


def test_a_change_is_told_once_and_tells_how_long_speeds_last() -> None:
    adviser = warm()
    assert adviser.past.lasting_steps(0) == LASTING_STEPS
    told = []
    for step in range(1, 81):
        slow = 20 <= step < 40 or step >= 60
        change, _ = take(adviser, times(0, step, 3.0 if slow else 1.0))
        if change is not None:
            told.append((step, round(change.after, 6)))
    assert told == [(3, 1.0), (21, 3.0), (41, 1.0), (61, 3.0)]
    # Slow speeds lasted some 20 steps, of which nothing is left by now; with what is assumed before, (20 + 200) / 2.
    assert adviser.past.lasting_steps(61) == 109
    assert adviser.past.lasting_steps(160) == 100
    # Two fast ones lasted 19 and 20.
    assert adviser.past.share() == pytest.approx(110 / 130)
    assert before(adviser) == (pytest.approx(1.0), None)


def test_a_rank_that_is_slow_in_both_halves_of_one_step_is_slow() -> None:
    adviser = warm()
    for step in range(1, 10):
        take(adviser, halved(step, 1.0, 1.0))
    assert take(adviser, halved(10, 3.0, 1.0)) == (None, "")
    for step in range(11, 20):
        assert take(adviser, halved(step, 1.0, 1.0)) == (None, "")
    change, _ = take(adviser, halved(20, 3.0, 3.0))
    assert change is not None
    assert (round(change.after, 6), change.since) == (3.0, 20)


def test_one_short_speed_is_no_rule() -> None:
    adviser = warm()
    for step in range(1, 30):
        take(adviser, times(0, step, 3.0 if step > 10 else 1.0))
    assert adviser.past.lasting_steps(29) == LASTING_STEPS - 18


def test_speeds_before_are_of_all_ranks_that_changed_together() -> None:
    adviser = warm()
    assert before(adviser) is None
    for step in range(1, 40):
        take(adviser, times(0, step, 3.0 if step >= 21 else 1.0))
        take(adviser, times(1, step, 2.0 if step >= 20 else 1.0))
    assert adviser.known.of(MEMBERS) == (pytest.approx(3.0), pytest.approx(2.0))
    assert before(adviser) == (pytest.approx(1.0), pytest.approx(1.0))
    for step in range(40, 50):
        take(adviser, times(0, step, 1.0))
    assert before(adviser) == (pytest.approx(3.0), pytest.approx(2.0))


def test_other_layers_or_frozen_gradients_are_no_change_of_speed() -> None:
    adviser = warm()
    for step in range(1, 8):
        take(adviser, times(0, step, 1.0))
    for step in range(8, 16):
        # The forward passes alone take 1.2 times what the profile expects of them.
        observed = times(0, step, 1.2)
        change, _ = take(adviser, replace(observed, frozen=True))
        assert change is None
    assert adviser.known.of((7,)) == (pytest.approx(1.2),)
    moved = small_profile.plan(1, 3, version=2)
    seconds = (StageTime(kind="F", stage=0, seconds=2 * 1.4, count=2),)
    for step in range(16, 24):
        observed = replace(times(0, step, 1.0), plan=(1, 2), times=seconds, frozen=True)
        change, _ = adviser.observe(observed, [moved], MEMBERS)
        assert change is None
    assert adviser.known.of((7,)) == (pytest.approx(1.4),)
    assert adviser.past.lasting_steps(23) == LASTING_STEPS - 22
    # A neighbour that comes as the layers move is seen all the same.
    first = StageTime(kind="F", stage=0, seconds=2 * 3 * 3.0, count=2)
    back = small_profile.plan(3, 1, version=3)
    changes = [
        adviser.observe(
            replace(times(0, step, 1.0), plan=(1, 3), times=(first,), frozen=True), [back], MEMBERS
        )[0]
        for step in range(24, 28)
    ]
    assert [round(change.after, 6) for change in changes if change is not None] == [3.0]


def test_what_the_last_controller_knew_has_its_age() -> None:
    adviser = Adviser(PROFILE, RankSlowdowns(((7, 2.0), (9, 1.0))), Past(changed=((7, 100), (9, 100))))
    assert adviser.past.age(450) == 350
    assert adviser.past.lasting_steps(450) == 350


def test_the_next_adviser_knows_how_long_speeds_last_and_how_sure_their_levels_are() -> None:
    adviser = warm()
    for step in range(1, 71):
        for place, factor in ((0, 3.0 if 20 <= step < 40 or step >= 60 else 1.0), (1, 1.0)):
            jitter = 1.04 if step % 2 else 0.96
            take(adviser, times(place, step, factor * jitter))
    after = Adviser(PROFILE, adviser.known, adviser.past)
    assert after.past == adviser.past
    assert [len(after.past.slow_steps), len(after.past.fast_steps)] == [1, 2]
    assert before(after) == before(adviser) == (pytest.approx(1.0, rel=0.05), pytest.approx(1.0, rel=0.05))
    for ranks in (MEMBERS, (9,)):
        assert after.uncertainty(ranks) == adviser.uncertainty(ranks)
    # A change is not told again, and the next one ends the speed that the first adviser saw begin.
    for step in range(71, 100):
        change, _ = take(after, times(0, step, 3.0 if step < 90 else 1.0))
        assert change is None or step >= 90
    assert len(after.past.slow_steps) == 2
    assert after.past.slow_steps[-1] == (pytest.approx(30, abs=1), pytest.approx(3.0, rel=0.1))
    after.keep([9])
    assert [rank for rank, *_ in after.past.watched] == [9]
    assert len(after.past.slow_steps) == 2


def test_how_long_small_changes_lasted_says_nothing_of_a_large_one() -> None:
    past = Past(slow_steps=((5, 1.3),) * 4, fast_steps=((7, 1.3),) * 4, changed=((7, 100), (9, 100)))
    small = past.after(7, SlowdownChange(before=1.0, after=1.3, since=110))
    assert small.lasting_steps(110) == 5
    large = past.after(7, SlowdownChange(before=1.0, after=3.0, since=110))
    assert large.lasting_steps(110) == 200
    # What a large change began and a small one ended is no longer than the small one lets it be.
    ended = large.after(7, SlowdownChange(before=3.0, after=2.2, since=120))
    assert ended.slow_steps[-1] == (10, pytest.approx(3.0 / 2.2))
    back = large.after(7, SlowdownChange(before=3.0, after=1.0, since=130))
    assert back.slow_steps[-1] == (20, pytest.approx(3.0))


def test_updates_tell_nothing() -> None:
    adviser = warm()
    for step in range(1, 4):
        usual = times(0, step, 1.0)
        update = StageTime(kind="U", stage=0, seconds=100.0, count=1)
        assert take(adviser, replace(usual, times=(*usual.times, update)))[1] == ""
    assert adviser.known.of((7,)) == (pytest.approx(1.0),)


def test_frozen_weight_gradients_tell_nothing() -> None:
    adviser = warm()
    half = replace(times(0, 1, 1.0), frozen=True)
    half = replace(half, times=(half.times[0], replace(half.times[1], seconds=0.1)))
    for step in range(1, 4):
        take(adviser, replace(half, step=step))
    assert adviser.known.of((7,)) == (pytest.approx(1.0),)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"plan": (1, 7)}, "reports on plan 1.7, which is not in force"),
        ({"rank": 9}, "rank 9 does not hold place 0"),
        ({"place": 5}, "does not hold place 5"),
        ({"times": (StageTime(kind="F", stage=0, seconds=math.nan, count=2),)}, "F of stage 0 took nan s"),
        ({"times": (StageTime(kind="F", stage=0, seconds=-1.0, count=2),)}, "took -1.0 s in 2 microbatches"),
        ({"times": (StageTime(kind="F", stage=0, seconds=1.0, count=0),)}, "took 1.0 s in 0 microbatches"),
        ({"times": (StageTime(kind="X", stage=0, seconds=1.0, count=1),)}, "no such action: X of stage 0"),
        (
            {"times": (StageTime(kind="F", stage=4, seconds=1.0, count=1),)},
            "no such action: F of stage 4, of 2",
        ),
        ({"times": (StageTime(kind="F", stage=1, seconds=1.0, count=1),)}, "stage 1 is rank 1's, not 0's"),
        ({"times": (StageTime(kind="F", stage=0, seconds=1e9, count=1),)}, "which is not believable"),
        ({"times": ()}, "none of its actions has an expected time"),
    ],
)
def test_garbage_is_ignored_and_said(changes: dict[str, Any], why: str) -> None:
    adviser = warm()
    for step in range(1, 6):
        change, told = take(adviser, replace(times(0, step, 1.0), **changes))
        assert change is None
        assert why in told
    assert adviser.known == RankSlowdowns()


def test_the_first_step_with_a_plan_warms_up() -> None:
    adviser = Adviser(PROFILE)
    for step in range(4, 9):
        take(adviser, times(0, step, 9.0 if step == 4 else 1.0))
    assert adviser.known.of((7,)) == (pytest.approx(1.0),)
    newer = replace(PLAN, version=2)
    first = replace(times(0, 9, 9.0), plan=(1, 2))
    assert adviser.observe(first, [PLAN, newer], MEMBERS) == (None, None)
    _, ignored = adviser.observe(times(0, 10, 1.0), [newer], MEMBERS)
    assert ignored is not None
    assert ignored.usual


def test_ranks_that_are_gone_are_forgotten_and_known_ones_remembered() -> None:
    adviser = warm(RankSlowdowns(((7, 2.0), (9, 1.0))))
    change, _ = take(adviser, times(0, 1, 2.0))
    assert change is None, "no first level is needed"
    adviser.keep([7, 8])
    assert adviser.known.of(MEMBERS) == (pytest.approx(2.0), None)


def test_slowdowns_are_compared_by_factor() -> None:
    one = RankSlowdowns(((1, 1.0), (2, 2.0)))
    assert not one.far_from(one.but([(2, 2.05)]), 1.05)
    assert one.far_from(one.but([(2, 2.2)]), 1.05)
    assert one.far_from(one.among([1]), 1.05)
