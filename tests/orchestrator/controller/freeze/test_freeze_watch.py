"""One warning when freezing costs more than it saves, and none when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from synthetic_run import PHASES, freezing_records
from synthetic_run import plan as pipeline_plan

from orchestrator.analysis.freeze_numbers import FEWEST, freeze_numbers
from orchestrator.controller.freeze.freeze_watch import EVERY, Costly, FreezeWatch, outcome
from orchestrator.events import types as events
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.history.job_view import JobView, fold
from planner.freeze.time_to_accuracy import warning
from planner.freezing import REFERENCE_AT, REFERENCE_EVERY, FreezeOverrides, FreezePlan, Phases
from planner.plan import Plan
from workers.protocol.reports import FreezeStarted, PrefixFrozen, StepReport, SwitchReport

PLAN = FreezePlan(epoch=1, version=1, ratios=((0.5,),), start=11)


def solved(kappa: float) -> events.FreezeSolved:
    return events.FreezeSolved(
        plan=PLAN,
        ratios=((0, 0, 0.5),),
        unfrozen_s=1.0,
        solved_s=kappa,
        all_frozen_s=0.5,
        outside_s=0.0,
        measured_unfrozen_s=1.0,
        measured_all_frozen_s=0.5,
        kappa=kappa,
        mean_per_stage=(0.5,),
        duals=(0.0,),
        critical=(),
        solve_s=0.0,
    )


def submitted(**freeze: object) -> events.Submitted:
    return events.Submitted(job="j", epoch=1, spec={"freeze": freeze}, resume=False)


TIMELY = submitted(method="timelyfreeze", warm_up=2, monitoring=10, ramp=10)
APF = submitted(method="apf", warm_up=10)


def step(
    number: int,
    share: float,
    energy: float = 1.0,
    *,
    step_s: float = 1.0,
    samples: int = 1,
    skipped: bool = False,
) -> StepReport:
    return StepReport(
        generation=1,
        step=number,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        samples=samples,
        tokens=0,
        step_s=step_s,
        bubble=0.0,
        skipped=skipped,
        gradient_energy=energy,
        effective_update=share,
    )


def switched(plan: Plan) -> SwitchReport:
    return SwitchReport(
        step=10,
        rank=0,
        epoch=plan.epoch,
        version=plan.version,
        taken=(),
        given=(),
        brought_bytes=0,
        brought_s=0.0,
        stall_s=0.0,
        switched_s=0.0,
    )


def warnings(watch: FreezeWatch, *log: events.Event) -> list[str]:
    found = [watch.fold(event) for event in log]
    return [
        each.text if isinstance(each, events.Warned) else each.reason for each in found if each is not None
    ]


def test_the_average_counts_by_energy_and_warns_once() -> None:
    watch = FreezeWatch(FreezeHistory())
    begun = (TIMELY, step(10, 0.1), solved(0.75), FreezeStarted(plan=PLAN), step(11, 1.0, energy=2.0))
    assert warnings(watch, *begun) == []
    # (2 * 1.0 + 2 * 0.5) / 4 equals kappa: just as long, not longer.
    assert warnings(watch, step(12, 0.5, energy=2.0)) == []
    told = warnings(watch, step(13, 0.375, energy=4.0), step(14, 0.1))
    # (4 * 0.75 + 4 * 0.375) / 8.
    assert told == [warning(0.75, 0.5625, "timelyfreeze")]


def test_skipped_steps_do_not_count() -> None:
    watch = FreezeWatch(FreezeHistory())
    log = [solved(0.75), FreezeStarted(plan=PLAN), step(11, 0.0, float("nan"), skipped=True), step(12, 0.8)]
    assert warnings(watch, *log) == []


def test_a_resumed_run_knows_what_was_solved() -> None:
    watch = FreezeWatch(FreezeHistory(plans=(PLAN,), solved=solved(0.75)))
    assert warnings(watch, step(10, 0.5)) == []
    assert len(warnings(watch, step(11, 0.5))) == 1


def test_without_a_solution_there_is_nothing_to_hold_against() -> None:
    watch = FreezeWatch(FreezeHistory(plans=(PLAN,)))
    assert warnings(watch, step(11, 0.1)) == []


def test_rounding_is_no_cost_where_nothing_may_be_frozen() -> None:
    """With r_max = 0 rounding puts the draws' spread slightly above 1."""
    watch = FreezeWatch(FreezeHistory())
    log = [TIMELY, solved(1 + 2.3e-16), FreezeStarted(plan=PLAN), *(step(n, 1.0) for n in range(11, 40))]
    assert warnings(watch, *log) == []


def unfrozen() -> list[StepReport]:
    return [step(number, 1.0) for number in range(1, 11)]


def test_without_a_prediction_the_measured_steps_are_held_against_each_other() -> None:
    watch = FreezeWatch(FreezeHistory())
    assert warnings(watch, APF, *unfrozen()) == []
    # Nothing is stable yet, so the time of these steps says nothing about freezing.
    assert warnings(watch, *(step(number, 1.0, step_s=1.1) for number in range(11, 41))) == []
    told = [warnings(watch, step(number, 0.5, step_s=0.75)) for number in range(41, 71)]
    assert told == [*[[]] * (EVERY - 1), [warning(0.75, 0.5, "apf")], *[[]] * (30 - EVERY)]


@pytest.mark.parametrize(("samples", "told"), [(2, False), (1, True)])
def test_steps_with_a_batch_that_grew_are_compared_by_their_samples(samples: int, told: bool) -> None:
    watch = FreezeWatch(FreezeHistory())
    prefix = submitted(method="pipetransformer", warm_up=10)
    grown = [step(number, 0.7, step_s=1.2, samples=samples) for number in range(11, 41)]
    assert warnings(watch, prefix, *unfrozen(), *grown) == (
        [warning(1.2, 0.7, "pipetransformer")] if told else []
    )


def test_where_the_job_leaves_it_to_us_measured_freezing_that_costs_is_to_be_less() -> None:
    """By the steps that run whole and those before each, whatever was predicted and however the machine's pace changes;
    again once less is frozen, by the steps from then on."""

    def steps(first: int, last: int, p_eff: float, kappa: float) -> list[StepReport]:
        whole = [number % REFERENCE_EVERY == REFERENCE_AT for number in range(first, last + 1)]
        return [
            step(number, 1.0 if is_whole else p_eff, step_s=number * (1.0 if is_whole else kappa))
            for number, is_whole in zip(range(first, last + 1), whole, strict=True)
        ]

    watch = FreezeWatch(FreezeHistory())
    auto = submitted(method="timelyfreeze", r_max="auto", warm_up=2, monitoring=10, ramp=10)
    assert warnings(watch, auto, *unfrozen(), solved(0.2), FreezeStarted(plan=PLAN)) == []
    told = {each.step: found for each in steps(11, 150, 0.7, 0.75) if (found := watch.fold(each)) is not None}
    (at, costly), *others = told.items()
    assert at == REFERENCE_AT + (FEWEST + 1) * REFERENCE_EVERY
    assert isinstance(costly, Costly)
    assert costly.reason.startswith("freezing costs more than it brings: a step takes 0.75 of")
    assert costly.progress == pytest.approx(0.7)
    assert others == []
    control = FreezeOverrides(
        method="timelyfreeze",
        r_max="auto",
        least_update=0.85,
        phases=Phases(warm_up=2, monitoring=10, ramp=10),
        since=1,
        solved=True,
    )
    less = FreezeStarted(plan=replace(PLAN, version=2, control=control, start=151))
    assert warnings(watch, less, *steps(151, 400, 0.9, 0.85)) == []
    # Again and again, in case what is then asked for comes to nothing.
    assert len(warnings(watch, *steps(401, 700, 0.1, 0.85))) > 1


@pytest.mark.parametrize(("p_eff", "told"), [(0.95, False), (0.85, True)])
def test_a_program_above_a_prefix_is_held_against_steps_that_freeze_the_prefix_alone(
    p_eff: float, told: bool
) -> None:
    """Of the steps themselves half never reaches the weights, with the program or without."""
    above = {"method": "timelyfreeze+prefix", "prefix": 2, "warm_up": 2, "monitoring": 10, "ramp": 10}
    found = replace(solved(0.9), p_eff=p_eff)
    frozen = [step(number, 0.5 * p_eff) for number in range(11, 30)]
    log = (submitted(**above, r_max=0.5), step(10, 0.5), found, FreezeStarted(plan=PLAN), *frozen)
    assert warnings(FreezeWatch(FreezeHistory()), *log) == (
        [warning(0.9, p_eff, "timelyfreeze+prefix")] if told else []
    )
    # With r_max = auto, by the steps that freeze nothing more.
    whole = [number % REFERENCE_EVERY == REFERENCE_AT for number in range(11, 151)]
    pairs = [
        step(number, 0.5 if is_whole else 0.5 * p_eff, step_s=1.0 if is_whole else 0.9)
        for number, is_whole in zip(range(11, 151), whole, strict=True)
    ]
    automatic = replace(found, progress=p_eff)
    begun = (submitted(**above, r_max="auto"), step(10, 0.5), automatic, FreezeStarted(plan=PLAN))
    assert bool(warnings(FreezeWatch(FreezeHistory()), *begun, *pairs)) == told
    view = fold(events.Record(time_s=0.0, event=event) for event in (*begun, *pairs))
    numbers = freeze_numbers(view)
    assert numbers is not None
    assert numbers.above_prefix
    assert numbers.kappa == pytest.approx(0.9)
    assert numbers.time_to_accuracy == pytest.approx(0.9 / p_eff)
    assert outcome(step(199, 0.5), view) is None
    measured = outcome(step(200, 0.5), view)
    assert measured is not None
    assert measured.p_eff == pytest.approx(0.5 * p_eff)
    assert measured.sentence == (
        "freezing, as measured up to step 200: a step takes 0.90 of its time with the prefix alone (predicted 0.90),"
        f" and {measured.p_eff:.2f} of the gradient's energy reaches the weights; {p_eff:.2f} of its progress is left,"
        " as predicted"
    )


def test_a_prefix_that_grows_has_the_steps_before_it_count_no_more() -> None:
    above = {"method": "timelyfreeze+prefix", "prefix": 2, "warm_up": 2, "monitoring": 10, "ramp": 10}
    watch = FreezeWatch(FreezeHistory())
    found = replace(solved(0.9), p_eff=0.95, progress=0.95)
    log: list[events.Event] = [
        submitted(**above, r_max="auto"),
        step(10, 0.5),
        found,
        FreezeStarted(plan=PLAN),
    ]

    def steps(first: int, last: int, kappa: float) -> list[StepReport]:
        whole = {number for number in range(first, last + 1) if number % REFERENCE_EVERY == REFERENCE_AT}
        return [step(n, 0.5, step_s=1.0 if n in whole else kappa) for n in range(first, last + 1)]

    grown = PrefixFrozen(step=111, layers=4, bound=0.0, norms=(), names=())
    log += [*steps(11, 110, 0.93), grown, replace(found, progress=0.9), *steps(111, 190, 0.85)]
    assert warnings(watch, *log) == [], "0.93 of a step's time was of another prefix"
    view = fold(events.Record(time_s=0.0, event=event) for event in log)
    numbers = freeze_numbers(view)
    assert numbers is None or numbers.kappa is None, "too few steps with this prefix"
    view = fold(events.Record(time_s=0.0, event=event) for event in (*log, *steps(191, 260, 0.85)))
    numbers = freeze_numbers(view)
    assert numbers is not None
    assert numbers.kappa == pytest.approx(0.85)


def test_what_was_measured_is_told_beside_the_prediction_once_there_is_something_to_tell() -> None:
    log: list[events.Event] = [APF, *unfrozen()]
    view = fold(events.Record(time_s=0.0, event=event) for event in log)
    assert outcome(step(100, 1.0), view) is None, "nothing is frozen yet"
    log += [step(number, 0.5, step_s=0.75) for number in range(11, 101)]
    view = fold(events.Record(time_s=0.0, event=event) for event in log)
    measured = outcome(log[-1], view)
    assert measured is not None
    assert measured.sentence == (
        "freezing, as measured up to step 100: a step takes 0.75 of its time without freezing, and 0.50 of the"
        " gradient's energy reaches the weights"
    )
    assert outcome(APF, view) is None
    off = FreezePlan(
        epoch=1, version=2, ratios=((0.0,),), control=FreezeOverrides(method="none", r_max=0.5), start=101
    )
    log += [FreezeStarted(plan=off), *(step(number, 1.0) for number in range(101, 201))]
    view = fold(events.Record(time_s=0.0, event=event) for event in log)
    assert outcome(log[-1], view) is None, "nothing is frozen any more"


def test_a_resumed_run_is_watched_by_the_settings_that_a_request_gave() -> None:
    auto: dict[str, object] = {
        "method": "timelyfreeze",
        "r_max": "auto",
        "warm_up": 2,
        "monitoring": 10,
        "ramp": 10,
    }
    phases = Phases(warm_up=2, monitoring=10, ramp=10)
    for before, r_max, judged in ((auto, 0.3, False), ({**auto, "r_max": 0.3}, "auto", True)):
        control = FreezeOverrides(method="timelyfreeze", r_max=r_max, phases=phases, since=1, solved=True)
        plan = replace(PLAN, control=control, start=20)
        watch = FreezeWatch(FreezeHistory(plans=(PLAN, plan), solved=solved(0.1)))
        log = [
            step(number, 1.0 if number % REFERENCE_EVERY == REFERENCE_AT else 0.97)
            for number in range(20, 200)
        ]
        assert bool(warnings(watch, submitted(**before), *log)) == judged


def test_measured_freezing_that_pays_is_not_warned_of() -> None:
    watch = FreezeWatch(FreezeHistory())
    paying = [step(number, 0.9, step_s=0.75) for number in range(11, 61)]
    assert warnings(watch, APF, *unfrozen(), *paying) == []


@pytest.mark.parametrize(
    ("shrunk", "told"),
    [
        ({"version": 2}, [warning(2.0, 0.9, "apf")]),
        ({"version": 2, "layers": ((0, 5), (5, 10)), "stage_ranks": (0, 1)}, []),
        ({"version": 2, "pipelines": 1}, []),
    ],
    ids=["as before", "fewer stages", "fewer pipelines"],
)
def test_steps_of_a_job_that_shrank_are_not_held_against_those_before(
    shrunk: dict[str, Any], told: list[str]
) -> None:
    watch, before = FreezeWatch(FreezeHistory()), replace(pipeline_plan(), replicas=2)
    after = replace(before, **shrunk)
    slower = [step(number, 0.9, step_s=2.0) for number in range(11, 61)]
    log = [APF, events.Issued(plan=before), switched(before), *unfrozen(), events.Issued(plan=after)]
    assert warnings(watch, *log, switched(after), *slower) == told


def test_steps_between_a_plan_and_the_switch_to_it_are_of_the_plan_before() -> None:
    """A plan that is slower by itself is issued; the ranks train on with the one before, and freezing pays."""
    watch, before = FreezeWatch(FreezeHistory()), pipeline_plan()
    after = replace(before, version=2, layers=((0, 5), (5, 10)), stage_ranks=(0, 1))
    paying = [step(number, 0.5, step_s=0.75) for number in range(11, 51)]
    log = [APF, events.Issued(plan=before), switched(before), *unfrozen(), events.Issued(plan=after)]
    assert warnings(watch, *log, *paying) == [warning(0.75, 0.5, "apf")]


def taken_over(log: Sequence[events.Event], after: Sequence[events.Event]) -> list[str]:
    """What a watch warns of that begins with a view of `log`, and sees `after` itself."""
    view = fold(events.Record(time_s=0.0, event=event) for event in log)
    watch = FreezeWatch(FreezeHistory())
    watch.catch_up(view, 0)
    again = replace(TIMELY, spec=view.spec, epoch=2, takeover=True)
    return warnings(watch, again, *after)


def test_a_controller_that_takes_over_goes_on_from_what_was_watched() -> None:
    begun = [TIMELY, solved(0.75), FreezeStarted(plan=PLAN), *(step(number, 1.0) for number in range(1, 15))]
    costly = [step(number, 0.1) for number in range(15, 40)]
    # Steps 11 to 14 let everything through: the average of all is what counts.
    told = [warning(0.75, (4 * 1.0 + 2 * 0.1) / 6, "timelyfreeze")]
    for seen in range(2):
        assert taken_over([*begun, *costly[:seen]], costly[seen:]) == told
    # The previous controller has given the warning.
    assert taken_over([*begun, *costly[:5]], costly[5:]) == []


def test_a_controller_that_takes_over_knows_the_settings_of_a_request() -> None:
    control = FreezeOverrides(method="apf", r_max=0.8)
    changed = FreezePlan(epoch=1, version=2, ratios=(), control=control, start=11)
    log = [TIMELY, *unfrozen(), FreezeStarted(plan=changed)]
    paying = [step(number, 0.5, step_s=0.75) for number in range(11, 21)]
    assert taken_over([*log, *paying[:4]], paying[4:]) == [warning(0.75, 0.5, "apf")]


def test_a_replayed_run_is_warned_of_as_its_report_says() -> None:
    log = [record for record in freezing_records() if not isinstance(record.event, events.FreezeSolved)]
    (plan,) = (record.event.plan for record in log if isinstance(record.event, FreezeStarted))
    watch, run = FreezeWatch(FreezeHistory(plans=(plan,), replayed=True)), JobView()
    for record in log:
        run.fold(record)
        if (told := watch.fold(record.event)) is not None:
            break
    else:
        raise AssertionError("it was not warned of")
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert max(run.steps) == PHASES.ramp + EVERY
    assert told.text == numbers.warning
