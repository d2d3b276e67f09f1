"""Metrics are those of scikit-learn and scipy, and say which values reach a target."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, top_k_accuracy_score

from workers.metrics.answers import OfAnswers
from workers.metrics.measure import Measure
from workers.metrics.measures import OfClasses, OfNumbers, OfTokens
from workers.models.loss import IGNORED
from workers.protocol.target import METRICS, Target, better, parse_target

MEASURES: tuple[Measure, ...] = (OfClasses(), OfNumbers(), OfTokens(), OfAnswers([]))


def measured(measure: Measure, outputs: torch.Tensor, targets: torch.Tensor, loss: float = 1.0) -> Any:
    """The metrics of all samples, told by microbatches of three."""
    parts = [
        measure.of_samples((outputs[start : start + 3],), (targets[start : start + 3],))
        for start in range(0, len(outputs), 3)
    ]
    return measure.values(torch.cat(parts).numpy(), loss)


@pytest.mark.parametrize("classes", [2, 3, 11])
@pytest.mark.parametrize("seed", range(5))
def test_classes(classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(61, classes, generator=generator)
    targets = torch.randint(0, classes, (61,), generator=generator)
    logits[torch.arange(0, 61, 2), targets[::2]] += 1.5
    found, predicted = measured(OfClasses(), logits, targets), logits.argmax(1).numpy()
    truth = targets.numpy()
    assert found["accuracy"] == accuracy_score(truth, predicted)
    kind = "binary" if classes == 2 else "macro"
    assert found["f1"] == pytest.approx(f1_score(truth, predicted, average=kind), abs=1e-12)
    assert found["matthews"] == pytest.approx(matthews_corrcoef(truth, predicted), abs=1e-12)
    assert ("top-5" in found) == (classes > 5)
    if classes > 5:
        assert found["top-5"] == top_k_accuracy_score(truth, logits.numpy(), k=5, labels=np.arange(classes))


def test_a_model_that_says_one_class_correlates_with_nothing() -> None:
    found = measured(OfClasses(), torch.tensor([[1.0, 0.0]] * 6), torch.tensor([0, 1, 0, 0, 1, 0]))
    assert found == {"accuracy": 4 / 6, "f1": 0.0, "matthews": 0.0}


def test_classes_that_never_occur_are_left_out_of_the_mean() -> None:
    logits, targets = torch.eye(4)[[0, 1, 1, 0]], torch.tensor([0, 1, 0, 0])
    found = measured(OfClasses(), logits, targets)
    assert found["f1"] == pytest.approx(f1_score(targets, logits.argmax(1), average="macro"))


def test_what_the_loss_leaves_out_is_left_out() -> None:
    logits, targets = torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, IGNORED, 1, 0])
    assert measured(OfClasses(), logits, targets)["accuracy"] == 2 / 3
    assert measured(OfClasses(), logits, torch.full((4,), IGNORED)) == {}


def test_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    asked = torch.randn(40, generator=generator)
    given = (0.5 * asked + torch.randn(40, generator=generator))[:, None]
    found = measured(OfNumbers(), given, asked)
    assert found["pearson"] == pytest.approx(pearsonr(given[:, 0], asked).statistic, abs=1e-6)
    assert measured(OfNumbers(), torch.ones(4, 1), asked[:4]) == {}


def test_tokens() -> None:
    assert OfTokens().values(np.zeros((3, 0)), 2.0) == {"perplexity": math.exp(2.0)}
    assert OfTokens().values(np.zeros((3, 0)), 1e6) == {}
    assert OfTokens().values(np.zeros((3, 0)), math.nan) == {}
    assert OfTokens().of_samples((torch.zeros(5, 2, 3),), ()).shape == (5, 0)


def test_every_metric_of_a_measure_has_a_direction() -> None:
    assert {name for measure in MEASURES for name in measure.names} == METRICS.keys() - {"loss"}


@pytest.mark.parametrize(
    ("text", "values", "met"),
    [
        ("accuracy >= 0.97", {"accuracy": 0.97}, True),
        ("accuracy>=0.97", {"accuracy": 0.969}, False),
        ("loss <= 1.2", {"loss": 1.1, "accuracy": 0.0}, True),
        (" perplexity  <=  12 ", {"loss": 1.0}, False),
        ("top-5 >= 1e-1", {"top-5": 0.1}, True),
        ("loss <= 1", {"loss": math.nan}, False),
    ],
)
def test_a_target(text: str, values: dict[str, float], met: bool) -> None:
    assert parse_target(text).met(values) is met


def test_a_target_is_the_metric_and_its_bound() -> None:
    assert parse_target("f1 >= 0.5") == Target("f1", 0.5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("accuracy", "should be a metric, >= or <=, and a number"),
        ("accuracy > 0.9", "should be a metric"),
        ("acuracy >= 0.9", "should begin with one of loss, accuracy, top-5"),
        ("accuracy <= 0.9", "should bound accuracy from the other side: higher is better"),
        ("loss >= 0.9", "should bound loss from the other side: lower is better"),
        ("loss <= much", "should end with a number, not much"),
        ("loss <= nan", "should end with a number, not nan"),
    ],
)
def test_what_is_no_target_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_target(text)


def test_which_value_is_better() -> None:
    assert better("accuracy", 0.6, 0.5)
    assert not better("accuracy", 0.5, 0.5)
    assert better("loss", 0.4, 0.5)
    assert better("loss", 0.4, None)
    assert not better("loss", math.nan, None)
    assert not better("loss", math.nan, 0.5)
