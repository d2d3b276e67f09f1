"""Steps that contradict the profile are told once, and only where nothing else explains them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bare_controller import controller_of, told
from lifecycle_jobs import step_report, switch_report
from made_profile import made_profile
from small_profile import plan

from orchestrator.controller.planning.profile_watch import COMPARED, MOST_STEPS, WARM_UP, ProfileWatch
from orchestrator.events.types import Event, Issued, ProfileDoubted, SpeedsChanged, Submitted
from orchestrator.prepare.profile_cache import CACHE_VARIABLE, Stale, stale
from orchestrator.prepare.profiling import write
from planner.freezing import FreezePlan
from planner.profile import Noise
from workers.protocol.reports import FreezeStarted, StepReport

BEGAN_S = 1_700_000_000.0
DAY_S = 86_400.0
QUIET, NOISY = Noise(others=0.01, spread=0.05), Noise(others=0.62, spread=0.1)
PROFILE = replace(
    made_profile(["a", "b"], [10, 10], 2), key="abc", measured_s=BEGAN_S - 9 * DAY_S, noise=NOISY
)
PLAN = plan(1, 1, predicted_step_s=1.0)
ENOUGH = WARM_UP + COMPARED


def slowed(factor: float) -> SpeedsChanged:
    return SpeedsChanged(
        step=3, slowdowns=((0, 1.0), (1, factor)), changes=("",), lasting_steps=9, since=1, past=None
    )


def steps(*seconds: float) -> list[Event]:
    return [
        replace(step_report(number), step_s=each, committed_s=BEGAN_S)
        for number, each in enumerate(seconds, 1)
    ]


def doubts(events: Sequence[Event], profile: object = PROFILE) -> list[ProfileDoubted]:
    watch = ProfileWatch(profile)  # type: ignore[arg-type]
    found = [watch.fold(event) for event in (Issued(plan=PLAN), *events)]
    return [each for each in found if each is not None]


def test_steps_that_are_much_shorter_than_predicted_are_told_once() -> None:
    (doubt,) = doubts(steps(*[9.0] * WARM_UP, *[0.3] * 100))
    assert (doubt.key, doubt.profile_s, doubt.predicted_s, doubt.took_s) == (
        "abc",
        PROFILE.measured_s,
        1.0,
        0.3,
    )
    assert (doubt.step, doubt.again) == (ENOUGH, True)
    assert doubt.sentence == (
        "the profile does not hold: steps take 300 ms, and 1.00 s were predicted; while it was measured, other work"
        " took 62.0 % of the processors. The next start of the job measures again"
    )


def test_a_profile_that_holds_is_left_alone() -> None:
    assert doubts(steps(*[0.85] * 100)) == []
    assert doubts(steps(*[1.2] * 100)) == []
    assert len(doubts(steps(*[1.3] * 100))) == 1
    assert doubts(steps(*[0.3] * (ENOUGH - 1))) == []


def test_a_fresh_and_quiet_profile_is_told_of_and_not_measured_again() -> None:
    fresh = replace(PROFILE, measured_s=BEGAN_S - 60)
    for profile, again in (
        (replace(fresh, noise=QUIET), False),
        (fresh, True),
        (replace(PROFILE, noise=QUIET), True),
        (replace(PROFILE, measured_s=None, noise=None), True),
    ):
        assert [doubt.again for doubt in doubts(steps(*[0.3] * 30), profile)] == [again]


def test_what_explains_the_steps_keeps_the_profile() -> None:
    long, short = steps(*[3.0] * 40), steps(*[0.3] * 40)
    assert doubts([slowed(3.0), *long]) == []
    assert len(doubts([slowed(1.05), *long])) == 1
    assert len(doubts([slowed(3.0), *short])) == 1  # a slow rank makes no step shorter
    started = FreezeStarted(plan=FreezePlan(epoch=1, version=1, ratios=(), start=3))
    taken_over = Submitted(job="j", epoch=2, spec={}, resume=True, takeover=True)
    for event in (switch_report(0, PLAN), started, taken_over):
        assert doubts([event, *short]) == []
    frozen = [replace(each, effective_update=0.5) for each in short if isinstance(each, StepReport)]
    assert doubts(frozen) == []


def test_unsteady_steps_are_waited_out_but_not_for_ever() -> None:
    wild = [0.1, 0.5] * 20
    assert next(doubt.step for doubt in doubts(steps(*wild, *[0.3] * 60))) > len(wild)
    assert doubts(steps(*[0.1, 0.5] * MOST_STEPS, *[0.3] * 60)) == []


def test_times_that_nobody_measured_are_not_doubted() -> None:
    emulated = replace(PROFILE.cluster.devices[0], kind="emulated")
    given = replace(PROFILE, cluster=replace(PROFILE.cluster, devices=(emulated,) * 2))
    for profile in (None, given, replace(PROFILE, key="")):
        assert doubts(steps(*[0.3] * 40), profile) == []


def test_a_controller_logs_the_contradiction_and_marks_the_kept_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    write(PROFILE, tmp_path / "cache" / "abc.json")

    async def train() -> None:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):
            controller._profile_watch = ProfileWatch(PROFILE)
            for event in (Issued(plan=PLAN), *steps(*[0.3] * 30)):
                controller._record(event)
            (doubt,) = [each for each in told(controller) if isinstance(each, ProfileDoubted)]
            assert doubt.again
            while controller._tasks:
                await asyncio.gather(*controller._tasks)

    asyncio.run(train())
    assert stale(tmp_path / "cache", PROFILE) == Stale(
        profile_s=PROFILE.measured_s, predicted_s=1.0, took_s=0.3
    )
