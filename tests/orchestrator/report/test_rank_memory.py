"""Each rank's memory: predicted for the plan, and what the rank measured beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from made_profile import made_profile
from report_page import Page
from synthetic_run import RANKS, plan, records

from orchestrator.events.types import Issued, Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.report.page import render
from orchestrator.report.run.rank_memory import rank_memory
from planner.profile import Profile
from workers.protocol.reports import SwitchReport, TimelineReport

LIMIT = 12_000_000
MB = 10**6


def profile(kind: str) -> Profile:
    made = made_profile([f"layer{number}" for number in range(10)], [100_000] * 10, RANKS, memory_bytes=LIMIT)
    devices = tuple(replace(device, kind=kind) for device in made.cluster.devices)
    return replace(made, cluster=replace(made.cluster, devices=devices))


def run_with(taken: Mapping[int, int]) -> JobView:
    """A run whose ranks measured their memory in its newest step."""
    log = records(steps=40)
    reports = [
        TimelineReport(step=41, rank=rank, step_s=0.1, spans=(), memory_bytes=count)
        for rank, count in taken.items()
    ]
    return fold([*log, *(Record(time_s=log[-1].time_s, event=report) for report in reports)])


def test_a_gpu_s_measured_peak_is_compared_with_the_limit() -> None:
    part = rank_memory(run_with({0: 6 * MB, 1: 13 * MB, 2: 3 * MB}), profile("cuda"))
    assert part is not None
    assert "the peak of the tensors as measured" in part.how
    first, second, _, fourth = part.ranks
    assert first.words.startswith("6.00 MB measured, ")
    assert first.words.endswith(" predicted, of 12.0 MB: 50.0 %")
    assert [rank.fits for rank in part.ranks] == [True, False, True, True]
    assert (first.process, second.measured_bytes) == ("", 13 * MB)
    assert (fourth.measured_bytes, fourth.peak_bytes) == (None, fourth.predicted_bytes)


def test_the_page_has_one_figure_for_the_peak_which_is_that_of_its_fullest_rank() -> None:
    run = run_with({1: 13 * MB})
    issued = replace(plan(), version=2, predicted_step_s=0.1, predicted_peak_memory_bytes=99 * MB)
    run.fold(Record(time_s=run.last_s, event=Issued(plan=issued)))
    for kind, detail in (("cuda", "measured, of the fullest rank: rank 1"), ("cpu", "predicted, of the")):
        part = rank_memory(run, profile(kind))
        assert part is not None
        (peak,) = part.tiles
        fullest = max(part.ranks, key=lambda rank: rank.peak_bytes)
        assert fullest.words.startswith(f"{peak.number} {peak.unit} ")
        assert peak.detail.startswith(detail)
        text = render(run, profile(kind))
        assert text.count("Peak memory</dt>") == 1
        assert "99.0 MB" not in text


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
def test_a_host_s_process_stands_beside_the_prediction_and_is_not_compared(kind: str) -> None:
    part = rank_memory(run_with(dict.fromkeys(range(RANKS), 400 * MB)), profile(kind))
    assert part is not None
    assert "only whole processes are measured" in part.how
    assert all(rank.fits for rank in part.ranks)
    assert {rank.measured_bytes for rank in part.ranks} == {None}
    assert {rank.process for rank in part.ranks} == {"its process holds 400 MB"}


def test_what_was_measured_with_another_partition_does_not_count() -> None:
    view = run_with({0: 6 * MB})
    moved = replace(plan(), version=2, layers=((0, 4), (4, 5), (5, 7), (7, 10)))
    view.fold(Record(time_s=view.last_s, event=Issued(plan=moved)))
    switched = SwitchReport(
        step=41,
        rank=0,
        epoch=moved.epoch,
        version=2,
        taken=(3,),
        given=(),
        brought_bytes=0,
        brought_s=0.0,
        stall_s=0.0,
        switched_s=0.0,
    )
    view.fold(Record(time_s=view.last_s, event=switched))
    part = rank_memory(view, profile("cuda"))
    assert part is not None
    assert {rank.measured_bytes for rank in part.ranks} == {None}
    assert "measured" not in part.how


def test_the_report_shows_it_too() -> None:
    page = Page(render(run_with({0: 6 * MB}), profile("cuda")))
    assert page.all("meter")[0]["value"] == str(6 * MB)
    assert "6.00 MB measured" in page.text
    assert rank_memory(run_with({}), None) is None
