"""Links follow what ranks measure of them: slow ones are found, remembered and forgotten, nonsense is ignored."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import small_profile

from planner.adapt.link_times import STALE_STEPS, LinkSlowdowns
from planner.observed import LinkTime, StepTimes
from planner.profile import Link
from planner.simulation.slow_links import SlowLink, with_slow_links

LINK = Link(latency_s=1e-4, bytes_per_s=1e9)
LAYERS = tuple(
    small_profile.layer(f"layer{number}", forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01)
    for number in range(4)
)
PROFILE = small_profile.profile(
    *(replace(layer, boundary_bytes=10**6, boundary_grad_bytes=10**6) for layer in LAYERS), ranks=3, link=LINK
)
MEMBERS = (0, 1, 2)


def seen(step: int, bytes_per_s: float | None = None, **changes: Any) -> StepTimes:
    """Rank 0's report of its link to place 1."""
    fields: dict[str, Any] = {
        "target": 1,
        "size_bytes": 0 if bytes_per_s is None else 10**6,
        "seconds": 0.0 if bytes_per_s is None else 1e6 / bytes_per_s,
        "at_least": False,
        "round_trip_s": None,
    }
    one = LinkTime(**{**fields, **changes})
    return StepTimes(rank=0, place=0, step=step, plan=(1, 1), times=(), frozen=False, links=(one,))


def test_a_slow_link_is_found_with_the_second_message_and_is_fast_again() -> None:
    known = LinkSlowdowns(PROFILE)
    for step in range(1, 20):
        assert known.observe(seen(step, 0.9e9), MEMBERS) == ([], [])
        assert not known.changed(step)
    assert known.observe(seen(20, 1e7), MEMBERS) == ([], [])
    (said,), _ = known.observe(seen(21, 1e7), MEMBERS)
    assert said.startswith("the link from rank 0 to rank 1 carries 10 MB/s")
    assert known.changed(21)
    (slow,) = known.links()
    assert (slow.source, slow.target) == (0, 1)
    assert slow.bytes_per_s == pytest.approx(1e7, rel=0.01)
    assert slow.latency_s == LINK.latency_s
    again = LinkSlowdowns(PROFILE, known.links())
    assert not again.changed(22)
    assert again.links()[0].bytes_per_s == pytest.approx(1e7, rel=0.01)

    for step in (22, 23, 24):
        known.observe(seen(step, 0.8e9, at_least=True), MEMBERS)
    assert known.changed(24)
    assert known.links() == ()


def test_one_outlier_and_a_bound_below_what_is_known_change_nothing() -> None:
    known = LinkSlowdowns(PROFILE)
    for step, rate in enumerate([1e9, 1e9, 1e6, 1e9, 1e9, 1e9]):
        known.observe(seen(step, rate), MEMBERS)
    for step in range(10, 20):
        known.observe(seen(step, 1e7, at_least=True), MEMBERS)
    assert not known.changed(20)
    assert known.links() == ()


def test_a_longer_round_trip_is_latency() -> None:
    known = LinkSlowdowns(PROFILE)
    for step in range(3):
        known.observe(seen(step, round_trip_s=0.04), MEMBERS)
    assert known.changed(3)
    (slow,) = known.links()
    assert slow.latency_s == pytest.approx(0.02, rel=0.01)
    assert slow.bytes_per_s == LINK.bytes_per_s


def test_a_link_that_nobody_uses_any_more_counts_as_before_after_a_while_and_lost_ranks_are_forgotten() -> (
    None
):
    slow = SlowLink(source=0, target=1, latency_s=1e-4, bytes_per_s=1e7)
    known = LinkSlowdowns(PROFILE, (slow,))
    assert not known.changed(5)
    assert not known.changed(5 + STALE_STEPS)
    assert known.changed(6 + STALE_STEPS)
    assert known.links() == ()
    known = LinkSlowdowns(PROFILE, (slow,))
    # Nothing has been reported yet.
    assert not known.changed(0)
    assert not known.changed(9 + STALE_STEPS)
    known.keep([0, 2])
    assert known.links() == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target": 0}, "place 0 has no link to place 0, of 3"),
        ({"target": 7}, "place 0 has no link to place 7, of 3"),
        ({"seconds": math.nan}, "1000000 bytes passed in nan s"),
        ({"seconds": -1.0}, "1000000 bytes passed in -1.0 s"),
        ({"size_bytes": -5}, "-5 bytes passed in 0.001 s"),
        ({"round_trip_s": math.inf}, "a round trip took inf s"),
    ],
)
def test_nonsense_is_ignored_and_said(changes: dict[str, Any], why: str) -> None:
    known = LinkSlowdowns(PROFILE)
    changed, ignored = known.observe(seen(4, 1e9, **changes), MEMBERS)
    assert changed == []
    assert ignored == [f"a link of rank 0 in step 4 is ignored: {why}"]
    assert known.links() == ()


def test_a_cluster_with_slow_links_has_no_faster_ones() -> None:
    slow = [
        SlowLink(source=0, target=1, latency_s=1e-5, bytes_per_s=1e7),
        SlowLink(source=2, target=9, latency_s=1.0, bytes_per_s=1.0),
    ]
    made = with_slow_links(PROFILE.cluster, slow)
    assert made.link(0, 1) == Link(latency_s=1e-4, bytes_per_s=1e7)
    assert made.link(1, 0) == LINK
    assert made.link(2, 0) == LINK
