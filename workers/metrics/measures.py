"""Measures of models of one kind each: what they say of a sample, and the metrics that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TOP = 5
_LARGEST_EXPONENT = 700.0
"""Largest exponent whose exp is finite, about."""


class OfTokens:
    """Perplexity: exp of the mean cross-entropy over all targets."""

    names = ("perplexity",)
    width = 0

    def of_samples(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """Nothing: the loss tells it."""
        return outputs[0].new_empty((outputs[0].shape[0], 0)).double()

    def values(self, samples: NDArray[Any], loss: float) -> Mapping[str, float]:
        return {"perplexity": math.exp(loss)} if loss < _LARGEST_EXPONENT else {}


class OfNumbers:
    """Pearson's correlation of prediction and target; left out where one of them never varies."""

    names = ("pearson",)
    width = 2

    def of_samples(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """Prediction and target.

        Args:
            outputs: (predictions float[B, 1],).
            targets: (float[B],).
        """
        return torch.stack((outputs[0].squeeze(-1).double(), targets[0].double()), 1)

    def values(self, samples: NDArray[Any], loss: float) -> Mapping[str, float]:
        if not len(samples):
            return {}
        found, asked = (samples - samples.mean(0)).T
        below = math.sqrt(float(found @ found) * float(asked @ asked))
        return {"pearson": float(found @ asked) / below} if below > 0 else {}


class OfClasses:
    """Accuracy, top-5 accuracy of more than five classes, F1 and the Matthews correlation.

    F1 is that of class 1 where there are two classes, else the mean over the classes that occur (macro).
    """

    names = ("accuracy", "top-5", "f1", "matthews")
    width = 4

    def of_samples(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """Predicted class, class, number of classes with more than its logit, number of classes.

        Args:
            outputs: (logits float[B, K],).
            targets: (classes int64[B],).
        """
        logits, classes = outputs[0].float(), targets[0]
        above = (logits > logits.gather(1, classes.clamp(min=0)[:, None])).sum(1)
        known = torch.full_like(classes, logits.shape[1])
        return torch.stack((logits.argmax(1), classes, above, known), 1).double()

    def values(self, samples: NDArray[Any], loss: float) -> Mapping[str, float]:
        samples = samples[samples[:, 1] >= 0]  # the loss leaves the others out
        if not len(samples):
            return {}
        predicted, classes, above, known = samples.astype(np.int64).T
        values = {"accuracy": float((predicted == classes).mean())}
        if known[0] > _TOP:
            values["top-5"] = float((above < _TOP).mean())
        table = np.zeros((known[0], known[0]), dtype=np.int64)
        np.add.at(table, (classes, predicted), 1)
        return values | {"f1": _f1(table), "matthews": _matthews(table)}


def _f1(table: NDArray[np.int64]) -> float:
    """F1 of a table [class, predicted class] of numbers of samples."""
    hits, both = np.diag(table), table.sum(0) + table.sum(1)
    if len(table) == 2:
        return 2.0 * float(hits[1]) / float(both[1]) if both[1] else 0.0
    occurs = both > 0
    return float((2.0 * hits[occurs] / both[occurs]).mean())


def _matthews(table: NDArray[np.int64]) -> float:
    """Correlation of class and predicted class (Gorodkin 2004); 0 where one of them never varies."""
    total, hits = float(table.sum()), float(np.trace(table))
    classes, predicted = table.sum(1).astype(np.float64), table.sum(0).astype(np.float64)
    above = hits * total - float(classes @ predicted)
    below = (total**2 - float(predicted @ predicted)) * (total**2 - float(classes @ classes))
    return above / math.sqrt(below) if below > 0 else 0.0
