"""The report's section on the ranks' speeds: curves, decisions, and what was predicted beside what was measured."""

from __future__ import annotations

from dataclasses import replace

from eventful_run import eventful

from orchestrator.events.rehearsed import Disturbed, DisturbedSteps
from orchestrator.events.types import Adapted, Event, LinksTimed, Record, SpeedsChanged
from orchestrator.history.job_view import JobView, fold
from orchestrator.report.page import render
from orchestrator.report.parts import Explained
from orchestrator.report.run.decision_log import decision_log
from orchestrator.report.run.speeds import speeds
from planner.simulation.slow_links import SlowLink

KNOWN = SpeedsChanged(step=4, slowdowns=((0, 1.0), (1, 1.1)), changes=(), lasting_steps=200, since=4)
SLOW = SpeedsChanged(
    step=20,
    slowdowns=((0, 1.0), (1, 2.5)),
    changes=("rank 1 is 2.27 times slower since step 19 (1.10 -> 2.50)",),
    lasting_steps=200,
    since=19,
)
STAYS = Adapted(
    step=5, moves=False, reason="no cut saves 3%", now_s=0.2, then_s=0.2, cost_s=0.1, layers=(2, 2)
)
MOVES = Adapted(step=20, moves=True, reason="it pays", now_s=0.4, then_s=0.25, cost_s=0.1, layers=(3, 1))


def run_with(*logged: Event) -> JobView:
    run = fold(eventful().records)
    for number, event in enumerate(logged):
        run.fold(Record(time_s=run.last_s + number, event=event))
    return run


def test_a_job_that_measures_no_speeds_has_no_section() -> None:
    assert speeds(run_with()) is None
    assert "Speeds of the ranks" not in render(run_with())


def test_curves_hold_each_slowdown_until_the_next_one() -> None:
    part = speeds(run := run_with(KNOWN, SLOW))
    assert part is not None
    assert part.decisions is None
    slowest, typical = part.chart.series
    assert slowest.points == ((4, 1.1), (20, 2.5), (run.step, 2.5))
    assert typical.points == ((4, 1.05), (20, 1.75), (run.step, 1.75))
    assert all(series.stepped for series in part.chart.series)


def test_decisions_stand_with_predicted_and_measured_times_newest_first() -> None:
    run = run_with(KNOWN, STAYS, SLOW, MOVES)
    part = speeds(run)
    assert part is not None
    assert part.decisions is not None
    newest, oldest = part.decisions.rows
    assert newest[:4] == ("20", Explained("the plan changes", "it pays"), "3 + 1", "3: place 1 → 0")
    assert newest[4:6] == ("400 ms", "250 ms")
    assert oldest[1] == Explained("the cut stays", "no cut saves 3%")
    # The layers moved after the last step only.
    assert (newest[6], oldest[6] != "–") == ("–", True)
    page = render(run)
    assert "Speeds of the ranks" in page
    assert "it pays" in page


def test_slow_links_are_listed_until_they_are_fast_again() -> None:
    slow = SlowLink(source=0, target=1, latency_s=0.0012, bytes_per_s=1.234e9)
    part = speeds(run := run_with(KNOWN, LinksTimed(step=9, links=(slow,))))
    assert part is not None
    assert part.links is not None
    assert part.links.rows == (("0", "1", "1,234 MB/s", "1.20 ms"),)
    assert "1,234 MB/s" in render(run)
    part = speeds(run_with(KNOWN, LinksTimed(step=9, links=(slow,)), LinksTimed(step=12, links=())))
    assert part is not None
    assert part.links is None


def test_decisions_in_a_row_that_keep_the_cut_are_one_row() -> None:
    later = replace(STAYS, step=9, now_s=0.3)
    run = run_with(KNOWN, STAYS, later, MOVES, replace(STAYS, step=30))
    part = speeds(run)
    assert part is not None
    assert part.decisions is not None
    last, _, first = part.decisions.rows
    assert first[0] == "5–9"
    assert first[1] == Explained("the cut stays, 2 times", "no cut saves 3%")
    assert first[3:5] == ("–", "300 ms")
    assert last[0] == "30"


def test_the_steps_that_a_neighbour_disturbed_are_bands() -> None:
    visits = (DisturbedSteps(first=10, last=20), DisturbedSteps(first=30, last=40))
    run = run_with(KNOWN, SLOW, Disturbed(by="a neighbour", rank=1, visits=visits))
    part = speeds(run)
    assert part is not None
    assert [(band.first, band.last) for band in part.chart.bands] == [(10, 20), (30, 40)]
    assert part.chart.data["bands"] == [[10, 20, 0], [30, 40, 0]]
    assert "neighbour 10–20, 30–40" in render(run)


def test_decisions_and_changes_are_in_the_log_of_decisions_and_in_the_notes() -> None:
    run = run_with(KNOWN, STAYS, SLOW, MOVES)
    said = [(entry.what, entry.reason) for entry in decision_log(run)]
    assert ("the plan changes", "it pays") in said
    assert ("the cut stays", "no cut saves 3%") in said
    notes = [note.text for note in run.notes]
    assert "Rank 1 is 2.27 times slower since step 19 (1.10 -> 2.50)." in notes
    assert not any("speeds are known" in note for note in notes)


def test_a_rank_that_became_faster_is_no_reason_to_warn() -> None:
    faster = replace(SLOW, changes=("rank 1 is 2.27 times faster since step 19 (2.50 -> 1.10)",))
    levels = {note.text: note.level for note in run_with(SLOW, faster).notes}
    assert levels["Rank 1 is 2.27 times slower since step 19 (1.10 -> 2.50)."] == "warning"
    assert levels["Rank 1 is 2.27 times faster since step 19 (2.50 -> 1.10)."] == "note"
