"""A sample assembled from the ranks' parts, and what a report shows of it."""

from __future__ import annotations

from dataclasses import replace

from synthetic_run import RANKS, records

from orchestrator.events.types import Formed, Issued, Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.report.page import render
from planner.search.convergence import CurvatureSample
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import CurvatureReport


def part(step: int, rank: int) -> CurvatureReport:
    """A quarter of a sample with L = 3 and xi^2 = 4."""
    return CurvatureReport(
        step=step, rank=rank, gradient_change_sq=2.25, weight_change_sq=0.25, gradient_sq=1.0
    )


def take(run: JobView, *events: object) -> None:
    for event in events:
        run.fold(Record(time_s=run.last_s + 1, event=event))  # pyright: ignore


def test_a_sample_is_there_once_all_ranks_were_heard() -> None:
    run = fold(records(steps=40)[:-1])
    take(run, *(part(3, rank) for rank in range(RANKS - 1)), part(5, 2))
    assert not run.curvature.samples
    assert run.curvature.estimates() is None
    take(run, part(3, RANKS - 1))
    assert run.curvature.samples == {3: CurvatureSample(gradient_change=3.0, weight_change=1.0, gradient=2.0)}


def test_siblings_that_share_out_states_all_have_a_part() -> None:
    run = fold(records(steps=40)[:-1])
    assert run.plan is not None
    twice = replace(run.plan, replicas=2)
    take(run, Issued(plan=twice), *(part(3, rank) for rank in range(RANKS)))
    assert list(run.curvature.samples) == [3], "siblings with all states would say the same"
    take(run, Issued(plan=replace(twice, shard="optimizer")))
    take(run, *(part(5, rank) for rank in range(2 * RANKS - 1)))
    assert list(run.curvature.samples) == [3]
    take(run, part(5, 2 * RANKS - 1))
    assert run.curvature.samples[5] == CurvatureSample(
        gradient_change=18.0**0.5, weight_change=2.0**0.5, gradient=8.0**0.5
    )


def test_a_resume_voids_what_is_run_again() -> None:
    run = fold(records(steps=40)[:-1])
    take(run, *(part(step, rank) for step in (3, 5, 7) for rank in range(RANKS)), part(9, 0))
    generation = Generation(
        number=2, epoch=2, members=(0, 1, 2, 3), store_host="10.0.0.4", store_port=29500, timeout_s=300.0
    )
    take(run, Formed(generation=generation, start=CheckpointRef(path="c", step=5), step=5))
    take(run, *(part(9, rank) for rank in range(1, RANKS)))
    assert list(run.curvature.samples) == [3, 5]


def test_the_report_shows_the_estimates_and_what_they_rest_on() -> None:
    run = fold(records(steps=40))
    assert "Smoothness" not in render(run)
    take(run, *(part(step, rank) for step in (3, 5) for rank in range(RANKS)))
    page = render(run)
    assert '<dt>Smoothness L</dt><dd class="figure">3.00</dd>' in page
    assert '<dt>Second moment ξ²</dt><dd class="figure">4.00</dd>' in page
    assert page.count("DynPipe, from 2 samples of the running job") == 2
