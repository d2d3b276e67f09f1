"""The report's section on the ranks' speeds: curves, decisions, and what was predicted beside what was measured."""

from __future__ import annotations

from eventful_run import eventful

from orchestrator.events.types import Adapted, Event, Record, SpeedsChanged
from orchestrator.history.job_view import JobView, fold
from orchestrator.report.decision_log import decision_log
from orchestrator.report.page import render
from orchestrator.report.parts import Explained
from orchestrator.report.speeds import speeds

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
        run.take(Record(time_s=run.ended_s + number, event=event))
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
    assert newest[:5] == ("20", Explained("layers move", "it pays"), "3 + 1", "400 ms", "250 ms")
    assert oldest[1] == Explained("the cut stays", "no cut saves 3%")
    # The layers moved after the last step only.
    assert (newest[5], oldest[5] != "–") == ("–", True)
    page = render(run)
    assert "Speeds of the ranks" in page
    assert "it pays" in page


def test_decisions_and_changes_are_in_the_log_of_decisions_and_in_the_notes() -> None:
    run = run_with(KNOWN, STAYS, SLOW, MOVES)
    said = [(entry.what, entry.reason) for entry in decision_log(run)]
    assert ("layers move", "it pays") in said
    assert ("the cut stays", "no cut saves 3%") in said
    notes = [note.text for note in run.notes]
    assert "Rank 1 is 2.27 times slower since step 19 (1.10 -> 2.50)." in notes
    assert not any("speeds are known" in note for note in notes)
