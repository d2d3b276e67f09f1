"""The sweep of freezing settings as one self-contained page: a chart of throughput and loss, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from orchestrator.pictures.charts import Chart, Series
from orchestrator.quantities import percent
from orchestrator.report.assets import render_page
from orchestrator.report.parts import Column, Table

COLOURS = {
    "none": "#7b8794",
    "timelyfreeze": "#12867b",
    "timelyfreeze+apf": "#b88700",
    "timelyfreeze+autofreeze": "#3b7be0",
    "apf": "#c2570c",
    "autofreeze": "#8b5cf6",
}
"""Colours that are legible on light and dark pages."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One setting of one method."""

    method: str
    control: str
    """The setting as text for people."""
    relative_throughput: float
    """Throughput of steps that froze as much, each over its neighbours in the same run that froze nothing."""
    validation_loss: float
    freeze_ratio: float
    """Frozen share of weight-gradient time."""
    p_eff: float


def write_page(path: Path, outcomes: Sequence[Outcome], *, steps: int, job: str) -> None:
    """Write the page about `outcomes`, which are ordered by method."""
    facts = {
        "title": "Freezing: throughput and loss",
        "heading": "Freezing: throughput against validation loss",
        "text": (
            f"{job}; {steps:,} steps each. Throughput compares steps with full freezing with steps without, which take"
            " turns in a run of their own; right and down is better."
        ),
        "charts": [scatter(outcomes)],
        "table": table(outcomes),
    }
    path.write_text(render_page("chart_page.html.j2", facts, charts=True), encoding="utf-8")


def scatter(outcomes: Sequence[Outcome]) -> Chart:
    """A chart with a labelled point for each outcome and a line through each method's points."""
    throughputs = [each.relative_throughput for each in outcomes]
    low, high = min(throughputs), max(throughputs)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return Chart(
        title="Throughput against validation loss",
        unit="validation loss",
        series=tuple(
            _series(method, list(group)) for method, group in groupby(outcomes, lambda each: each.method)
        ),
        format=lambda loss: f"{loss:.4f}",
        axis="throughput over no freezing",
        axis_range=(low - room, high + 3 * room),
        height=460,
        description=(
            f"Validation loss of {len(outcomes)} settings over their throughput, {low:.3f} to {high:.3f} of that"
            " without freezing; the table below has each."
        ),
    )


def _series(method: str, outcomes: list[Outcome]) -> Series:
    ordered = sorted(outcomes, key=lambda each: each.relative_throughput)
    return Series(
        name=method,
        points=tuple((each.relative_throughput, each.validation_loss) for each in ordered),
        dots=True,
        labels=tuple(f"{method} {each.control}".strip() for each in ordered),
        colour=COLOURS[method],
    )


def table(outcomes: Sequence[Outcome]) -> Table:
    """A table with one row per outcome."""
    return Table(
        label="Settings",
        columns=(
            Column("Method"),
            Column("Control"),
            Column("Throughput", "number"),
            Column("Validation loss", "number"),
            Column("Frozen", "number"),
            Column("p_eff", "number"),
        ),
        rows=tuple(
            (
                each.method,
                each.control,
                f"{each.relative_throughput:.3f}",
                f"{each.validation_loss:.4f}",
                percent(each.freeze_ratio),
                f"{each.p_eff:.3f}",
            )
            for each in outcomes
        ),
    )
