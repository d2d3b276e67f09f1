"""The metrics by name, which way is better, and the value of one at which a job is done: `accuracy >= 0.97`. Pure; no
torch here, so that any process can check a spec."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

METRICS: Mapping[str, Literal["higher", "lower"]] = {
    "loss": "lower",
    "accuracy": "higher",
    "top-5": "higher",
    "f1": "higher",
    "exact-match": "higher",
    "matthews": "higher",
    "pearson": "higher",
    "perplexity": "lower",
}
"""Metric -> which of two values is the better one."""


def better(metric: str, one: float, other: float | None) -> bool:
    """Whether `one` is a better value of `metric` than `other`; None: there is no other."""
    if other is None:
        return math.isfinite(one)
    return one > other if METRICS[metric] == "higher" else one < other


_FORM = re.compile(r"\s*([a-z0-9-]+)\s*(>=|<=)\s*(\S+)\s*")


@dataclass(frozen=True)
class Target:
    """A bound that a metric is to reach, in the direction in which it gets better."""

    metric: str
    value: float

    def met(self, values: Mapping[str, float]) -> bool:
        """Whether a validation with these metrics, loss included, reaches it; one without the metric does not."""
        value = values.get(self.metric)
        if value is None:
            return False
        return value >= self.value if METRICS[self.metric] == "higher" else value <= self.value

    def told(self, values: Mapping[str, float]) -> str:
        """The metric with its value, as in `accuracy 0.9712`."""
        return f"{self.metric} {values[self.metric]:.4g}"


def parse_target(text: str) -> Target:
    """The target that `text` spells.

    Raises:
        ValueError: it is none, and why.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError("should be a metric, >= or <=, and a number, such as accuracy >= 0.97")
    metric, sign, number = found.groups()
    if metric not in METRICS:
        raise ValueError(f"should begin with one of {', '.join(METRICS)}")
    if (sign == ">=") != (METRICS[metric] == "higher"):
        raise ValueError(f"should bound {metric} from the other side: {METRICS[metric]} is better")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"should end with a number, not {number}")
    return Target(metric, value)
