"""What a rank reports that it computes; waiting for others does not count."""

from __future__ import annotations

import itertools

import pytest

from planner.ir import Action, ActionKind
from workers.control.activity import Activity
from workers.process.process_times import ProcessTimes, Standing
from workers.protocol.reports import Working

FORWARD = Action(ActionKind.FORWARD, 2, 0)


def test_an_action_counts_from_when_its_input_came() -> None:
    ticks = itertools.count()
    activity = Activity(
        lambda: float(next(ticks)), lambda: ProcessTimes(standing=Standing.SLEEPING, at_s=0.0)
    )
    assert activity.working() is None
    with activity.until_done():
        activity.begin(FORWARD)
        assert activity.working() == Working(action="2F0", for_s=1.0)
        assert activity.working() == Working(action="2F0", for_s=2.0)
        with activity.waiting():
            assert activity.working() is None
        assert activity.working() == Working(action="2F0", for_s=1.0)
    assert activity.working() is None


def test_an_action_that_is_asked_about_again_tells_how_long_it_waited_for_a_processor() -> None:
    ticks = itertools.count()
    looks = iter(
        ProcessTimes(standing=Standing.RUNNABLE, at_s=at_s, waits_s={1: 10.0 + 0.75 * at_s})
        for at_s in range(9)
    )
    activity = Activity(lambda: float(next(ticks)), lambda: next(looks))
    activity.begin(FORWARD)
    starved = [working.starved_s for _ in range(4) if (working := activity.working()) is not None]
    assert starved == [0.0, 0.0, 0.75, 1.5]
    activity.begin(FORWARD)
    working = activity.working()
    assert working is not None
    assert working.starved_s == 0.0


def test_nothing_is_computed_after_an_error() -> None:
    activity = Activity()

    def fail() -> None:
        with activity.until_done():
            activity.begin(FORWARD)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert activity.working() is None
