"""What a rank reports that it computes; waiting for others does not count."""

from __future__ import annotations

import itertools

import pytest

from planner.ir import Action, Kind
from workers.control.activity import Activity
from workers.protocol import Working

FORWARD = Action(Kind.FORWARD, 2, 0)


def test_an_action_counts_from_when_its_input_came() -> None:
    ticks = itertools.count()
    activity = Activity(lambda: float(next(ticks)))
    assert activity.working() is None
    with activity.until_done():
        activity.begin(FORWARD)
        assert activity.working() == Working(action="2F0", for_s=1.0)
        assert activity.working() == Working(action="2F0", for_s=2.0)
        with activity.waiting():
            assert activity.working() is None
        assert activity.working() == Working(action="2F0", for_s=1.0)
    assert activity.working() is None


def test_nothing_is_computed_after_an_error() -> None:
    activity = Activity()

    def fail() -> None:
        with activity.until_done():
            activity.begin(FORWARD)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert activity.working() is None
