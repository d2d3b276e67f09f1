"""Page of a sweep: a chart of what each setting gains in speed and what that costs, and a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.pictures.charts import Chart, Series
from orchestrator.report.assets import render_page
from orchestrator.sweep.outcomes import SettingOutcome, SweptJob, by_setting, table

COLOURS = {
    "none": "#7b8794",
    "timelyfreeze": "#12867b",
    "timelyfreeze+apf": "#b88700",
    "timelyfreeze+autofreeze": "#3b7be0",
    "apf": "#c2570c",
    "autofreeze": "#8b5cf6",
    "pipetransformer": "#c026d3",
    "timelyfreeze+pipetransformer": "#0369a1",
    "prefix": "#4d7c0f",
    "timelyfreeze+prefix": "#78716c",
    "auto": "#be123c",
}
"""Colours of freeze methods, legible on light and dark pages."""


def page_of(title: str, text: str, outcomes: Sequence[SweptJob]) -> str:
    """The page, as HTML."""
    chart = scatter(by_setting(outcomes))
    facts = {
        "title": title,
        "heading": title,
        "text": text,
        "charts": [] if chart is None else [chart],
        "table": table(outcomes),
    }
    return render_page("chart_page.html.j2", facts, charts=chart is not None)


def scatter(settings: Sequence[SettingOutcome]) -> Chart | None:
    """The validation loss of each setting over its speed relative to the settings that freeze nothing, a series per
    freeze method; None where fewer than two settings have both."""
    drawn = [each for each in settings if each.over_none is not None and each.loss is not None]
    if len(drawn) < 2:
        return None
    speeds = [each.over_none or 0.0 for each in drawn]
    low, high = min(speeds), max(speeds)
    room = 0.08 * (high - low) or 0.05 * high
    methods = dict.fromkeys(each.frozen_by for each in drawn)
    return Chart(
        title="Speed against validation loss",
        unit="validation loss",
        series=tuple(
            _series(method, [each for each in drawn if each.frozen_by == method]) for method in methods
        ),
        format=lambda loss: f"{loss:.4f}",
        axis="speed over freezing nothing",
        axis_range=(low - room, high + 3 * room),
        height=460,
        description=(
            f"Validation loss of {len(drawn)} settings over their speed, {low:.3f} to {high:.3f} of that without"
            " freezing; the table below has each."
        ),
    )


def _series(method: str, settings: Sequence[SettingOutcome]) -> Series:
    ordered = sorted(settings, key=lambda each: each.over_none or 0.0)
    return Series(
        name=method,
        points=tuple((each.over_none or 0.0, each.loss or 0.0) for each in ordered),
        dots=True,
        labels=tuple(", ".join(each.values) for each in ordered),
        colour=COLOURS.get(method, COLOURS["none"]),
    )
