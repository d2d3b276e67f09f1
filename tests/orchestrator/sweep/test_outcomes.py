"""What the CSV and the page of a sweep say of its jobs."""

import csv
import io

import pytest

from orchestrator.report.parts import Pill
from orchestrator.sweep.grid import Cell
from orchestrator.sweep.outcomes import SweptJob, by_setting, csv_text, outcome_of, table
from orchestrator.sweep.page import scatter


def summary(
    step_s: float, loss: float, accuracy: float, method: str = "none", tokens: float = 40.0
) -> dict[str, object]:
    freeze = {"method": method, "average_freeze_ratio": 0.25, "kappa": 0.5, "p_eff": "Infinity"}
    return {
        "tokens_per_s": tokens / step_s,
        "step_time_s": step_s,
        "validation_loss": loss,
        "metrics": {"accuracy": accuracy},
        "time_to_target_s": None,
        **({} if method == "none" else {"freeze": freeze}),
    }


def cell(method: str, seed: int) -> Cell:
    return Cell(settings=(("freeze.method", method),), seed=seed)


OUTCOMES = [
    outcome_of(cell("none", 0), summary(0.4, 2.0, 0.5), "none"),
    outcome_of(cell("none", 1), summary(0.4, 2.5, 0.75), "none"),
    outcome_of(cell("apf", 0), summary(0.2, 3.0, 0.25, "apf"), "apf"),
    SweptJob(cell=cell("apf", 1), error="no plan: too large"),
]


def test_the_csv_has_a_row_for_each_job() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(OUTCOMES))))
    assert [row["freeze.method"] for row in rows] == ["none", "none", "apf", "apf"]
    assert [row["job.seed"] for row in rows] == ["0", "1", "0", "1"]
    assert [row["accuracy"] for row in rows] == ["0.5", "0.75", "0.25", ""]
    assert rows[2]["kappa"] == "0.5"
    assert rows[2]["p_eff"] == "inf"
    assert [row["error"] for row in rows] == ["", "", "", "no plan: too large"]


def test_the_table_has_a_row_for_each_setting_with_means_spreads_and_the_gain_over_none() -> None:
    made = table(OUTCOMES)
    names = [column.name for column in made.columns]
    none, apf = (dict(zip(names, row, strict=True)) for row in made.rows)
    assert none["Validation loss"] == "2.2500 (2.0000 to 2.5000)"
    assert none["accuracy"] == "0.625 (0.500 to 0.750)"
    assert none["Over none"] == "1.00"
    assert none["Jobs"] == Pill("done", "good")
    assert apf["Over none"] == "2.00"
    assert apf["Validation loss"] == "3.0000"
    assert apf["p_eff"] == "–"
    assert apf["Jobs"] == Pill("1 not done: no plan: too large", "bad")
    assert "Time to target" not in names


def test_without_a_job_that_freezes_nothing_there_is_no_gain() -> None:
    assert "Over none" not in [column.name for column in table(OUTCOMES[2:3]).columns]
    assert "Over none" not in [column.name for column in table(OUTCOMES[:2]).columns]


def test_settings_are_compared_with_those_that_freeze_nothing_and_are_else_the_same() -> None:
    def job(schedule: str, method: str, step_s: float) -> SweptJob:
        settings = (("pipeline.schedule", schedule), ("freeze.method", method))
        return outcome_of(Cell(settings=settings), summary(step_s, 2.0, 0.5, method), method)

    times = {("gpipe", "none"): 0.8, ("gpipe", "apf"): 0.4, ("1f1b", "none"): 0.3, ("1f1b", "apf"): 0.2}
    jobs = [job(*setting, step_s) for setting, step_s in times.items()]
    found = {each.values: each.over_none for each in by_setting([*jobs, job("zbv", "apf", 0.1)])}
    assert found == {
        ("gpipe", "none"): 1.0,
        ("gpipe", "apf"): 2.0,
        ("1f1b", "none"): 1.0,
        ("1f1b", "apf"): pytest.approx(1.5),
        ("zbv", "apf"): None,
    }


def test_steps_that_take_more_samples_are_faster_by_these() -> None:
    free = outcome_of(cell("none", 0), summary(0.4, 2.0, 0.5), "none")
    grown = outcome_of(
        cell("pipetransformer", 0), summary(0.5, 2.0, 0.5, "pipetransformer", 80.0), "pipetransformer"
    )
    assert [each.over_none for each in by_setting([free, grown])] == [1.0, pytest.approx(1.6)]


def test_a_job_that_turned_its_freezing_off_is_none_to_compare_with() -> None:
    cells = [Cell(settings=(("freeze.r_max", r_max),)) for r_max in ("0", "auto")]
    asked = zip(cells, (0.4, 0.5), ("none", "timelyfreeze"), strict=True)
    jobs = [outcome_of(of, summary(step_s, 2.0, 0.5), method) for of, step_s, method in asked]
    assert [(each.frozen_by, each.over_none) for each in by_setting(jobs)] == [
        ("none", 1.0),
        ("timelyfreeze", pytest.approx(0.8)),
    ]


def test_the_chart_has_a_point_for_each_setting_with_a_speed_and_a_loss() -> None:
    chart = scatter(by_setting(OUTCOMES))
    assert chart is not None
    assert [(each.name, each.points, each.labels) for each in chart.series] == [
        ("none", ((1.0, 2.25),), ("none",)),
        ("apf", ((2.0, 3.0),), ("apf",)),
    ]
    assert len({each.colour for each in chart.series}) == 2
    assert scatter(by_setting(OUTCOMES[:2])) is None
    assert scatter(by_setting(OUTCOMES[2:])) is None, "there is nothing to compare with"
