"""What freezing saves step by step: the rows of a synthetic run against the numbers it was made from."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median

import pytest
from synthetic_run import PHASES, STEPS, freezing_records, records

from orchestrator.analysis.freeze_numbers import freeze_numbers
from orchestrator.analysis.freeze_steps import freeze_steps
from orchestrator.analysis.predicted_freezing import predict_freezing
from orchestrator.analysis.predicted_step import predict_newest
from orchestrator.history.job_view import JobView, fold
from planner.freeze.time_to_accuracy import average_effective_update


@pytest.fixture
def run() -> JobView:
    return fold(freezing_records())


def test_every_step_that_follows_the_solution_has_a_row(run: JobView) -> None:
    rows = freeze_steps(run)
    assert [row.step for row in rows] == list(range(PHASES.monitoring + 1, STEPS + 1))
    assert [row.step_s for row in rows] == [run.steps[row.step].step_s for row in rows]
    assert None not in asdict(rows[0]).values()


def test_predicted_times_fall_along_the_ramp_and_are_those_of_the_timeline(run: JobView) -> None:
    rows = {row.step: row for row in freeze_steps(run)}
    freezing, newest = predict_freezing(run), predict_newest(run)
    assert freezing is not None
    assert newest is not None
    ramp = [rows[step].predicted_step_s or 0.0 for step in range(PHASES.monitoring + 1, PHASES.ramp + 1)]
    assert ramp == sorted(ramp, reverse=True)
    assert ramp[0] < freezing.step_s(0.0)
    stable = {rows[step].predicted_step_s for step in range(PHASES.ramp, STEPS + 1)}
    assert stable == {newest.step_s}
    assert rows[STEPS].predicted_kappa == newest.step_s / freezing.step_s(0.0)


def test_kappa_compares_with_the_median_unfrozen_monitored_step(run: JobView) -> None:
    unfrozen = [run.steps[step].step_s for step in range(PHASES.warm_up + 1, PHASES.middle + 1)]
    row = freeze_steps(run)[-1]
    assert row.kappa == row.step_s / median(unfrozen)


def test_the_average_update_and_the_time_to_accuracy_are_those_of_the_steps_so_far(run: JobView) -> None:
    rows = freeze_steps(run)
    for so_far in (1, 2, 25, len(rows)):
        reports = [run.steps[row.step] for row in rows[:so_far] if not run.steps[row.step].skipped]
        average = average_effective_update(
            [report.effective_update for report in reports], [report.gradient_energy for report in reports]
        )
        row = rows[so_far - 1]
        assert row.p_eff == reports[-1].effective_update
        assert row.average_p_eff == pytest.approx(average)
        kappas = [each.kappa or 0.0 for each in rows[:so_far] if not run.steps[each.step].skipped]
        assert row.time_to_accuracy == pytest.approx(median(kappas) / average)


def test_a_skipped_step_keeps_the_average(run: JobView) -> None:
    run.steps[100] = replace(run.steps[100], skipped=True, gradient_energy=float("inf"))
    rows = {row.step: row for row in freeze_steps(run)}
    assert rows[100].average_p_eff == rows[99].average_p_eff > rows[101].average_p_eff


def test_the_spread_of_draws_lengthens_steps_with_freezing_only(run: JobView) -> None:
    assert run.freeze.solved is not None
    steady, unfrozen = freeze_steps(run)[-1], predict_freezing(run)
    run.freeze.solved = replace(run.freeze.solved, spread=1.25)
    spread = freeze_steps(run)[-1]
    assert unfrozen is not None
    assert spread.predicted_step_s == 1.25 * (steady.predicted_step_s or 0.0)
    assert spread.predicted_kappa == 1.25 * (steady.predicted_step_s or 0.0) / unfrozen.step_s(0.0)


def test_steps_save_what_the_monitored_ones_have_shown(run: JobView) -> None:
    assert run.freeze.solved is not None
    whole = freeze_steps(run)[-1].predicted_kappa
    assert whole is not None
    for confirmed in (0.5, 0.0):
        run.freeze.solved = replace(run.freeze.solved, confirmed=confirmed)
        assert freeze_steps(run)[-1].predicted_kappa == pytest.approx(1.0 - confirmed * (1.0 - whole))


def test_a_solution_of_the_profile_or_of_another_cut_predicts_nothing(run: JobView) -> None:
    solved = run.freeze.solved
    assert solved is not None
    other_cut = replace(solved, plan=replace(solved.plan, stages=((0, 1), (1, 10))))
    for gone in (replace(solved, measured_unfrozen_s=None), other_cut, None):
        run.freeze.solved = gone
        row = freeze_steps(run)[-1]
        assert row.predicted_step_s is row.predicted_kappa is None
        assert row.kappa is not None


def test_a_method_without_phases_has_rows_from_its_warm_up_on(run: JobView) -> None:
    run.spec = {**run.spec, "freeze": {"method": "apf", "warm_up": 150}}
    rows, numbers = freeze_steps(run), freeze_numbers(run)
    assert rows[0].step == 151
    assert numbers is not None
    assert rows[-1].average_p_eff == pytest.approx(numbers.p_eff)
    assert rows[-1].time_to_accuracy == pytest.approx(numbers.time_to_accuracy)
    assert rows[-1].predicted_step_s is None


def test_without_freezing_there_are_no_rows(run: JobView) -> None:
    assert freeze_steps(fold(records())) == ()
    run.freeze.start = None
    assert freeze_steps(run) == ()
