"""A schedule as a text table, one row per rank, with places marked. For error messages; knows no rules."""

from __future__ import annotations

from collections.abc import Collection

from planner.ir import Schedule
from planner.wording import counted

Place = tuple[int, int]
"""(rank, position in the rank's program)."""

ROWS_AROUND = 8
COLUMNS_AROUND = 7


def marked_table(schedule: Schedule, faults: Collection[Place] = (), related: Collection[Place] = ()) -> str:
    """The table of `schedule`, with `>2F0<` at the faults and `(2F0)` at the related actions.

    A large table shows only the rows and columns around the marks; the header gives the positions.
    """
    marks = {**dict.fromkeys(related, "()"), **dict.fromkeys(faults, "><")}
    rows = _around([rank for rank, _ in marks], schedule.ranks, ROWS_AROUND)
    longest = max((len(program) for program in schedule.programs), default=0)
    columns = _around([position for _, position in marks], longest, COLUMNS_AROUND)
    table = [["position", *map(str, columns)]]
    for rank in rows:
        program = schedule.programs[rank]
        cells = [
            str(program[position]).join(marks.get((rank, position), ("", "")))
            for position in columns
            if position < len(program)
        ]
        table.append([f"rank {rank}", *cells])
    widths = [
        max(len(row[column]) for row in table if column < len(row)) for column in range(len(columns) + 1)
    ]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in table
    ]
    if len(columns) < longest or len(rows) < schedule.ranks:
        lines.append(f"(part of {counted(schedule.ranks, 'rank')} and {counted(longest, 'position')})")
    return "\n".join(lines)


def _around(marked: list[int], length: int, margin: int) -> range:
    """The indices from `margin` before the first mark to `margin` after the last, within [0, length)."""
    first = max(min(marked, default=0) - margin, 0)
    last = min(max(marked, default=0) + margin, length - 1)
    return range(first, last + 1)
