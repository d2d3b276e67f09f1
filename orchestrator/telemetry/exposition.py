"""The metrics of jobs in Prometheus's text format, for a `/metrics` route."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.history.job_view import JobView
from orchestrator.telemetry.metrics import METRICS
from orchestrator.telemetry.samples import MetricSample, samples

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of a route that answers with `exposition`."""


def exposition(views: Iterable[JobView]) -> str:
    """The metrics of all `views`; of two views of one job name, those of the later."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Jobs({view.job: samples(view) for view in views}))
    return generate_latest(registry).decode()


class _Jobs(Collector):
    def __init__(self, by_job: dict[str, list[MetricSample]]) -> None:
        self._by_job = by_job

    def collect(self) -> Iterator[Metric]:
        for metric in METRICS:
            family = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}[metric.kind](
                metric.name, metric.help, labels=("job", *metric.labels)
            )
            for job, found in self._by_job.items():
                for sample in found:
                    if sample.metric is metric:
                        family.add_metric((job, *sample.labels), sample.value)
            if family.samples:
                yield family
