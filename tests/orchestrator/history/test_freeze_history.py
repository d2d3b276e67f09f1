"""What a log says about freezing: decisions stand, voided measurements are dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.events import types as events
from orchestrator.history import job_view
from orchestrator.history.freeze_history import FreezeHistory
from planner.freezing import FreezeOverrides, FreezePlan
from planner.plan import Plan
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import FreezeStarted, SwitchReport, TimelineReport

PLAN = Plan(
    epoch=1,
    version=1,
    reason="first",
    layers=((0, 1), (1, 2)),
    stage_ranks=(0, 1),
    schedule="1f1b",
    chunks=1,
    microbatches=2,
    replicas=1,
)
FIRST = FreezePlan(epoch=1, version=1, ratios=((0.5, 0.5), (1.0, 1.0)), start=9)
SECOND = FreezePlan(epoch=1, version=2, ratios=((0.25, 0.5), (1.0, 0.0)), start=14)
SOLVED = events.FreezeSolved(
    plan=replace(FIRST, start=None),
    ratios=((0, 0, 0.5),),
    unfrozen_s=1.0,
    solved_s=0.75,
    all_frozen_s=0.5,
    outside_s=0.0,
    measured_unfrozen_s=1.0,
    measured_all_frozen_s=0.5,
    kappa=0.75,
    mean_per_stage=(0.5,),
    duals=(0.0,),
    critical=(),
    solve_s=0.0,
)
SPEC = {"freeze": {"method": "timelyfreeze", "warm_up": 2, "monitoring": 8, "ramp": 10}}
"""Steps 3 to 8 are monitored."""


def run(epoch: int, *, start: int | None, plan: Plan = PLAN) -> list[events.Event]:
    generation = Generation(
        number=epoch, epoch=epoch, members=(0, 1), store_host="h", store_port=1, timeout_s=1.0
    )
    ref = CheckpointRef(path=f"/out/{start}", step=start) if start is not None else None
    return [
        events.Submitted(job="j", epoch=epoch, spec=SPEC, resume=start is not None),
        events.Issued(plan=plan),
        events.Formed(generation=generation, start=ref, step=start or 0),
    ]


def timelines(first: int, last: int, step_s: float = 1.0) -> list[TimelineReport]:
    return [
        TimelineReport(step=step, rank=rank, step_s=step_s, spans=(), memory_bytes=0)
        for step in range(first, last + 1)
        for rank in range(2)
    ]


def fold(*log: events.Event) -> FreezeHistory:
    records = (events.Record(time_s=0.0, event=event) for event in log)
    return job_view.fold(records).freeze_history()


def test_the_view_tells_the_settings_in_force_and_since_when() -> None:
    """A bound or a number of layers that is asked for while the method stays is another setting; asking for the same
    again is none."""

    def changed(start: int, **wanted: Any) -> FreezeStarted:
        control = FreezeOverrides(r_max=0.8, **wanted)
        return FreezeStarted(plan=FreezePlan(epoch=1, version=start, ratios=(), control=control, start=start))

    begun, *rest = run(1, start=None)
    assert isinstance(begun, events.Submitted)
    log: list[events.Event] = [
        replace(begun, spec={"freeze": {"method": "pipetransformer", "alpha": 0.5}}),
        *rest,
    ]
    told: list[tuple[object, ...]] = []
    for each in (
        changed(5, method="pipetransformer", alpha=0.5),
        changed(7, method="pipetransformer", alpha=0.25),
        changed(9, method="prefix", prefix=3),
        changed(11, method="prefix", prefix=4),
        changed(13, method="prefix"),
        changed(15, method="pipetransformer"),
    ):
        log.append(each)
        view = job_view.fold(events.Record(time_s=0.0, event=event) for event in log).freeze
        told.append((view.method, view.alpha, view.by_hand, view.since))
    assert told == [
        ("pipetransformer", 0.5, None, 1),
        ("pipetransformer", 0.25, None, 7),
        ("prefix", 0.25, 3, 9),
        ("prefix", 0.25, 4, 11),
        ("prefix", 0.25, 4, 11),
        ("pipetransformer", 0.25, 4, 15),
    ]


def test_a_log_without_freezing_says_nothing() -> None:
    assert fold(*run(1, start=None)) == FreezeHistory(plan=PLAN)


def test_decisions_come_by_start_each_once() -> None:
    log = [*run(1, start=None), FreezeStarted(plan=FIRST), FreezeStarted(plan=SECOND)]
    assert fold(*log).plans == (FIRST, SECOND)
    # A run that resumes from step 8 follows the first decision again.
    log += [*run(2, start=8), FreezeStarted(plan=FIRST)]
    assert fold(*log).plans == (FIRST, SECOND)


def test_the_newest_solution_is_kept_with_its_decision() -> None:
    log = [*run(1, start=None), SOLVED, FreezeStarted(plan=FIRST), *run(2, start=10)]
    assert fold(*log).solved == SOLVED
    assert fold(*log, *run(3, start=None)).solved is None


def test_the_newest_generation_wins() -> None:
    other = replace(FIRST, epoch=2, ratios=((0.0, 0.0), (0.0, 0.0)))
    log = [*run(1, start=None), FreezeStarted(plan=FIRST), *run(2, start=8), FreezeStarted(plan=other)]
    assert fold(*log).plans == (other,)


def test_a_run_from_the_beginning_knows_nothing_of_the_one_before() -> None:
    log = [*run(1, start=None), *timelines(3, 6), FreezeStarted(plan=FIRST), *run(2, start=None)]
    assert fold(*log) == FreezeHistory(plan=PLAN)


def test_measurements_after_the_resumed_step_are_made_again() -> None:
    log = [*run(1, start=None), *timelines(3, 6), *run(2, start=4)]
    assert [(report.step, report.rank) for report in fold(*log).monitored] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    again = fold(*log, *timelines(5, 6, step_s=2.0)).monitored
    assert [(report.step, report.step_s) for report in again if report.rank == 0] == [
        (3, 1.0),
        (4, 1.0),
        (5, 2.0),
        (6, 2.0),
    ]


def test_steps_that_were_only_looked_at_are_not_monitored() -> None:
    log = [*run(1, start=None), *timelines(1, 2), *timelines(8, 10)]
    assert [(report.step, report.rank) for report in fold(*log).monitored] == [(8, 0), (8, 1)]


def test_times_of_another_partition_are_dropped() -> None:
    log = [*run(1, start=None), *timelines(3, 6), FreezeStarted(plan=FIRST)]
    same = replace(PLAN, epoch=2, reason="second plan")
    assert len(fold(*log, *run(2, start=6, plan=same)).monitored) == 8
    assert len(fold(*log).monitored_with(same)) == 8
    other = replace(PLAN, layers=((0, 2),), stage_ranks=(0,))
    assert fold(*log).monitored_with(other) == ()
    history = fold(*log, *run(2, start=6, plan=other))
    assert history.monitored == ()
    assert history.plans == (FIRST,)


def test_timelines_belong_to_the_plan_that_the_ranks_followed() -> None:
    """A plan is issued after step 4, and the ranks switch to it after step 6."""
    other = replace(PLAN, version=2, layers=((0, 2),), stage_ranks=(0,))
    before = [*run(1, start=None), *timelines(3, 4), events.Issued(plan=other), *timelines(5, 6)]
    waiting = fold(*before)
    assert waiting.plan == PLAN
    assert {report.step for report in waiting.monitored_with(PLAN)} == {3, 4, 5, 6}
    switch = SwitchReport(
        step=6,
        rank=0,
        epoch=1,
        version=2,
        taken=(1,),
        given=(),
        brought_bytes=0,
        brought_s=0.0,
        stall_s=0.0,
        switched_s=0.0,
    )
    after = fold(*before, switch, *timelines(7, 8))
    assert after.plan == other
    assert {report.step for report in after.monitored_with(other)} == {7, 8}
    assert after.monitored_with(PLAN) == ()


def test_a_plan_that_no_rank_followed_leaves_the_timelines_as_they_are() -> None:
    other = replace(PLAN, version=2, layers=((0, 2),), stage_ranks=(0,))
    log = [*run(1, start=None), *timelines(3, 6), events.Issued(plan=other)]
    assert {report.step for report in fold(*log, *run(2, start=6)).monitored_with(PLAN)} == {3, 4, 5, 6}
