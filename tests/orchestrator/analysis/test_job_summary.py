"""A job in a few numbers: which losses it keeps, and what a job that does not train lacks."""

from __future__ import annotations

import pytest
from synthetic_run import records

from orchestrator.analysis.job_summary import SPARKS, job_summary
from orchestrator.events.types import Finished, Paused, Record
from orchestrator.history.job_view import fold


@pytest.mark.parametrize("steps", [1, 2, SPARKS - 1, SPARKS, SPARKS + 1, 150, 6_000])
def test_the_first_loss_stays_the_first_one_however_long_a_job_trains(steps: int) -> None:
    log = records(steps=steps)
    first = fold(log[:8]).steps[1].loss
    view = fold(log)
    losses = job_summary(view).losses
    assert (losses[0], losses[-1]) == (first, view.steps[steps].loss)
    assert len(losses) == min(SPARKS, steps)


def test_a_job_that_does_not_train_has_no_throughput_and_no_remaining_time() -> None:
    log = [record for record in records(steps=40) if not isinstance(record.event, Finished)]
    view = fold(log)
    trains = job_summary(view)
    assert trains.tokens_per_s is not None
    assert trains.remaining_s is not None
    assert job_summary(view, lost=True).remaining_s is None
    for requested in (True, False):
        paused = Paused(reason="", step=40, requested=requested)
        view.fold(Record(time_s=log[-1].time_s + 1, event=paused))
        found = job_summary(view)
        assert (found.tokens_per_s, found.remaining_s) == (None, None)
        assert found.step_s == trains.step_s
    # One that has ended shows how fast it was.
    assert job_summary(fold(records(steps=40))).tokens_per_s == trains.tokens_per_s
