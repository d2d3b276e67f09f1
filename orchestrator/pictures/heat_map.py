"""Freeze ratios as a heat map, stages by microbatches: SVG for pages, text for terminals.

Knows only ratios: no schedule, no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from statistics import mean

Shares = Iterable[tuple[int, int, float]]
"""(stage, microbatch, share in [0, 1]) of every action that can freeze."""

_SHADES = "·░▒▓█"
_NONE, _ALL = (240, 247, 246), (15, 118, 110)
"""Colours of nothing and of everything frozen."""
_STYLE = """
.heat text { font: 11px system-ui, sans-serif; fill: #747d89; text-anchor: middle; }
.heat .left { text-anchor: start; }
.heat .title { font-size: 13px; font-weight: 600; text-anchor: start; }
.heat .weak { fill: #14181d; }
.heat .strong { fill: #ffffff; }
.heat .cell { stroke: #8a93a0; stroke-opacity: 0.3; }
"""
_LEFT, _TOP, _ROW, _MEAN = 62, 52, 26, 58


def heat_map(shares: Shares, width: int = 100) -> str:
    """The ratios as plain text: a line per stage, percent per microbatch, the stage's mean at the end.

    Where percents do not fit into `width` columns, a microbatch is one shade: `·` for none, `█` for all.
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


def heat_map_svg(shares: Shares, title: str = "") -> str:
    """A self-contained SVG: a cell per stage and microbatch with its percent, the stage's mean, a scale."""
    rows = _rows(shares)
    microbatches = 1 + max((microbatch for row in rows.values() for microbatch in row), default=-1)
    cell = 34 if microbatches <= 32 else max(6, 1088 // microbatches)
    width = _LEFT + max(cell * microbatches + _MEAN, 300, 8 * len(title))
    height = _TOP + _ROW * len(rows) + 22
    parts = [
        '<svg class="heat" xmlns="http://www.w3.org/2000/svg" role="img"'
        f' width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escape(title or 'freeze ratios')}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="14">{escape(title)}</text>',
        *_scale(),
    ]
    for number, (stage, row) in enumerate(sorted(rows.items())):
        y = _TOP + number * _ROW
        parts.append(f'<text class="left" x="4" y="{y + 17}">stage {stage}</text>')
        parts += [_cell(stage, m, share, cell, y) for m, share in sorted(row.items())]
        x = _LEFT + cell * microbatches + _MEAN // 2
        parts.append(f'<text x="{x}" y="{y + 17}">{100 * mean(row.values()):.1f} %</text>')
    if rows:
        below = _TOP + _ROW * len(rows) + 14
        every = max(1, -(-28 // cell))
        parts.append(f'<text class="left" x="4" y="{below}">microb.</text>')
        parts += [
            f'<text x="{_LEFT + cell * m + cell / 2:g}" y="{below}">{m}</text>'
            for m in range(0, microbatches, every)
        ]
        parts.append(f'<text x="{_LEFT + cell * microbatches + _MEAN // 2}" y="{below}">mean</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(shares: Shares) -> dict[int, dict[int, float]]:
    rows: dict[int, dict[int, float]] = {}
    for stage, microbatch, share in shares:
        rows.setdefault(stage, {})[microbatch] = share
    return rows


def _percent(share: float | None) -> str:
    return "    " if share is None else f"{100 * share:4.0f}"


def _shade(share: float | None) -> str:
    """`·` and `█` only for none and all, the shades between in thirds."""
    if share is None:
        return " "
    if share <= 0:
        return _SHADES[0]
    return _SHADES[-1] if share >= 1 else _SHADES[1 + min(int(3 * share), 2)]


def _colour(share: float) -> str:
    return "#" + "".join(
        f"{round(none + share * (all_ - none)):02x}" for none, all_ in zip(_NONE, _ALL, strict=True)
    )


def _scale() -> list[str]:
    """What the colours mean, from nothing to everything frozen."""
    parts = [f'<text class="left" x="{_LEFT}" y="36">0 %</text>']
    parts += [
        f'<rect x="{_LEFT + 28 + 14 * step}" y="27" width="14" height="10" fill="{_colour(step / 10)}"/>'
        for step in range(11)
    ]
    parts.append(f'<text class="left" x="{_LEFT + 188}" y="36">100 % frozen</text>')
    return parts


def _cell(stage: int, microbatch: int, share: float, width: int, y: int) -> str:
    x = _LEFT + width * microbatch
    text = ""
    if width >= 26:
        tone = "strong" if share > 0.55 else "weak"
        text = f'<text class="{tone}" x="{x + width / 2:g}" y="{y + 17}">{100 * share:.0f}</text>'
    return (
        f'<rect class="cell" x="{x}" y="{y}" width="{width}" height="{_ROW}" fill="{_colour(share)}">'
        f"<title>stage {stage}, microbatch {microbatch}:"
        f" {100 * share:.1f} % frozen</title></rect>{text}"
    )
