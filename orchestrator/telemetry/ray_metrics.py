"""Metrics in Ray's own Prometheus endpoint, under their names with `ray_` before them. Used in an actor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ray.util.metrics import Counter, Gauge

from orchestrator.telemetry.metrics import METRICS
from orchestrator.telemetry.samples import MetricSample

Series = tuple[str, tuple[str, ...]]
"""Name of a metric, and the values of its labels."""


class RayMetrics:
    """The metrics of one job. Calls may come from any one thread at a time."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._gauges = {
            metric.name: Gauge(metric.name, metric.help, ("job", *metric.labels))
            for metric in METRICS
            if metric.kind == "gauge"
        }
        self._counters = {
            metric.name: Counter(metric.name, metric.help, ("job", *metric.labels))
            for metric in METRICS
            if metric.kind == "counter"
        }
        self._counted: dict[Series, float] = {}
        self._set: dict[Series, dict[str, str]] = {}

    def record(self, samples: Sequence[MetricSample]) -> None:
        """Pass on the job's newest values."""
        gone = dict(self._set)
        for sample in samples:
            metric, series = sample.metric, (sample.metric.name, sample.labels)
            tags = {"job": self._job, **dict(zip(metric.labels, sample.labels, strict=True))}
            if metric.kind == "gauge":
                self._gauges[metric.name].set(sample.value, tags)
                self._set[series] = tags
                gone.pop(series, None)
            elif sample.value > (counted := self._counted.get(series, -1.0)):
                # Not `inc`, which takes no 0: alerts look for increases, so a counter is there before it counts.
                self._counters[metric.name]._record(sample.value - max(0.0, counted), tags)
                self._counted[series] = sample.value
        for series, tags in gone.items():
            # Ray would show the last value for ever; it drops a series whose value is no number.
            self._gauges[series[0]].set(math.nan, tags)
            del self._set[series]
