"""A rank's memory over a step as a strip of an SVG: what it is used for, stacked. Knows no schedule and no cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from orchestrator.pictures.memory_use import USES, Used, bytes_text

HEIGHT = 36
"""Of a strip, in pixels."""
STYLE = """
.timeline .room { fill: #8a93a0; fill-opacity: 0.1; }
.timeline .peak { font-size: 10px; }
"""


def strip(
    rank: int, levels: Sequence[Used], most: int, end_s: float, *, left: int, top: int, scale: float
) -> list[str]:
    """The strip of a rank, and its peak beside it.

    Args:
        levels: as `memory_use.used` gives them.
        most: bytes that fill the height, the same for all ranks of a picture.
        end_s: where the strip ends.
        left: pixels of time 0.
        top: pixels of the strip's upper edge.
        scale: pixels per second.
    """
    bottom, end = top + HEIGHT, left + end_s * scale
    peak = peak_of(levels)
    parts = [
        f'<text class="peak" x="4" y="{top + HEIGHT // 2 + 4}">{bytes_text(peak)}</text>',
        f'<rect class="room" x="{left}" y="{top}" width="{end - left:g}" height="{HEIGHT}">'
        f"<title>rank {rank}: at most {bytes_text(peak)}</title></rect>",
    ]
    # Each is drawn from the bottom up to its own upper edge, the highest first: the lower ones cover it.
    stacked = [(time_s, list(accumulate(sizes))) for time_s, sizes in levels]
    for number in reversed(range(len(USES))):
        largest = max(sizes[number] for _, sizes in levels)
        if not largest:
            continue
        edge = [(left + time_s * scale, bottom - HEIGHT * sums[number] / most) for time_s, sums in stacked]
        parts.append(
            f'<path class="use" fill="{USES[number].colour}" d="{_outline(edge, end, bottom)}">'
            f"<title>rank {rank}, {USES[number].name}: at most {bytes_text(largest)}</title></path>"
        )
    return parts


def legend(present: Sequence[int], *, left: int, top: int) -> list[str]:
    """What the colours mean.

    Args:
        present: numbers of the `USES` that are drawn.
    """
    parts = [f'<text x="4" y="{top + 10}">memory</text>']
    x = float(left)
    for number in present:
        use = USES[number]
        parts.append(f'<rect fill="{use.colour}" x="{x:.0f}" y="{top}" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="{top + 10}">{use.name}</text>')
        x += 32 + 6.1 * len(use.name)
    return parts


def peak_of(levels: Sequence[Used]) -> int:
    """The most bytes of all uses together."""
    return max(sum(sizes) for _, sizes in levels)


def _outline(edge: Sequence[tuple[float, float]], end: float, bottom: float) -> str:
    """The path below a line of steps, with a corner only where its height changes."""
    x, y = edge[0]
    path = f"M{x:.2f} {bottom}V{y:.2f}"
    for x, following in edge[1:]:
        if following != y:
            path += f"H{x:.2f}V{following:.2f}"
            y = following
    return f"{path}H{end:.2f}V{bottom}Z"
