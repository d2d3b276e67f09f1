"""A histogram of shares as SVG text: how many parameters were frozen how often. Pure: numbers in, markup out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from orchestrator.pictures.axes import Scale, tick_text
from orchestrator.pictures.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH

BINS = 20


def bins(shares: Sequence[float]) -> list[int]:
    """How many of `shares`, each in [0, 1], lie in each of `BINS` equal parts; 1 belongs to the last."""
    counts = [0] * BINS
    for share in shares:
        counts[min(int(share * BINS + 1e-9), BINS - 1)] += 1
    return counts


def histogram(shares: Sequence[float], title: str, unit: str) -> str:
    """One `<svg>` element: a bar for each five percent.

    Args:
        shares: in [0, 1]; not empty.
        unit: what is counted, over the value axis.
    """
    counts = bins(shares)
    x = Scale(0.0, 100.0, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, 1.08 * max(counts), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img"><title>{escape(title)}</title>',
        f"<desc>{escape(_describe(shares, title))}</desc>",
    ]
    for value in (tick for tick in y.ticks(5) if tick == int(tick)):
        parts.append(
            f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text x="{LEFT - 8:g}" y="{y(value):.1f}" dy=".35em" text-anchor="end">{tick_text(value)}</text>'
        )
    width = (x.stop - x.start) / BINS
    for number, count in enumerate(counts):
        if count:
            low, high = 100 * number / BINS, 100 * (number + 1) / BINS
            parts.append(
                f'<rect class="bar" x="{x(low) + 1:.1f}" y="{y(count):.1f}" width="{width - 2:.1f}"'
                f' height="{y.start - y(count):.1f}"><title>{count:,} frozen in {low:g} to {high:g} % of their'
                " backward passes</title></rect>"
            )
    parts += [
        f'<text x="{x(value):.1f}" y="{y.start + 21:g}" text-anchor="middle">{value:g} %</text>'
        for value in x.ticks(5)
    ]
    parts.append(
        f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y.start:g}" y2="{y.start:g}"/>'
        f'<text x="{LEFT:g}" y="14">{escape(unit)}</text></svg>'
    )
    return "".join(parts)


def _describe(shares: Sequence[float], title: str) -> str:
    mean = sum(shares) / len(shares)
    return (
        f"{title}: {len(shares):,} in all, frozen in {100 * min(shares):.1f} to {100 * max(shares):.1f} % of their"
        f" backward passes, {100 * mean:.1f} % on average."
    )
