"""A timeline as text for terminals, and the peaks of memory. Knows only spans per rank, the frozen share of
each backward, and the uses of memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from orchestrator.pictures.heat_map import Shares
from orchestrator.pictures.memory_use import USES, by_use, bytes_text
from orchestrator.pictures.spans import (
    COLOURS,
    NAMES,
    DrawnSpan,
    Timeline,
    by_action,
    end_of,
    kinds_of,
    parsed,
    seconds_text,
    share_of,
)
from planner.ir import Action, ActionKind
from planner.simulation.memory import MemoryParts

_CRITICAL = "▔"
_SHADES = "░▒▓"
"""Shades for shares up to a third, up to two thirds, and above."""


def terminal(
    timeline: Timeline,
    width: int,
    end_s: float | None = None,
    markup: bool = True,
    frozen: Shares = (),
    critical: Collection[tuple[int, int]] = (),
) -> str:
    """The timeline in `width` columns: a line per rank, `·` for bubbles, a time axis.

    Each column shows the action that runs at its middle. A box shows its token, or kind and index, or only
    the kind, as space permits; the rest is filled with a shade for its share in `frozen`. A line below a
    rank underlines its actions in `critical`, pairs of a rank and the number of a span. With `markup`, rich's
    markup colours the boxes; otherwise the text is plain.
    """
    shares = by_action(frozen)
    actions = parsed(timeline)
    end_s = end_of(timeline, end_s)
    label = len(f"rank {len(timeline) - 1} ")
    columns = max(width - label, 10)
    lines: list[str] = []
    for rank, spans in enumerate(timeline):
        owners = _owners(spans, columns, end_s)
        line, column = f"rank {rank} ".ljust(label), 0
        while column < columns:
            stop = column + 1
            while stop < columns and owners[stop] == owners[column]:
                stop += 1
            line += _box(actions[rank], owners[column], stop - column, markup, shares)
            column = stop
        lines.append(line)
        marks = "".join(_CRITICAL if (rank, owner) in critical else " " for owner in owners).rstrip()
        if marks:
            lines.append(" " * label + marks)
    lines.append(" " * label + "0" + seconds_text(end_s).rjust(columns - 1))
    return "\n".join(lines)


def legend(timeline: Timeline, markup: bool = True, frozen: bool = False, critical: bool = False) -> str:
    """One line that explains the letters and colours of `terminal`; with `frozen`, its shades too, and with `critical`
    its underlines."""
    return "  ".join(
        [_coloured(f" {kind} ", kind, markup) + f" {NAMES[kind]}" for kind in kinds_of(parsed(timeline))]
        + ["· bubble"]
        + [f"{_SHADES} frozen to one, two, three thirds"] * frozen
        + [f"{_CRITICAL * 3} critical path"] * critical
    )


def memory_peaks(peaks: Sequence[MemoryParts]) -> str:
    """A line per rank: its peak memory and the uses, largest first."""
    label = len(f"rank {len(peaks) - 1} ")
    lines: list[str] = []
    for rank, peak in enumerate(peaks):
        sizes = sorted(zip(by_use(peak), USES, strict=True), key=lambda size: -size[0])
        parts = ", ".join(f"{use.name} {bytes_text(size)}" for size, use in sizes if size)
        lines.append(f"{f'rank {rank}':<{label}}memory peak {bytes_text(peak.total)}: {parts}")
    return "\n".join(lines)


def _owners(spans: Sequence[DrawnSpan], columns: int, end_s: float) -> list[int | None]:
    """Per column, the index of the span that covers its middle; None in a bubble."""
    owners: list[int | None] = [None] * columns
    if not end_s:
        return owners
    number = 0
    for column in range(columns):
        middle = (column + 0.5) * end_s / columns
        while number < len(spans) and spans[number].end_s <= middle:
            number += 1
        if number < len(spans) and spans[number].start_s <= middle:
            owners[column] = number
    return owners


def _box(
    actions: list[Action],
    owner: int | None,
    width: int,
    markup: bool,
    shares: Mapping[tuple[int, int], float],
) -> str:
    if owner is None:
        return "·" * width
    action = actions[owner]
    texts = (str(action), f"{action.kind}{action.index}", str(action.kind))
    text = next((text for text in texts if len(text) < width), str(action.kind))
    share = share_of(shares, action)
    shade = _SHADES[min(int(3 * share), 2)] if share else " "
    return _coloured(text.ljust(width, shade), action.kind, markup)


def _coloured(text: str, kind: ActionKind, markup: bool) -> str:
    return f"[#14181d on {COLOURS[kind]}]{text}[/]" if markup else text
