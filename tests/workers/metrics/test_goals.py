"""Goals of a job follow from its past validations alone."""

from __future__ import annotations

import math

import pytest

from workers.protocol.goals import (
    KEPT,
    Goals,
    PastValidation,
    best_validation,
    told_together,
    with_next,
)


def past(*values: float, metric: str = "loss") -> list[PastValidation]:
    """One validation every ten steps."""
    return [PastValidation(step=10 * n, values={metric: value}) for n, value in enumerate(values, 1)]


def goals(patience: int | None = 2, **given: str) -> Goals:
    return Goals.of(stop_at=given.get("stop_at"), patience=patience, keep_best=given.get("keep_best"))


def test_the_metric_that_is_watched() -> None:
    assert goals().watched == "loss"
    assert goals(stop_at="f1 >= 0.5").watched == "f1"
    assert goals(stop_at="f1 >= 0.5", keep_best="accuracy").watched == "accuracy"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((2.0, 1.0, 1.5), ""),
        ((2.0, 1.0, 1.5, 1.0), "no better than loss 1 of step 20 in 2 validations"),
        ((2.0, 1.0, 1.5, 0.9), ""),
        ((2.0, 1.0, 1.5, 1.4, 0.9), ""),
        ((math.nan, math.inf), "no finite loss in 2 validations"),
        ((math.nan, 3.0, math.nan), ""),
        ((1.0, math.nan, math.nan), "no better than loss 1 of step 10 in 2 validations"),
    ],
)
def test_patience_ends_after_as_many_validations_that_are_no_better(
    values: tuple[float, ...], said: str
) -> None:
    told = past(*values)
    assert goals().plateau(told, told[-1].step) == said
    assert goals(patience=None).plateau(told, told[-1].step) == ""
    assert goals().plateau(told, told[-1].step + 1) == "", "no validation after that step"


def test_a_metric_that_gets_higher_is_better() -> None:
    told = past(0.5, 0.7, 0.6, 0.65, metric="accuracy")
    best = best_validation(told, "accuracy")
    assert best is not None
    assert best.step == 20
    assert goals(keep_best="accuracy").plateau(told, 40) == (
        "no better than accuracy 0.7 of step 20 in 2 validations"
    )
    assert best_validation(told, "f1") is None


def test_a_target_is_reached_by_the_validation_of_that_step_alone() -> None:
    told = past(0.5, 0.98, 0.6, metric="accuracy")
    asked = goals(stop_at="accuracy >= 0.97")
    assert [asked.reached(told, step) for step in (10, 20, 25, 30)] == ["", "accuracy 0.98", "", ""]


def test_what_a_job_remembers_is_bounded_and_holds_the_best() -> None:
    told: tuple[PastValidation, ...] = ()
    for each in past(5.0, 1.0, *(2.0 + n for n in range(2 * KEPT))):
        told = with_next(told, each, "loss")
    assert len(told) == KEPT + 1
    assert told[0].step == 20
    assert told[-1].step == 10 * (2 * KEPT + 2)
    assert goals(patience=KEPT).plateau(told, told[-1].step) == (
        f"no better than loss 1 of step 20 in {KEPT:,} validations"
    )


def test_ranks_put_together_what_each_knows_up_to_their_step() -> None:
    first, second, third = past(3.0, 2.0, 1.0)
    assert told_together([(second, third), (), (first, second)], 20) == (first, second)
