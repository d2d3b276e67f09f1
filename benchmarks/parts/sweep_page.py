"""The sweep of freezing controls as one self-contained page: a scatter of throughput and loss, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from orchestrator.pictures.axes import Scale, tick_text
from orchestrator.quantities import percent
from orchestrator.report.style import STYLE

WIDTH, HEIGHT = 900.0, 460.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 230.0, 30.0, 46.0
LETTER, LINE = 7.0, 16.0
"""Width of a letter and height of a line of the labels."""
COLOURS = {
    "none": "#52606d",
    "timelyfreeze": "#0f766e",
    "timelyfreeze+apf": "#d39b00",
    "timelyfreeze+autofreeze": "#1d5fd1",
    "apf": "#c2570c",
    "autofreeze": "#7c3aed",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One setting of one method."""

    method: str
    control: str
    """The setting, for people."""
    relative_throughput: float
    """Of steps that froze as much, each over its neighbours of the same run that froze nothing."""
    validation_loss: float
    freeze_ratio: float
    """Share of weight-gradient time."""
    p_eff: float


def write_page(path: Path, outcomes: Sequence[Outcome], *, steps: int, job: str) -> None:
    """Write the page about `outcomes`, ordered by method."""
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Freezing: throughput and loss</title><style>{STYLE}</style></head><body><main>"
        "<h1>Freezing: throughput against validation loss</h1>"
        f'<p class="lede">{escape(job)}; {steps:,} steps each. Throughput is that of steps with full freezing over'
        " that of steps without, which take turns in a run of their own; right and down is better.</p>"
        f'<div class="card scroll picture after">{scatter(outcomes)}</div>{_table(outcomes)}</main></body></html>\n',
        encoding="utf-8",
    )


def scatter(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as one `<svg>`: a point each with its control, a line through each method's."""
    x = _scale([each.relative_throughput for each in outcomes], LEFT, WIDTH - RIGHT)
    y = _scale([each.validation_loss for each in outcomes], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">'
        "<title>Throughput against validation loss</title>"
    ]
    for value in y.ticks(6):
        parts.append(
            f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text x="{LEFT - 8:g}" y="{y(value):.1f}" dy=".35em" text-anchor="end">{tick_text(value)}</text>'
        )
    for value in x.ticks(8):
        parts.append(
            f'<line class="tick" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{y.start:g}" y2="{y.start + 5:g}"/>'
            f'<text x="{x(value):.1f}" y="{y.start + 20:g}" text-anchor="middle">{tick_text(value)}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y.start:g}" y2="{y.start:g}"/>'
        f'<text x="{LEFT:g}" y="16">validation loss</text>'
        f'<text x="{WIDTH - RIGHT:g}" y="{HEIGHT - 6:g}" text-anchor="end">throughput over no freezing</text>'
    )
    taken: list[tuple[float, float, float]] = []
    for method, group in groupby(outcomes, key=lambda each: each.method):
        points = [(x(each.relative_throughput), y(each.validation_loss), each) for each in group]
        colour = COLOURS[method]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in points)
        parts.append(f'<polyline points="{line}" stroke="{colour}" stroke-opacity="0.4"/>')
        for a, b, each in points:
            told = escape(f"{method} {each.control}".strip())
            parts.append(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="5" fill="{colour}"><title>{told}: throughput'
                f" {each.relative_throughput:.3f}, validation loss {each.validation_loss:.4f}</title></circle>"
                f'<text x="{a + 8:.1f}" y="{_free_line(taken, a, b, len(told)):.1f}">{told}</text>'
            )
    parts.append("</svg>")
    return "".join(parts)


def _free_line(taken: list[tuple[float, float, float]], x: float, y: float, letters: int) -> float:
    """A height near the point (x, y) at which a label beside it covers none of those `taken` (left, right, height)."""
    left, right = x, x + 8 + LETTER * letters

    def free(height: float) -> bool:
        return all(
            right < other_left or other_right < left or abs(height - other) >= LINE
            for other_left, other_right, other in taken
        )

    tries = [y - 6 + side * LINE * step for step in range(len(taken) + 1) for side in (1, -1)]
    height = next((height for height in tries if free(height)), tries[0])
    taken.append((left, right, height))
    return height


def _scale(values: Sequence[float], start: float, stop: float) -> Scale:
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - room, high + room, start, stop)


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.method)}</td><td>{escape(each.control)}</td>"
        f'<td class="number">{each.relative_throughput:.3f}</td>'
        f'<td class="number">{each.validation_loss:.4f}</td><td class="number">{percent(each.freeze_ratio)}</td>'
        f'<td class="number">{each.p_eff:.3f}</td></tr>'
        for each in outcomes
    )
    heads = ("Throughput", "Validation loss", "Frozen", "p_eff")
    return (
        '<div class="card scroll after"><table><thead><tr><th>Method</th><th>Control</th>'
        + "".join(f'<th class="number">{head}</th>' for head in heads)
        + f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )
