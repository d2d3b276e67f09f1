"""A plan's measured step is one at the speeds for which the step was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from disturbed_run import ALONE_S, SLOW_S, disturbed, known, moved

from orchestrator.analysis.decided_plans import OVERTAKEN, decided_plans
from orchestrator.events.types import Adapted, Event, Formed, LinksTimed
from planner.adapt.past import Past
from planner.simulation.slow_links import SlowLink
from workers.protocol.orders import Generation

STAYS = Adapted(
    step=5, moves=False, reason="no cut saves 3 %", now_s=ALONE_S, then_s=ALONE_S, cost_s=0.1, layers=(3, 3)
)


def found(*logged: tuple[int, tuple[Event, ...]], told: bool = False) -> list[tuple[int, float | None, str]]:
    """(decided after, measured, why not) of each plan of a job that neighbours disturb in steps 21 to 40 and 61 to 80,
    with these events after the steps that are named. Its own log does not tell of the neighbours unless `told`."""
    run = disturbed("off", logged=dict(logged), told=told)
    return [(plan.decisions[0].step, plan.measured_s, plan.unmeasured) for plan in decided_plans(run)]


def test_steps_after_a_change_of_speed_are_not_measured() -> None:
    # Most of the fifty steps after the decision are beside the neighbour, which the job notices in its third step.
    noticed = replace(known(23, 3.0), since=21)
    assert found((4, (known(4, 1.0),)), (15, (replace(STAYS, step=15),)), (23, (noticed,))) == [
        (15, pytest.approx(ALONE_S), "")
    ]


def test_a_plan_that_speeds_overtake_is_not_measured() -> None:
    # The neighbour comes while the layers are on their way.
    decision, move = moved(22, 3, 0, 1)
    noticed = replace(known(23, 3.0), since=21)
    assert found((20, (decision,)), (22, (move,)), (23, (noticed,))) == [(20, None, OVERTAKEN)]
    # It has come, but nobody knows yet.
    late = replace(STAYS, step=22)
    assert found((22, (late,)), (23, (noticed,))) == [(22, None, OVERTAKEN)]


def test_decisions_at_other_speeds_are_other_rows() -> None:
    noticed, slow = replace(known(23, 3.0), since=21), replace(STAYS, now_s=SLOW_S, then_s=SLOW_S)
    assert found(
        (5, (STAYS,)),
        (9, (replace(STAYS, step=9),)),
        (23, (noticed, replace(slow, step=23))),
        (30, (replace(slow, step=30),)),
        (43, (replace(known(43, 1.0), since=41), replace(STAYS, step=43))),
    ) == [(5, pytest.approx(ALONE_S), ""), (23, pytest.approx(SLOW_S), ""), (43, pytest.approx(ALONE_S), "")]


def test_a_rehearsal_tells_of_neighbours_that_the_job_never_noticed() -> None:
    stays = (18, (replace(STAYS, step=18),))
    assert found(stays) == [(18, pytest.approx(SLOW_S), "")]
    assert found(stays, told=True) == [(18, pytest.approx(ALONE_S), "")]


def test_drifting_speeds_are_the_same_speeds_and_slow_links_are_others() -> None:
    past = Past(changed=((0, 3), (1, 4)))
    first, drifted = replace(known(4, 1.0), past=past), replace(known(7, 1.06), since=5, past=past)
    late = replace(STAYS, step=50)
    assert found((4, (first,)), (5, (STAYS,)), (7, (drifted,)), (8, (replace(STAYS, step=8),))) == [
        (5, pytest.approx(ALONE_S), "")
    ]
    slow = LinksTimed(step=61, links=(SlowLink(source=0, target=1, latency_s=0.01, bytes_per_s=1e7),))
    assert found((50, (late,)), (61, (slow,))) == [(50, pytest.approx(ALONE_S), "")]


def test_a_second_rank_that_changed_since_the_same_step_is_another_change() -> None:
    one, both = Past(changed=((0, 3), (1, 21))), Past(changed=((0, 21), (1, 21)))
    first, second = replace(known(22, 3.0), since=21, past=one), replace(known(24, 3.2), since=21, past=both)
    decided = replace(STAYS, step=22)
    assert found((22, (first, decided)), (24, (second,))) == [(22, None, OVERTAKEN)]


def test_a_plan_is_measured_until_another_generation_forms_or_other_layers_move() -> None:
    decision, move = moved(10, 3, 0, 1)
    second = Generation(
        number=2, epoch=1, members=(0, 1, 2, 3), store_host="127.0.0.1", store_port=1, timeout_s=1.0
    )
    formed = Formed(generation=second, start=None, step=20)
    assert found((8, (decision,)), (10, (move,)), (20, (formed,))) == [(8, pytest.approx(ALONE_S), "")]
    requested = replace(move, step=20)
    assert found((8, (decision,)), (10, (move,)), (20, (requested,))) == [(8, pytest.approx(ALONE_S), "")]
    # A move that stops training forms the generation that follows it.
    stopping = replace(move, mode="stop")
    at_once = stopping, replace(formed, step=10), replace(known(11, 3.0), since=21)
    assert found((8, (decision,)), (10, at_once)) == [(8, pytest.approx(ALONE_S), "")]


def test_a_plan_that_no_step_followed_is_not_measured() -> None:
    decision, _ = moved(10, 3, 0, 1)
    assert found((8, (decision,))) == [(8, None, "")]
    assert found((100, (replace(STAYS, step=100),))) == [(100, None, "")]
