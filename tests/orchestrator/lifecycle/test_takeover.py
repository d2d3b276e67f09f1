"""What a restarted controller reads from its predecessor's log."""

from __future__ import annotations

from dataclasses import replace

from lifecycle_jobs import SOLUTION, checkpoint_report, order_of, plan_of, step_report

from orchestrator.events import types as events
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.history.job_view import JobView, fold
from orchestrator.lifecycle.effects import AppendToLog, Assess, Reclaim, Train
from orchestrator.lifecycle.machine import handle
from orchestrator.lifecycle.reports import take_report
from orchestrator.lifecycle.states import Assessing, Pending, Reclaiming, Stopping, Training
from orchestrator.lifecycle.stimuli import RankLost, Reclaimed, Reported, Start
from orchestrator.lifecycle.takeover import taken_over
from planner.freezing import FreezeOverrides
from planner.schedule.expand import schedule_of
from planner.schedule.registry import build
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import FreezeStarted, PrefixFrozen, SwitchReport, TimelineReport

PLAN = plan_of(3, epoch=3)
SHRUNK = replace(PLAN, version=2, layers=((0, 2), (2, 3)), stage_ranks=(0, 1))
ORDER = order_of(
    3,
    CheckpointRef(path="/4", step=4),
    epoch=3,
    generation=5,
    plan=PLAN,
    schedule=schedule_of(PLAN),
    timeout_s=1.0,
)


def submitted(epoch: int, *, takeover: bool = False) -> events.Submitted:
    freeze = {"method": "timelyfreeze", "r_max": 0.8, "warm_up": 5, "monitoring": 9, "ramp": 10}
    return events.Submitted(job="j", epoch=epoch, spec={"freeze": freeze}, resume=False, takeover=takeover)


def started(rank: int) -> events.RankStarted:
    return events.RankStarted(rank=rank, node=f"n{rank}", host="h", pid=rank)


def formed(number: int, members: tuple[int, ...], step: int) -> events.Formed:
    generation = Generation(
        number=number, epoch=3, members=members, store_host="h", store_port=1, timeout_s=1.0
    )
    return events.Formed(generation=generation, start=None, step=step)


REGROUPED = events.Regrouped(
    generation=6,
    cause="loss",
    reason="",
    lost=(1,),
    joined=(),
    step=6,
    rerun=1,
    steps_lost=0,
    detect_s=0.0,
    settle_s=0.0,
    plan_s=0.0,
    move_s=0.0,
    resume_s=0.0,
)
RUN: tuple[events.Event, ...] = (
    submitted(3),
    *map(started, range(3)),
    events.Issued(plan=PLAN),
    formed(5, (0, 1, 2), 4),
    step_report(5, generation=5),
    checkpoint_report(5, "/5"),
    step_report(6, generation=5),
    events.RankFailed(rank=1, error="killed"),
    events.Issued(plan=SHRUNK),
    formed(6, (0, 2), 6),
    REGROUPED,
    started(3),
    step_report(7, generation=5),
)


def view(*logged: events.Event) -> JobView:
    return fold(events.Record(time_s=float(index), event=event) for index, event in enumerate(logged))


def test_a_users_own_table_stays_as_the_job_started_with_it() -> None:
    """The file may have gone or changed since: the ranks follow the table from the start of the job."""
    plan = replace(PLAN, schedule="csv:/gone.csv", recompute=(1,))
    table = build("gpipe", 3, PLAN.microbatches)
    order = replace(ORDER, plan=plan, schedule=schedule_of(plan, table))
    run = (submitted(3), *map(started, range(3)), events.Issued(plan=plan), formed(5, (0, 1, 2), 4))
    earlier = taken_over(order, view(*run)).earlier
    assert earlier is not None
    assert earlier.progress.schedule == order.schedule != table


def test_the_job_is_what_the_log_says() -> None:
    order = taken_over(ORDER, view(*RUN))
    assert (order.epoch, order.plan.epoch, order.generation) == (4, 4, 7)
    job = order.earlier
    assert job is not None
    assert (job.progress.plan, job.progress.schedule, job.membership.members) == (
        SHRUNK,
        schedule_of(SHRUNK),
        (0, 2),
    )
    assert (job.membership.alive, job.membership.idle, job.membership.next_rank) == ({0, 2, 3}, {3}, 4)
    assert job.membership.nodes == {0: "n0", 2: "n2", 3: "n3"}
    assert (job.progress.generation, job.progress.step, job.progress.trained) == (6, 7, True)
    assert [ref.path for ref in job.progress.checkpoints] == ["/5", "/4"]


def test_failures_count_on_under_the_next_controller() -> None:
    failed = replace(formed(7, (0, 2), 7), failures=2, failed_at=7)
    paused = events.Paused(reason="1 rank left", step=7, failures=3, failed_at=7)
    for last, failures in ((failed, 2), (paused, 3)):
        order = taken_over(ORDER, view(*RUN, failed, last))
        assert order.earlier is not None
        assert (order.earlier.progress.failures, order.earlier.progress.failed_at) == (failures, 7)


def test_a_hole_in_the_log_does_not_keep_later_steps_out_of_it() -> None:
    order = taken_over(ORDER, view(*RUN, step_report(9, generation=6)))
    assert order.earlier is not None
    assert order.earlier.progress.step == 9
    job, news = take_report(order.earlier, step_report(10, generation=6))
    assert (job.progress.step, news) == (10, (step_report(10, generation=6),))


def test_a_frozen_prefix_is_logged_once_whoever_tells_it() -> None:
    told = PrefixFrozen(step=7, layers=2, bound=1.0, norms=(1.0, 0.5, 1.0), names=("a", "b"))
    order = taken_over(ORDER, view(*RUN))
    assert order.earlier is not None
    job, news = take_report(order.earlier, told)
    assert news == (told,)
    assert take_report(job, told) == (job, ())
    later = replace(told, step=8, layers=3)
    assert take_report(job, later)[1] == (later,)
    again = taken_over(ORDER, view(*RUN, told))
    assert again.earlier is not None
    assert take_report(again.earlier, told)[1] == ()


def test_what_was_void_when_a_controller_died_stays_void() -> None:
    back = replace(formed(7, (0, 2), 5), start=CheckpointRef(path="/5", step=5))
    order = taken_over(ORDER, view(*RUN, back))
    assert order.earlier is not None
    assert take_report(order.earlier, step_report(8, generation=6)) == (order.earlier, ())
    job, news = take_report(order.earlier, step_report(6, generation=7))
    assert (job.progress.step, len(news)) == (6, 1)


def test_a_second_takeover_has_a_higher_epoch_still() -> None:
    order = taken_over(ORDER, view(*RUN, submitted(4, takeover=True)))
    assert order.epoch == 5


def test_zones_of_nodes_are_known_again() -> None:
    zoned = replace(started(0), zone="z")
    order = taken_over(ORDER, view(*(zoned if event == started(0) else event for event in RUN)))
    assert order.earlier is not None
    assert [order.earlier.membership.domain(rank) for rank in (0, 2)] == ["z/n0", "n2"]


def test_ranks_that_train_on_are_listened_to_again() -> None:
    order = taken_over(ORDER, view(*RUN))
    state, effects = handle(order, Pending(), Start())
    assert isinstance(state, Reclaiming)
    assert effects == (Reclaim(frozenset({0, 2, 3}), 1),)
    for rank in (0, 2, 3):
        state, effects = handle(order, state, Reclaimed(rank, f"n{rank}", "h", 1))
    assert isinstance(state, Training)
    assert effects[0] == Train((0, 2), 7, 1, under_way=True)


def test_a_rank_that_was_lost_meanwhile_is_recovered_from() -> None:
    order = taken_over(ORDER, view(*RUN))
    state, _ = handle(order, Pending(), Start())
    state, _ = handle(order, state, RankLost(2, "gone", dead=True))
    for rank in (0, 3):
        state, effects = handle(order, state, Reclaimed(rank, f"n{rank}", "h", 1))
    assert isinstance(state, Assessing)
    assert effects == (AppendToLog(events.RankFailed(rank=2, error="gone")), Assess(frozenset({0, 3}), 2, 6))


SOLVED = replace(SOLUTION, plan=replace(SOLUTION.plan, epoch=3))
STARTED = FreezeStarted(plan=replace(SOLVED.plan, start=7))
TIMELINES = tuple(TimelineReport(step=7, rank=rank, step_s=0.1, spans=(), memory_bytes=0) for rank in (0, 1))


def test_what_was_measured_and_decided_of_freezing_stands() -> None:
    """Otherwise a controller that takes over would measure again, or decide again from less data."""
    order = taken_over(ORDER, view(*RUN, *TIMELINES, SOLVED))
    assert order.freezing.monitored_with(SHRUNK) == TIMELINES
    assert (order.freezing.solved, order.freezing.plans) == (SOLVED, ())
    order = taken_over(ORDER, view(*RUN, *TIMELINES, SOLVED, STARTED))
    assert order.freezing.plans == (STARTED.plan,)
    assert order.earlier is not None
    assert (order.earlier.progress.freeze, order.earlier.intents.proposed) == ((STARTED.plan,), None)


def test_a_change_of_freezing_that_was_logged_is_sent_again() -> None:
    control = FreezeOverrides(method="none", r_max=0.8)
    plan = replace(STARTED.plan, version=2, control=control, start=None)
    change = events.FreezeChanged(from_step=8, method="none", r_max=0.8, by="", plan=plan)
    order = taken_over(ORDER, view(*RUN, SOLVED, STARTED, change))
    assert order.earlier is not None
    assert order.earlier.intents.proposed == plan
    order = taken_over(ORDER, view(*RUN, change, STARTED))
    assert order.earlier is not None
    assert order.earlier.intents.proposed == plan


def test_a_run_that_is_replayed_is_told_nothing_else() -> None:
    replayed = replace(ORDER, freezing=FreezeHistory(plans=(STARTED.plan,), replayed=True))
    assert taken_over(replayed, view(*RUN, SOLVED)).freezing == replayed.freezing


def test_a_checkpoint_that_was_found_damaged_stays_out() -> None:
    """Otherwise it would be preferred to the older state that survivors hold."""
    damaged = events.Skipped(rank=0, damage=DamagedCheckpoint(path="/5", file="f", problem="is cut short"))
    order = taken_over(ORDER, view(*RUN, damaged))
    assert order.earlier is not None
    assert [ref.path for ref in order.earlier.progress.checkpoints] == ["/4"]


def test_a_plan_that_was_prepared_is_followed_all_the_same() -> None:
    moved = replace(SHRUNK, version=3, layers=((0, 1), (1, 3)))
    order = taken_over(ORDER, view(*RUN, events.Issued(plan=moved)))
    assert order.earlier is not None
    assert (order.earlier.progress.plan, order.earlier.progress.prepared) == (
        SHRUNK,
        (moved, schedule_of(moved)),
    )
    state, _ = handle(order, Pending(), Start())
    for rank in (0, 2, 3):
        state, effects = handle(order, state, Reclaimed(rank, f"n{rank}", "h", 1))
    warned = [effect.event for effect in effects if isinstance(effect, AppendToLog)]
    assert [type(event) for event in warned] == [events.Warned]
    assert isinstance(state, Training)
    switched = SwitchReport(
        step=8,
        rank=0,
        epoch=3,
        version=3,
        taken=(),
        given=(1,),
        brought_bytes=0,
        brought_s=0.0,
        stall_s=0.0,
        switched_s=0.0,
    )
    state, _ = handle(order, state, Reported(switched))
    assert isinstance(state, Training)
    assert (state.job.progress.plan, state.job.progress.schedule) == (moved, schedule_of(moved))
    # A switch that was reported before the controller was lost needs no second report.
    order = taken_over(ORDER, view(*RUN, events.Issued(plan=moved), switched))
    assert order.earlier is not None
    assert (order.earlier.progress.plan, order.earlier.progress.prepared) == (moved, None)


def test_a_stop_that_was_asked_for_is_asked_again() -> None:
    order = taken_over(ORDER, view(*RUN, events.Requested(request="stop")))
    state, _ = handle(order, Pending(), Start())
    for rank in (0, 2, 3):
        state, _ = handle(order, state, Reclaimed(rank, f"n{rank}", "h", 1))
    assert isinstance(state, Stopping)
