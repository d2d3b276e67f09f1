"""Validity of schedules: `validate` refuses invalid ones and shows the place. Knows no family and no cost.

A valid schedule ends on every rank and computes every gradient exactly once. In a synchronous window it adds
gradients and updates buffers in the same order for every family.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

import numpy as np

from planner.ir import FREEZABLE, Action, ActionKind, Schedule
from planner.schedule.action_arrays import NONE, NUMBER_OF, ActionArrays, Integers
from planner.schedule.graph import awaited
from planner.wording import counted

Place = tuple[int, int]
"""(rank, position in the rank's program)."""

ROWS_AROUND = 8
COLUMNS_AROUND = 7

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)


class ScheduleError(ValueError):
    """A schedule that may not run. The message names the place and shows the table around it."""

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message)
        self.place = place
        """(rank, position) of the action at fault, where there is one."""


def validate(schedule: Schedule) -> None:
    """Accept `schedule`, or raise an error that shows the fault.

    Raises:
        ScheduleError: an unknown, doubled or missing action; an index or a stage out of range; a stage on
            two ranks; an action that comes before what it needs of its own stage; a backward in the frozen
            prefix; B beside I or W; microbatches out of ascending order or a U in a synchronous window;
            ranks that wait for each other in a cycle.
    """
    if _plainly_valid(schedule):
        return
    _check_sizes(schedule)
    places = _check_actions(schedule)
    _check_needs(schedule, places)
    _check_complete(schedule, places)
    if schedule.synchronous:
        _check_microbatch_order(schedule)
    _check_deadlock(schedule, places)


def _plainly_valid(schedule: Schedule) -> bool:
    """Whether all checks below pass, seen from arrays; False also where that cannot be told. The checks themselves,
    action by action, take ten times as long and know the place of a fault."""
    if min(schedule.ranks, schedule.stages, schedule.microbatches) < 1 or not all(schedule.programs):
        return False
    if any(
        type(a) is not Action or type(a.kind) is not ActionKind
        for program in schedule.programs
        for a in program
    ):
        return False
    if not 0 <= schedule.frozen_stages <= schedule.stages:
        return False
    if schedule.stages * schedule.microbatches > sum(map(len, schedule.programs)):  # forwards are missing
        return False
    arrays = ActionArrays.of(schedule)
    return _in_range(arrays) and _has_what_it_needs(arrays) and _runs_to_the_end(arrays)


def _in_range(arrays: ActionArrays) -> bool:
    """Mirrors `_check_sizes` and `_check_actions`."""
    schedule, kinds, stages = arrays.schedule, arrays.kinds, arrays.stages
    for numbers, limit in ((stages, schedule.stages), (arrays.indices, schedule.microbatches)):
        if numbers.min() < 0 or numbers.max() >= limit:
            return False
    update = kinds == NUMBER_OF[ActionKind.UPDATE]
    if schedule.synchronous and update.any():
        return False
    if (~update & (kinds != NUMBER_OF[ActionKind.FORWARD]) & (stages < schedule.frozen_stages)).any():
        return False
    if (arrays.node_of[kinds, stages, arrays.indices] != np.arange(len(arrays))).any():  # doubled
        return False
    home = np.zeros(schedule.stages, dtype=np.int64)
    home[stages] = arrays.ranks
    return bool((home[stages] == arrays.ranks).all())


def _has_what_it_needs(arrays: ActionArrays) -> bool:
    """Mirrors `_check_needs`, `_check_complete` and `_check_microbatch_order`: on one rank, lower nodes come first."""
    schedule = arrays.schedule
    forward, whole, split, weight, again = map(
        arrays.nodes,
        (
            ActionKind.FORWARD,
            ActionKind.BACKWARD,
            ActionKind.INPUT_GRAD,
            ActionKind.WEIGHT_GRAD,
            ActionKind.RECOMPUTE,
        ),
    )
    back, trains = arrays.backwards, np.arange(schedule.stages) >= schedule.frozen_stages
    formed = np.where(whole != NONE, whole, weight)
    wrong = (forward == NONE) | ((whole != NONE) & ((split != NONE) | (weight != NONE)))
    wrong |= (back == NONE) & trains[:, None]
    wrong |= (back != NONE) & (back < forward)
    wrong |= (split == NONE) != (weight == NONE)
    wrong |= (weight != NONE) & (weight < split)
    wrong |= (again != NONE) & ((again < forward) | (again > back))
    if wrong.any():
        return False
    return not schedule.synchronous or all(
        (np.diff(of_kind, axis=1) > 0).all()
        for of_kind in (forward, back[schedule.frozen_stages :], formed[schedule.frozen_stages :])
    )


def _runs_to_the_end(arrays: ActionArrays) -> bool:
    """Mirrors `_check_deadlock`."""
    inputs = arrays.inputs.tolist()
    stops: Integers = np.cumsum(np.bincount(arrays.ranks))
    heads, ends = [0, *stops[:-1].tolist()], stops.tolist()
    done = [False] * len(inputs)
    waiting: dict[int, int] = {}
    runnable = list(range(len(heads)))
    while runnable:
        rank = runnable.pop()
        node, end = heads[rank], ends[rank]
        while node < end:
            needed = inputs[node]
            if needed != NONE and not done[needed]:
                waiting[needed] = rank
                break
            done[node] = True
            if node in waiting:
                runnable.append(waiting.pop(node))
            node += 1
        heads[rank] = node
    return not waiting


def _fail(schedule: Schedule, place: Place, problem: str, related: Sequence[Place] = ()) -> NoReturn:
    rank, position = place
    action = schedule.programs[rank][position]
    raise ScheduleError(
        f"{schedule.name}: rank {rank}, position {position}, {action!s}: {problem}\n\n"
        f"{marked_table(schedule, [place], related)}",
        place,
    )


def _check_sizes(schedule: Schedule) -> None:
    for what, size in (
        ("ranks", schedule.ranks),
        ("stages", schedule.stages),
        ("microbatches", schedule.microbatches),
    ):
        if size < 1:
            raise ScheduleError(f"{schedule.name}: {size} {what}, needs at least 1")
    if not 0 <= schedule.frozen_stages <= schedule.stages:
        raise ScheduleError(
            f"{schedule.name}: {schedule.frozen_stages} frozen stages, must lie in 0..{schedule.stages}"
        )
    for rank, program in enumerate(schedule.programs):
        if not program:
            raise ScheduleError(
                f"{schedule.name}: rank {rank} has no action: every rank holds a stage\n\n{marked_table(schedule)}"
            )


def _check_actions(schedule: Schedule) -> dict[Action, Place]:
    """Check each action alone: known, in range, allowed, unique, and with its stage on one rank."""
    places: dict[Action, Place] = {}
    home: dict[int, Place] = {}
    for rank, program in enumerate(schedule.programs):
        for position, action in enumerate(program):
            place = (rank, position)
            if not (isinstance(action, Action) and isinstance(action.kind, ActionKind)):
                _fail(schedule, place, "unknown action: the kinds are F, B, I, W, R and U")
            if not 0 <= action.stage < schedule.stages:
                _fail(schedule, place, f"stage {action.stage} is not in 0..{schedule.stages - 1}")
            if not 0 <= action.index < schedule.microbatches:
                _fail(schedule, place, f"microbatch {action.index} is not in 0..{schedule.microbatches - 1}")
            if action.kind is ActionKind.UPDATE and schedule.synchronous:
                _fail(schedule, place, "a synchronous window has no U: its updates follow the commit")
            if (
                action.kind not in (ActionKind.FORWARD, ActionKind.UPDATE)
                and action.stage < schedule.frozen_stages
            ):
                _fail(
                    schedule,
                    place,
                    f"stages 0..{schedule.frozen_stages - 1} are frozen: they only go forward",
                )
            if action in places:
                _fail(
                    schedule,
                    place,
                    f"doubled: already at {_where(places[action])}",
                    [places[action]],
                )
            other = home.setdefault(action.stage, place)
            if other[0] != rank:
                _fail(
                    schedule, place, f"stage {action.stage} is on two ranks, {other[0]} and {rank}", [other]
                )
            places[action] = place
    return places


def _check_needs(schedule: Schedule, places: dict[Action, Place]) -> None:
    """Check that each action follows what it needs of its own stage and microbatch, and that B excludes I and W."""
    for action, place in places.items():
        stage, index = action.stage, action.index
        if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.RECOMPUTE):
            _check_after(schedule, places, action, Action(ActionKind.FORWARD, stage, index))
        if action.kind is ActionKind.WEIGHT_GRAD:
            full = Action(ActionKind.BACKWARD, stage, index)
            if full in places:
                _fail(schedule, place, f"{full} forms this weight gradient already", [places[full]])
            _check_after(schedule, places, action, Action(ActionKind.INPUT_GRAD, stage, index))
        if action.kind is ActionKind.INPUT_GRAD:
            full = Action(ActionKind.BACKWARD, stage, index)
            if full in places:
                _fail(schedule, place, f"{full} forms this input gradient already", [places[full]])
        if action.kind is ActionKind.RECOMPUTE:
            backward = _backward_of(stage, index, places)
            if backward is None:
                _fail(schedule, place, "recompute without a backward that uses it")
            if places[backward] < place:
                _fail(
                    schedule, place, f"recompute after {backward}, which needs it before", [places[backward]]
                )


def _check_after(schedule: Schedule, places: dict[Action, Place], action: Action, needed: Action) -> None:
    place = places[action]
    if needed not in places:
        _fail(schedule, place, f"{needed}, which it needs, is missing")
    if places[needed] > place:
        _fail(schedule, place, f"comes before {needed}, which it needs", [places[needed]])


def _backward_of(stage: int, index: int, places: dict[Action, Place]) -> Action | None:
    for kind in _BACKWARDS:
        if (action := Action(kind, stage, index)) in places:
            return action
    return None


def _check_complete(schedule: Schedule, places: dict[Action, Place]) -> None:
    """Check that every stage has a forward of every microbatch and, above the frozen prefix, a whole backward."""
    for stage in range(schedule.stages):
        for index in range(schedule.microbatches):
            forward = Action(ActionKind.FORWARD, stage, index)
            if forward not in places:
                rank = schedule.rank_of_stage.get(stage)
                where = f"rank {rank}" if rank is not None else f"no rank holds stage {stage}"
                raise ScheduleError(
                    f"{schedule.name}: {where}: {forward} is missing: of {counted(schedule.stages, 'stage')} and"
                    f" {counted(schedule.microbatches, 'microbatch', 'microbatches')}, each stage goes forward with"
                    f" each microbatch\n\n{marked_table(schedule)}"
                )
            if stage < schedule.frozen_stages:
                continue
            backward = _backward_of(stage, index, places)
            if backward is None:
                full, split = f"{stage}B{index}", f"{stage}I{index} and {stage}W{index}"
                _fail(schedule, places[forward], f"its backward is missing: {full}, or {split}")
            weight_grad = Action(ActionKind.WEIGHT_GRAD, stage, index)
            if backward.kind is ActionKind.INPUT_GRAD and weight_grad not in places:
                _fail(schedule, places[backward], f"its weight gradient {weight_grad} is missing")


def _check_microbatch_order(schedule: Schedule) -> None:
    """Check that microbatches ascend on each stage, in three orders.

    Forwards update buffers; I adds gradients of small parameters, W those of matrices, B both.
    """
    orders = (
        ((ActionKind.FORWARD,), "forwards"),
        (_BACKWARDS, "backwards and input gradients"),
        (FREEZABLE, "weight gradients"),
    )
    for rank, program in enumerate(schedule.programs):
        for kinds, what in orders:
            latest: dict[int, int] = {}
            for position, action in enumerate(program):
                if action.kind not in kinds:
                    continue
                before = latest.get(action.stage)
                if before is not None and action.index < program[before].index:
                    _fail(
                        schedule,
                        (rank, position),
                        f"comes after {program[before]}: the {what} of a stage must be in ascending"
                        " microbatch order, the bits of the result depend on it",
                        [(rank, before)],
                    )
                latest[action.stage] = position


def _check_deadlock(schedule: Schedule, places: dict[Action, Place]) -> None:
    """Execute the programs without costs; if ranks block, follow the cycle of waits."""
    heads = [0] * schedule.ranks
    done: set[Action] = set()
    waiting: dict[Action, int] = {}
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        program = schedule.programs[rank]
        while heads[rank] < len(program):
            action = program[heads[rank]]
            needed = awaited(action, schedule.stages, places)
            if needed is not None and needed not in done:
                waiting[needed] = rank
                break
            done.add(action)
            heads[rank] += 1
            if action in waiting:
                runnable.append(waiting.pop(action))
    if not waiting:
        return
    needed_by = {rank: needed for needed, rank in waiting.items()}
    rank, path = min(needed_by), []
    while rank not in path:
        path.append(rank)
        rank = places[needed_by[rank]][0]
    cycle = path[path.index(rank) :]
    story = "; ".join(
        f"rank {rank} stands at {schedule.programs[rank][heads[rank]]} (position {heads[rank]}) and waits for"
        f" {needed_by[rank]} ({_where(places[needed_by[rank]])})"
        for rank in cycle
    )
    first, *others = [(rank, heads[rank]) for rank in cycle]
    _fail(schedule, first, f"deadlock: {story}", others)


def _where(place: Place) -> str:
    return f"rank {place[0]}, position {place[1]}"


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
