"""Metrics of validations over the steps of a run."""

from __future__ import annotations

from orchestrator.history.job_view import JobView


def metric_curves(view: JobView) -> dict[str, dict[int, float]]:
    """Metric -> step -> value, of the validations that have it."""
    curves: dict[str, dict[int, float]] = {}
    for step, report in sorted(view.validations.items()):
        for name, value in report.metrics.items():
            curves.setdefault(name, {})[step] = value
    return curves
