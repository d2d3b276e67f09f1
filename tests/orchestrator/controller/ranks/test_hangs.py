"""Ranks that answer and hang, because they compute for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lifecycle_jobs import step_report
from pace import patient
from process_hosts import ElasticJob, assert_gone
from ray_jobs import resolved
from rigs import hangs_in_step_4
from tiny_jobs import tiny

from orchestrator.controller.ranks import living
from orchestrator.controller.ranks.hangs import MANY, TIMES_LIMIT, StepPace, Verdict, judge
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFailed
from workers.protocol.orders import Generation
from workers.protocol.reports import Working

FORMED = events.Formed(
    generation=Generation(number=3, epoch=1, members=(0,), store_host="h", store_port=1, timeout_s=60.0),
    start=None,
    step=0,
)


def verdict(pace: StepPace, for_s: float, hang_timeout_s: float = 5.0, timeout_s: float = 60.0) -> Verdict:
    working = Working(action="0F0", for_s=for_s)
    return judge(working, pace, hang_timeout_s=hang_timeout_s, timeout_s=timeout_s)[0]


def test_the_first_step_of_a_generation_has_longer_than_the_others() -> None:
    first = StepPace().after(FORMED)
    assert [verdict(first, for_s) for for_s in (29.0, 31.0, 61.0)] == list(Verdict)
    steady = first.after(step_report(1, generation=3))
    assert [verdict(steady, for_s) for for_s in (0.0, 31.0, 61.0)] == [Verdict.FINE, *[Verdict.HUNG] * 2]
    again = steady.after(FORMED)
    assert verdict(again, 29.0) is Verdict.FINE


def test_an_action_of_slow_steps_has_many_times_their_time() -> None:
    pace = StepPace(step_s=(8.0, 9.0, 10.0), steady=True)
    limit_s = MANY * 9.0
    assert verdict(pace, limit_s / 2 - 1) is Verdict.FINE
    assert verdict(pace, limit_s - 1) is Verdict.SLOW
    assert verdict(pace, limit_s + 1) is Verdict.HUNG


def test_a_verdict_names_the_action_the_times_and_the_setting() -> None:
    pace = StepPace(step_s=(0.25,), steady=True)
    slow = judge(Working(action="1F0", for_s=3.0), pace, hang_timeout_s=5.0, timeout_s=60.0)
    text = "has computed 1F0 for 3.00 s, where a step takes 250 ms"
    assert slow == (
        Verdict.SLOW,
        f"{text}: it is killed after 5.00 s with a processor (elastic.hang_timeout_s)",
    )
    first = judge(Working(action="1F0", for_s=90.0), StepPace(), hang_timeout_s=5.0, timeout_s=60.0)
    assert first[1] == "has computed 1F0 for 1 min 30 s, and was killed (cluster.timeout_s for a first step)"
    assert judge(None, pace, hang_timeout_s=5.0, timeout_s=60.0)[0] is Verdict.FINE


def test_an_action_for_which_no_processor_was_free_does_not_count() -> None:
    pace = StepPace(step_s=(0.25,), steady=True)

    def starved(for_s: float, starved_s: float) -> tuple[Verdict, str]:
        working = Working(action="1F0", for_s=for_s, starved_s=starved_s)
        return judge(working, pace, hang_timeout_s=5.0, timeout_s=60.0)

    verdict, why = starved(12.0, 9.0)
    assert verdict is Verdict.SLOW
    assert "it waited for a processor for 9.00 s of it" in why
    assert starved(14.5, 9.0)[0] is Verdict.HUNG
    assert starved(5.0 * TIMES_LIMIT, 19.0)[0] is Verdict.HUNG


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_step_that_hangs_each_time_ends_the_job_in_words(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "STACKS_S", patient(living.STACKS_S))
    spec = resolved(
        tiny(
            tmp_path,
            "hangs",
            job={"steps": 8, "sample_tokens": 0},
            pipeline={"ranks": ranks},
            checkpoint={"every_steps": 1},
            elastic={"hang_timeout_s": 1.5, "attempts": 2},
        )
    )
    ran = ElasticJob(spec, rig=hangs_in_step_4, timeout_s=min(patient(4.0), 20.0)).run()
    assert isinstance(ran.state, JobFailed)
    # A lone rank may die before it reports step 3, and commits that step again.
    assert re.search(
        r"2 failures with no step committed beyond step [23] \(elastic.attempts", ran.state.reason
    )
    assert "and was killed" in ran.state.reason
    first, last = ran.of(events.RankFailed)
    assert "(elastic.hang_timeout_s)" in first.error
    assert "(cluster.timeout_s for a first step)" in last.error or ranks == 1
    assert all("in hang" in failed.details for failed in (first, last))
    told = [warned.text for warned in ran.of(events.Warned) if "it is killed after" in warned.text]
    assert len(told) <= 2, "once for each: none where the controller looks so late that it kills at once"
    assert_gone(ran.pids)
