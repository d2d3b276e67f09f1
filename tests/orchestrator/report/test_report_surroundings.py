"""The report's section on what surrounded the ranks."""

from __future__ import annotations

from orchestrator.events.types import Event, Record, Sampled, Surroundings
from orchestrator.history.adapt_record import KEPT
from orchestrator.history.job_view import JobView
from orchestrator.report.page import render
from orchestrator.report.run.surroundings import surroundings


def run_with(*events: Event) -> JobView:
    run = JobView()
    for event in events:
        run.fold(Record(time_s=1.0, event=event))
    return run


def sampled(step: int, *slowdowns: float, free: float | None = None) -> Sampled:
    values = () if free is None else (("memory_free", free),)
    return Sampled(
        step=step,
        ranks=tuple(
            Surroundings(rank=rank, slowdown=slowdown, values=values if rank == 0 else ())
            for rank, slowdown in enumerate(slowdowns)
        ),
    )


def test_a_job_that_samples_nothing_has_no_section() -> None:
    assert surroundings(run_with()) is None


def test_the_worst_and_the_median_rank_are_drawn_where_something_is_known() -> None:
    run = run_with(sampled(3, 1.0, 2.0, 1.5), sampled(9, 1.0, 1.0, 1.0, free=0.25))
    part = surroundings(run)
    assert part is not None
    slowdown, free = part.charts
    assert [series.points for series in slowdown.series] == [((3, 2.0), (9, 1.0)), ((3, 1.5), (9, 1.0))]
    assert (free.title, free.unit) == ("Free memory", "share")
    assert [series.points for series in free.series] == [((9, 0.25),), ((9, 0.25),)]
    assert "Surroundings of the ranks" in render(run)


def test_the_series_stays_bounded_and_steps_that_come_again_replace_theirs() -> None:
    run = run_with(*(sampled(step, 1.0) for step in range(1, 3 * KEPT)))
    steps = [each.step for each in run.adapt.samples]
    assert len(steps) <= KEPT + 1
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 3 * KEPT - 1)
    run.fold(Record(time_s=2.0, event=sampled(100, 5.0)))
    assert run.adapt.samples[-1].step == 100
