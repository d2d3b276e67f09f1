"""Freeze ratios as a heat map, stages by microbatches: cells for pages, text for terminals.

Knows only ratios: no schedule, no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

Shares = Iterable[tuple[int, int, float]]
"""(stage, microbatch, share in [0, 1]) of every action that can freeze."""

_SHADES = "·░▒▓█"
MOST_WRITTEN = 32
"""Most microbatches with which each cell of a page shows its percentage."""


@dataclass(frozen=True)
class HeatCell:
    """One action of a stage."""

    microbatch: int
    share: float

    @property
    def percent(self) -> str:
        """The percentage as text, e.g. `75`."""
        return f"{100 * self.share:.0f}"

    @property
    def level(self) -> int:
        """Number of its colour, from 0 for nothing to 10 for everything."""
        return round(10 * self.share)


@dataclass(frozen=True)
class HeatMap:
    """A page's heat map: a row per stage, each with its cells (None: no such action) and their mean."""

    title: str
    microbatches: int
    rows: tuple[tuple[int, tuple[HeatCell | None, ...], float], ...]

    @property
    def written(self) -> bool:
        """Whether cells have room for their percentages."""
        return self.microbatches <= MOST_WRITTEN


def heat_map_of(shares: Shares, title: str) -> HeatMap:
    """The ratios for a page; `templates/heat_map.html.j2` draws it."""
    rows = _rows(shares)
    microbatches = 1 + max((microbatch for row in rows.values() for microbatch in row), default=-1)
    return HeatMap(
        title,
        microbatches,
        tuple(
            (
                stage,
                tuple(HeatCell(m, row[m]) if m in row else None for m in range(microbatches)),
                mean(row.values()),
            )
            for stage, row in sorted(rows.items())
        ),
    )


def heat_map(shares: Shares, width: int = 100) -> str:
    """The ratios as plain text: a line per stage, with a percentage per microbatch and the stage's mean at
    the end.

    If the percentages do not fit into `width` columns, each microbatch is one shade: `·` for none, `█` for
    all.
    """
    rows = _rows(shares)
    if not rows:
        return ""
    microbatches = 1 + max(microbatch for row in rows.values() for microbatch in row)
    label = len(f"stage {max(rows)}")
    numbers = label + 4 * microbatches + 8 <= width
    head = "".join(f"{m:>4}" for m in range(microbatches)) if numbers else f" 0 to {microbatches - 1}"
    columns = 4 * microbatches if numbers else max(microbatches + 1, len(head))
    lines = [" " * label + head.ljust(columns) + "    mean"]
    for stage, row in sorted(rows.items()):
        cells = (row.get(microbatch) for microbatch in range(microbatches))
        text = "".join(_percent(share) if numbers else _shade(share) for share in cells)
        text = text if numbers else " " + text
        lines.append(f"{f'stage {stage}':<{label}}{text.ljust(columns)} {100 * mean(row.values()):>5.1f} %")
    if not numbers:
        lines.append(f"{_SHADES[0]} nothing frozen, {_SHADES[-1]} everything")
    return "\n".join(lines)


def _rows(shares: Shares) -> dict[int, dict[int, float]]:
    rows: dict[int, dict[int, float]] = {}
    for stage, microbatch, share in shares:
        rows.setdefault(stage, {})[microbatch] = share
    return rows


def _percent(share: float | None) -> str:
    return "    " if share is None else f"{100 * share:4.0f}"


def _shade(share: float | None) -> str:
    """`·` for none, `█` for all, and a shade for each third in between."""
    if share is None:
        return " "
    if share <= 0:
        return _SHADES[0]
    return _SHADES[-1] if share >= 1 else _SHADES[1 + min(int(3 * share), 2)]
