"""The estimate of the time until a job's end, from steps whose times are given."""

from __future__ import annotations

import pytest
from synthetic_run import records

from orchestrator.analysis.remaining_time import RECENT_STEPS, remaining_s, remaining_time
from orchestrator.events.types import Finished, Paused, Record
from orchestrator.history.job_view import fold
from workers.protocol.reports import StepReport


def step(number: int, step_s: float, generation: int = 1) -> StepReport:
    return StepReport(
        generation=generation,
        step=number,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        samples=1,
        tokens=0,
        step_s=step_s,
        bubble=0.0,
        skipped=False,
    )


def test_the_mean_of_recent_steps_goes_on_without_the_first_one_that_warms_caches() -> None:
    assert remaining_s([], 10) is None
    assert remaining_s([step(1, 9.0)], 10) == 81.0
    # Every other step validates.
    steps = [step(1, 9.0), *(step(number, 1.0 + number % 2) for number in range(2, 6))]
    assert remaining_s(steps, 10) == pytest.approx(5 * 1.5)
    assert remaining_s(steps, 5) == 0.0
    assert remaining_s(steps, 3) == 0.0


def test_steps_of_other_ranks_and_of_long_ago_do_not_count() -> None:
    before = [step(number, 4.0) for number in range(1, 50)]
    after = [step(50, 6.0, 2), *(step(number, 2.0, 2) for number in range(51, 61))]
    assert remaining_s([*before, *after], 100) == pytest.approx(40 * 2.0)
    slow = [step(number, 50.0) for number in range(1, 11)]
    fast = [step(number, 1.0) for number in range(11, 12 + RECENT_STEPS)]
    assert remaining_s([*slow, *fast], 200) == pytest.approx(200 - 11 - RECENT_STEPS)


def test_a_job_that_does_not_train_has_no_remaining_time() -> None:
    log = [record for record in records(steps=40) if not isinstance(record.event, Finished)]
    view = fold(log)
    found = remaining_time(view)
    assert found is not None
    assert found == pytest.approx(160 * 0.134, rel=0.1)
    paused = Paused(reason="on request", step=40, requested=True)
    view.fold(Record(time_s=log[-1].time_s + 1, event=paused))
    assert remaining_time(view) is None
    assert remaining_time(fold(records(steps=40))) is None
