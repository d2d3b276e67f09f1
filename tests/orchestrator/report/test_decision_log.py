"""The decision log: plans, regroupings and freeze decisions in one list, newest first, each with its reason."""

from __future__ import annotations

from dataclasses import replace

from eventful_run import eventful
from synthetic_run import FREEZE_PLAN, PHASES, START_S, freezing_records, solved

from orchestrator.events.types import Commanded, Event, FreezeChanged, Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.report.run.decision_log import decision_log
from planner.freezing import FreezeOverrides, FreezePlan
from workers.protocol.reports import FreezeStarted

BY = "control from 127.0.0.1"
OFF = FreezePlan(epoch=1, version=2, ratios=(), control=FreezeOverrides(method="none", r_max=0.8))
AGAIN = replace(
    FREEZE_PLAN, version=3, start=None, control=FreezeOverrides(method="timelyfreeze", r_max=0.5, solved=True)
)


def take(run: JobView, *logged: Event) -> None:
    for event in logged:
        run.fold(Record(time_s=run.last_s + 1, event=event))


def changed(plan: FreezePlan, id: str) -> tuple[Event, ...]:
    """A request that led to `plan`."""
    control = plan.control
    assert control is not None
    settings = {"method": control.method, "r_max": control.r_max}
    return (
        Commanded(id=id, name="freeze", arguments=settings, by=BY),
        FreezeChanged(from_step=1, **settings, by=BY, plan=plan, id=id),
    )


def test_a_solution_of_the_freeze_program_stands_between_the_plans_and_regroupings() -> None:
    log = decision_log(fold(eventful().records))
    assert [entry.what for entry in log] == [
        "plan 1.2",
        "regrouped (loss), generation 2",
        "freeze ratios 1.1",
        "plan 1.1",
    ]
    assert [entry.step for entry in log] == [60, 50, PHASES.monitoring, 0]
    freezing = log[2]
    assert freezing.reason == "the freeze program was solved"
    assert freezing.numbers == (
        "expected compute per step: 132 ms -> 100 ms (88.0 ms with everything frozen)"
    )
    assert log[1].time_s > freezing.time_s > log[3].time_s >= START_S


def test_changed_settings_are_there_once_the_ranks_follow_them_with_who_asked_for_them() -> None:
    run = fold(freezing_records())
    before = [entry.what for entry in decision_log(run)]
    take(run, *changed(OFF, "off"))
    assert [entry.what for entry in decision_log(run)] == before
    take(run, FreezeStarted(plan=replace(OFF, start=201)), *changed(AGAIN, "again"))
    take(run, replace(solved(), plan=AGAIN, solved_s=0.12, measured_unfrozen_s=None))
    take(run, FreezeStarted(plan=replace(AGAIN, start=211)))
    newest, off, first, *_ = decision_log(run)
    assert [(each.what, each.step) for each in (off, newest)] == [
        ("freeze settings 1.2", 200),
        ("freeze ratios 1.3", 210),
    ]
    assert (off.reason, off.numbers) == (f"{BY} turned freezing off", "")
    assert newest.reason == (
        f"{BY} set the freeze method to timelyfreeze with r_max = 0.5; the freeze program was solved"
    )
    assert newest.numbers.startswith("expected compute per step: 132 ms -> 120 ms (88.0 ms with")
    assert newest.numbers.endswith(", by the profile's times")
    assert (first.what, first.numbers) == ("freeze ratios 1.1", ""), (
        "only the newest solution's times are kept"
    )


def test_what_the_job_itself_changed_is_told_with_why() -> None:
    run = fold(freezing_records())
    costly = FreezeChanged(from_step=1, method="none", r_max=0.8, by="auto", plan=OFF, reason="it costs")
    take(run, costly, FreezeStarted(plan=replace(OFF, start=201)))
    assert decision_log(run)[0].reason == "the job turned freezing off: it costs"
    take(run, *changed(AGAIN, "again"), FreezeStarted(plan=replace(AGAIN, start=211)))
    assert decision_log(run)[0].reason.startswith(f"{BY} set the freeze method")
    chose = FreezeOverrides(method="prefix", r_max="auto", prefix=2, chosen=True)
    take(run, FreezeStarted(plan=replace(OFF, version=4, control=chose, start=221)))
    assert (
        decision_log(run)[0].reason
        == "the job set the freeze method to prefix of 2 layers: it chooses its method"
    )
