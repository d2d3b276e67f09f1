"""Runs beside each other: whole durations, the settings that differ, validation, and curves over tokens and time."""

from __future__ import annotations

import elastic_run
import eventful_run
import pytest
from synthetic_run import START_S, freezing_records, records

from orchestrator.analysis.job_summary import job_summary
from orchestrator.events.types import Record, Submitted
from orchestrator.history.job_view import JobView, fold
from orchestrator.pictures.charts import Chart
from orchestrator.quantities import seconds
from orchestrator.report.comparison import comparison


def charts(runs: list[tuple[str, JobView]], axis: str) -> dict[str, Chart]:
    return {chart.title: chart for chart in comparison(runs, axis).charts}


def resumed() -> JobView:
    """A run that was resumed an hour after its first start had ended."""
    first = records(steps=40)
    ended_s = first[-1].time_s
    later = [
        Record(time_s=each.time_s + 3600 + ended_s - START_S, event=each.event)
        for each in records(steps=60)[:-1]
        if getattr(each.event, "step", 99) > 40 or not hasattr(each.event, "step")
    ]
    begins = later[0].event
    assert isinstance(begins, Submitted)
    return fold([*first, *later])


def test_a_resumed_run_took_what_all_its_starts_took() -> None:
    view, first = resumed(), fold(records(steps=40))
    newest_s = view.last_s - view.started_s
    assert view.runs == 2
    assert view.duration_s == pytest.approx(first.last_s - first.started_s + newest_s)
    assert view.duration_s < 60
    assert job_summary(view).duration_s == view.duration_s
    assert JobView.from_json(view.to_json()).duration_s == view.duration_s
    numbers = comparison([("a", view), ("b", first)]).numbers
    took = next(row for row in numbers.rows if row[0] == "Took")
    assert str(took[1]).endswith("in 2 starts")
    assert "start" not in str(took[2])


def test_only_the_settings_that_differ_are_listed() -> None:
    plain, frozen = fold(records(steps=5)), fold(freezing_records(steps=5))
    table = comparison([("plain", plain), ("frozen", frozen)]).differences
    assert table is not None
    assert [column.name for column in table.columns] == ["Setting", "plain", "frozen"]
    assert set(table.rows) == {
        ("freeze.method", "–", '"timelyfreeze"'),
        ("freeze.r_max", "–", "0.8"),
        ("freeze.warm_up", "–", "20"),
        ("freeze.monitoring", "–", "30"),
        ("freeze.ramp", "–", "60"),
    }
    plain.spec["job"]["name"] = "another"
    assert comparison([("plain", plain), ("same", fold(records(steps=5)))]).differences is None


def test_curves_over_tokens_and_over_the_time_trained() -> None:
    short, long = fold(records(steps=50)), fold(records(steps=100))
    runs = [("short", short), ("long", long)]
    over_steps = charts(runs, "step")["Validation loss"]
    assert [[step for step, _ in each.points] for each in over_steps.series] == [[25, 50], [25, 50, 75, 100]]
    tokens = charts(runs, "tokens")
    assert {chart.axis for chart in tokens.values()} == {"tokens"}
    each = short.steps[1].tokens
    assert [place for place, _ in tokens["Loss"].series[0].points] == [each * step for step in range(1, 51)]
    assert [place for place, _ in tokens["Validation loss"].series[0].points] == [each * 25, each * 50]
    time = charts(runs, "time")
    assert time["Loss"].axis == "second"
    last_s, _ = time["Loss"].series[1].points[-1]
    assert last_s == pytest.approx(sum(report.step_s for report in long.steps.values()))
    assert [value for _, value in time["Loss"].series[0].points] == [
        value for _, value in charts(runs, "step")["Loss"].series[0].points
    ]


def test_steps_that_a_return_to_a_checkpoint_voided_take_no_place_on_the_axis() -> None:
    view = fold(elastic_run.eventful().records)
    assert any(commit.voided_by is not None for commit in view.recovery.commits)
    (curve,) = charts([("elastic", view)], "time")["Loss"].series
    places = [place for place, _ in curve.points]
    assert places == sorted(places)
    stand_s = sum(commit.step_s for commit in view.recovery.commits if commit.voided_by is None)
    assert places[-1] == pytest.approx(stand_s)


def test_the_measures_of_papers_stand_beside_each_other() -> None:
    """Throughput, metric and time to the target, as in the tables of papers."""
    reached, plain = fold(eventful_run.eventful().records), fold(records(steps=50))
    table = comparison([("reached", reached), ("plain", plain)]).numbers
    rows = {str(figure): cells for figure, *cells in table.rows}
    assert rows["Best validation"][0] == "perplexity 6.6900, step 70"
    assert str(rows["Best validation"][1]).startswith("loss ")
    assert rows["Time to target"][0] == seconds(job_summary(reached).time_to_target_s or 0)
    assert rows["Epochs"][0] == "2.24"
    assert str(rows["Compute"][0]).endswith("FLOP/s")
    assert str(rows["MFU"][0]).endswith(" %")
    assert "–" not in (rows["Samples per hour"][0], rows["Samples per hour"][1])
    for figure in ("Time to target", "Epochs", "Compute", "MFU"):
        assert rows[figure][1] == "–", figure
