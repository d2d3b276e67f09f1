"""One warning when freezing costs more than it brings, and none when it does not."""

from __future__ import annotations

from orchestrator import events
from orchestrator.freeze_history import FreezeHistory
from orchestrator.freeze_watch import FreezeWatch
from planner.freezing import FreezePlan
from planner.time_to_accuracy import warning
from workers.protocol import FreezeStarted, StepReport

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


def step(number: int, share: float, energy: float = 1.0, *, skipped: bool = False) -> StepReport:
    return StepReport(
        generation=1,
        step=number,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        samples=1,
        tokens=0,
        step_s=1.0,
        bubble=0.0,
        skipped=skipped,
        gradient_energy=energy,
        effective_update=share,
    )


def warnings(watch: FreezeWatch, *log: events.Event) -> list[str]:
    return [warning.text for event in log if (warning := watch.take(event)) is not None]


def test_the_average_counts_by_energy_and_warns_once() -> None:
    watch = FreezeWatch(FreezeHistory())
    begun = (step(10, 0.1), solved(0.75), FreezeStarted(plan=PLAN), step(11, 1.0, energy=2.0))
    assert warnings(watch, *begun) == []
    # (2 * 1.0 + 2 * 0.5) / 4 is kappa itself: as long, not longer.
    assert warnings(watch, step(12, 0.5, energy=2.0)) == []
    told = warnings(watch, step(13, 0.375, energy=4.0), step(14, 0.1))
    # (4 * 0.75 + 4 * 0.375) / 8.
    assert told == [warning(0.75, 0.5625)]


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
