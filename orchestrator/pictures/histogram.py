"""A histogram of shares as a chart: how many parameters were frozen how often."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.pictures.charts import Chart, Series

BINS = 20


def bins(shares: Sequence[float]) -> list[int]:
    """Number of `shares`, each in [0, 1], in each of `BINS` equal bins; 1 belongs to the last bin."""
    counts = [0] * BINS
    for share in shares:
        counts[min(int(share * BINS + 1e-9), BINS - 1)] += 1
    return counts


def histogram(shares: Sequence[float], title: str, unit: str) -> Chart:
    """A chart with one bar per five percent.

    Args:
        shares: in [0, 1]; not empty.
        unit: the unit of the counts.
    """
    width = 100 / BINS
    points = tuple(((number + 0.5) * width, float(count)) for number, count in enumerate(bins(shares)))
    mean = sum(shares) / len(shares)
    return Chart(
        title=title,
        unit=unit,
        series=(Series(name=unit, points=points),),
        format=lambda count: f"{count:,.0f}",
        kind="bars",
        from_zero=True,
        axis="% of its backward passes",
        axis_range=(0.0, 100.0),
        description=(
            f"{title}: {len(shares):,} in all, frozen in {100 * min(shares):.1f} to {100 * max(shares):.1f} % of"
            f" their backward passes, {100 * mean:.1f} % on average."
        ),
    )
