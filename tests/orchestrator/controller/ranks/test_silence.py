"""Which part of a rank's silence speaks for a hang: clocks and what was seen are given."""

from __future__ import annotations

import pytest

from orchestrator.controller.ranks.hangs import Verdict
from orchestrator.controller.ranks.silence import Silence, SilenceObservation, judge_silence
from workers.process.process_times import ProcessTimes, Standing

EVERY_S, LIMIT_S, MOST_S = 1.0, 5.0, 60.0


def seen(
    at_s: float,
    *,
    ran: float = 0.0,
    waited: float | None = 0.0,
    standing: Standing = Standing.SLEEPING,
    pressure_s: float | None = None,
) -> ProcessTimes:
    """A process that runs for the share `ran` of each second, and waits for a core for the share `waited`."""
    return ProcessTimes(
        standing=standing,
        at_s=at_s,
        ran_s=ran * at_s,
        waits_s={} if waited is None else {1: 100.0 + waited * at_s, 2: 0.0},
        pressure_s=pressure_s,
    )


def after(*looks: SilenceObservation) -> Silence:
    silence = Silence(since_s=0.0, at_s=0.0)
    for look in looks:
        silence = silence.after(look, EVERY_S)
    return silence


def silent(until_s: int, **process: object) -> Silence:
    """A silence with a look every second, of a process that stays as it is."""
    looks = (
        SilenceObservation(at_s=float(at_s), process=seen(at_s, **process)) for at_s in range(1, until_s + 1)
    )  # pyright: ignore[reportArgumentType]
    return after(*looks)


def verdict(silence: Silence, *, works: bool = False) -> tuple[Verdict, str]:
    return judge_silence(
        silence, limit_s=LIMIT_S, most_s=MOST_S, works=works, what="answered nothing for", setting="its limit"
    )


@pytest.mark.parametrize("standing", [Standing.SLEEPING, Standing.STOPPED])
def test_a_rank_that_sleeps_or_is_stopped_has_hung_at_its_limit(standing: Standing) -> None:
    assert verdict(silent(4, standing=standing))[0] is Verdict.FINE
    found, why = verdict(silent(5, standing=standing))
    assert found is Verdict.HUNG
    stopped = ", 5.00 s in all: its process is stopped" if standing is Standing.STOPPED else ""
    assert why == f"answered nothing for 5 s (its limit){stopped}, and was killed"


def test_a_rank_nobody_can_look_at_has_hung_at_its_limit() -> None:
    assert verdict(after(*(SilenceObservation(at_s=float(at_s)) for at_s in range(1, 6))))[0] is Verdict.HUNG


def test_a_rank_that_waits_for_a_processor_is_waited_for() -> None:
    starved = silent(20, ran=0.1, waited=0.85, standing=Standing.RUNNABLE, pressure_s=0.0)
    assert starved.starved_s == pytest.approx(17.0)
    assert starved.idle_s == pytest.approx(1.0)
    found, why = verdict(starved)
    assert found is Verdict.SLOW
    assert why == (
        "answered nothing for 5 s (its limit), 20.0 s in all: it waited for a processor or a disk for 17.0 s, it ran"
        " for 2.00 s. It has not hung: it is waited for, 1 min 00 s at most"
    )
    found, why = verdict(silent(60, ran=0.1, waited=0.85, standing=Standing.RUNNABLE))
    assert found is Verdict.HUNG
    assert why.endswith("That is the most that a rank is waited for, and it was killed")


def test_a_rank_that_runs_without_an_answer_is_found_later_than_one_that_sleeps() -> None:
    runs = silent(20, ran=1.0, standing=Standing.RUNNABLE)
    assert verdict(runs)[0] is Verdict.SLOW
    assert verdict(silent(60, ran=1.0, standing=Standing.RUNNABLE))[0] is Verdict.HUNG
    # It is at work for what was asked: its time is its own.
    assert verdict(runs, works=True)[0] is Verdict.HUNG
    assert verdict(silent(20, ran=0.1, waited=0.9, standing=Standing.RUNNABLE), works=True)[0] is Verdict.SLOW


def test_a_rank_that_is_stopped_while_it_starves_has_its_limit_from_there() -> None:
    starved = [SilenceObservation(at_s=float(at_s), process=seen(at_s, waited=1.0)) for at_s in range(1, 11)]
    frozen = starved[-1].process
    assert frozen is not None
    stopped = [
        SilenceObservation(
            at_s=float(at_s),
            process=ProcessTimes(standing=Standing.STOPPED, at_s=at_s, waits_s=frozen.waits_s),
        )
        for at_s in range(11, 16)
    ]
    assert verdict(after(*starved, *stopped[:-1]))[0] is Verdict.SLOW
    assert verdict(after(*starved, *stopped))[0] is Verdict.HUNG


def test_idle_threads_that_wake_now_and_then_excuse_nothing() -> None:
    looks = []
    for at_s in range(1, 8):
        process = ProcessTimes(
            standing=Standing.SLEEPING, at_s=at_s, waits_s=dict.fromkeys(range(100), 0.02 * at_s)
        )
        looks.append(SilenceObservation(at_s=float(at_s), process=process))
    assert after(*looks).starved_s == 0.0
    assert verdict(after(*looks))[0] is Verdict.HUNG


def test_a_rank_that_waits_for_a_disk_is_waited_for() -> None:
    assert verdict(silent(20, standing=Standing.BLOCKED))[0] is Verdict.SLOW


def test_where_waits_are_unknown_a_runnable_rank_is_waited_for() -> None:
    assert verdict(silent(20, ran=0.1, waited=None, standing=Standing.RUNNABLE))[0] is Verdict.SLOW
    assert verdict(silent(20, ran=0.1, waited=None, standing=Standing.SLEEPING))[0] is Verdict.HUNG


def test_a_controller_that_stood_still_gives_its_ranks_their_full_time_again() -> None:
    looks = [SilenceObservation(at_s=at_s) for at_s in (1.0, 2.0, 92.0, 93.0, 94.0)]
    stood = after(*looks[:-1])
    assert stood.late_s == 89.0
    assert verdict(stood)[0] is Verdict.FINE
    found, why = verdict(after(*looks))
    assert found is Verdict.HUNG
    assert "the controller itself stood still for 1 min 29 s" in why


def test_a_rank_whose_whole_host_is_silent_is_waited_for() -> None:
    dark = after(*(SilenceObservation(at_s=float(at_s), dark=True) for at_s in range(1, 31)))
    found, why = verdict(dark)
    assert found is Verdict.SLOW
    assert "nothing on its host answered for 30.0 s" in why
    # The network is back, and the rank still does not answer.
    back = dark
    for at_s in range(31, 36):
        back = back.after(SilenceObservation(at_s=float(at_s), process=seen(at_s)), EVERY_S)
    assert verdict(back)[0] is Verdict.HUNG


def test_looks_that_come_seldom_stand_for_the_time_between_them() -> None:
    looks = [
        SilenceObservation(at_s=float(at_s), process=seen(at_s, waited=0.9) if at_s % 4 == 0 else None)
        for at_s in range(1, 21)
    ]
    assert after(*looks).starved_s == pytest.approx(0.9 * 20)
