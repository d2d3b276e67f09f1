"""The schedule tables of PyTorch's pipelining as CSV text: a row per rank, a token or a bubble per cell.

The format has no R and no U. A cell `(0F1;1B0)OVERLAP_F_B` stands for its actions one after the other, as PyTorch's
runtime executes it. The caller reads and writes files; this module sees text only.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass

from planner.ir import Action, ActionKind, Program, Schedule
from planner.schedule.graph import build_graph
from planner.schedule.validate import ScheduleError, validate
from planner.wording import counted

CSV_PREFIX = "csv:"
"""Before the path of a user's own table, where a schedule is named."""
_NOT_IN_FORMAT = (ActionKind.RECOMPUTE, ActionKind.UPDATE)
_COMMUNICATION = re.compile(r"SEND|RECV|SHARD|REDUCE_GRAD")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class _Cell:
    action: Action
    row: int
    column: int


def parse(text: str, name: str, *, ranks: int | None = None, microbatches: int | None = None) -> Schedule:
    """The validated schedule in `text`; the first stages are frozen if they only go forward.

    Args:
        text: the whole file.
        name: of the schedule, for messages and reports, e.g. `csv:my.csv`.
        ranks: how many ranks (rows) it must have, if the caller knows.
        microbatches: how many microbatches it must have, if the caller knows.

    Raises:
        ScheduleError: a cell that is no action, a table that `validate` refuses, or one of another size;
            names row and column, counted from 1.
    """
    rows = [_cells(name, number, row) for number, row in _rows(text, name)]
    cells = [cell for row in rows for cell in row]
    if not cells:
        raise ScheduleError(f"{name}: no actions: expected one row per rank with tokens such as 2F0")
    programs = tuple(tuple(cell.action for cell in row) for row in rows)
    schedule = Schedule(
        name=name,
        stages=max(cell.action.stage for cell in cells) + 1,
        microbatches=max(cell.action.index for cell in cells) + 1,
        programs=programs,
        frozen_stages=frozen_prefix(programs),
    )
    try:
        validate(schedule)
    except ScheduleError as error:
        if error.place is None:
            raise
        cell = rows[error.place[0]][error.place[1]]
        raise ScheduleError(f"row {cell.row}, column {cell.column}: {error}", error.place) from None
    for one, more, has, wanted in (
        ("rank (row)", "ranks (rows)", schedule.ranks, ranks),
        ("microbatch", "microbatches", schedule.microbatches, microbatches),
    ):
        if wanted is not None and has != wanted:
            raise ScheduleError(f"{name}: the table has {counted(has, one, more)}, and the job has {wanted}")
    return schedule


def frozen_prefix(programs: Iterable[Program]) -> int:
    """Number of stages from the input up that have only F; 0 if all have, as a training window goes backward."""
    return min(
        (action.stage for program in programs for action in program if action.kind is not ActionKind.FORWARD),
        default=0,
    )


def dump(schedule: Schedule) -> str:
    """`schedule` as CSV text that `parse` and PyTorch's `_load_csv` read; its R and U are left out.

    Every action takes one column, and stands in a later one than its input, as in PyTorch's own tables.
    """
    programs = tuple(
        tuple(action for action in program if action.kind not in _NOT_IN_FORMAT)
        for program in schedule.programs
    )
    graph = build_graph(
        Schedule(schedule.name, schedule.stages, schedule.microbatches, programs, schedule.frozen_stages)
    )
    column = [0] * len(graph.order)
    for node in graph.order:
        before = [earlier for earlier in graph.predecessors[node] if earlier != graph.source]
        column[node] = max((column[earlier] + 1 for earlier in before), default=0)
    table = [[""] * column[graph.sink] for _ in programs]
    for node, action in enumerate(graph.actions):
        table[graph.ranks[node]][column[node]] = str(action)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    return out.getvalue()


def _rows(text: str, name: str) -> list[tuple[int, list[str]]]:
    """(row number from 1, cells) of every row, without blank lines at the end."""
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff").rstrip()), strict=True)
    try:
        return list(enumerate(reader, start=1))
    except csv.Error as error:
        raise ScheduleError(f"{name}: line {reader.line_num} is not CSV: {error}") from None


def _cells(name: str, number: int, row: list[str]) -> list[_Cell]:
    cells = [
        _Cell(_action(name, number, column, token), number, column)
        for column, cell in enumerate(row, start=1)
        if cell.strip()
        for token in _tokens(cell)
    ]
    if not cells:
        raise ScheduleError(
            f"{name}: row {number} has no action: its rank has nothing to do. Every row is the program of one rank,"
            " which holds a stage: remove the row and use one rank fewer"
        )
    return cells


def _tokens(cell: str) -> list[str]:
    """One token per action, in the order of execution."""
    overlapped = _OVERLAPPED.fullmatch(cell.strip())
    return [cell] if overlapped is None else overlapped[1].split(";")


def _action(name: str, row: int, column: int, token: str) -> Action:
    place = f"{name}: row {row}, column {column}"
    if _COMMUNICATION.search(token):
        raise ScheduleError(
            f"{place}: {token.strip()!r} is communication or bookkeeping, which follows from the actions:"
            " save the table with format='compute_only'"
        )
    try:
        action = Action.parse(token)
    except ValueError as error:
        raise ScheduleError(f"{place}: {error}") from None
    if action.kind in _NOT_IN_FORMAT:
        raise ScheduleError(
            f"{place}: {action} has kind {action.kind}, which this format does not know: it has F, B, I and W"
        )
    return action
