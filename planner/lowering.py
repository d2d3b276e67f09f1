"""Lowers a schedule to the messages between its ranks, in one order that all ranks follow.

For networks that carry a rank's messages one after the other (NCCL). Knows no tensors and no network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from planner.ir import Action, ActionKind, Program, Schedule

Direction = Literal["forward", "backward"]


class WindowTransfer(NamedTuple):
    """One message of a window, from rank to rank."""

    direction: Direction
    stage: int
    """The stage that receives it."""
    microbatch: int
    source: int
    target: int


Group = tuple[WindowTransfer, ...]
"""Transfers of one rank that travel together."""

_Message = tuple[Direction, int, int]
"""Direction, receiving stage, microbatch."""


def lower(schedule: Schedule) -> tuple[tuple[Group, ...], ...]:
    """For each rank of a validated schedule, its groups in the order in which it must issue them.

    The schedule is simulated, each action starting as soon as it can, with F = I = W = R = 1 and B = 2.
    Messages that become available at the same moment form one round; a rank's messages in a round form one of
    its groups. What a rank does before it sends in a round depends only on earlier rounds, so nothing can
    deadlock even if each rank waits for an entire group before it issues the next.
    """
    programs = schedule.programs
    moments = _run(programs, schedule.stages)
    rank_of = schedule.rank_of_stage
    needed = {_needs(action, schedule.stages) for program in programs for action in program}
    rounds: dict[int, list[WindowTransfer]] = defaultdict(list)
    for message, moment in moments.items():
        direction, stage, microbatch = message
        source = rank_of[stage - 1 if direction == "forward" else stage + 1]
        if message in needed and source != rank_of[stage]:
            rounds[moment].append(WindowTransfer(direction, stage, microbatch, source, rank_of[stage]))
    groups: list[list[Group]] = [[] for _ in programs]
    for _, transfers in sorted(rounds.items()):
        parts: dict[int, list[WindowTransfer]] = defaultdict(list)
        for transfer in sorted(transfers, key=lambda t: t.source):
            parts[transfer.source].append(transfer)
            parts[transfer.target].append(transfer)
        for rank, part in parts.items():
            groups[rank].append(tuple(part))
    return tuple(map(tuple, groups))


def first_forwards(groups: Sequence[Group], microbatches: int) -> tuple[Group, ...]:
    """A rank's groups when only the forwards of the first `microbatches` run, in the order of the window.

    What precedes a message in the window is the same or less, so this order cannot deadlock either.
    """
    kept = (
        tuple(each for each in group if each.direction == "forward" and each.microbatch < microbatches)
        for group in groups
    )
    return tuple(group for group in kept if group)


def _run(programs: Sequence[Program], stages: int) -> dict[_Message, int]:
    """Message -> the moment at which it becomes available."""
    moments: dict[_Message, int] = {}
    clocks, heads = [0] * len(programs), [0] * len(programs)
    waiting: dict[_Message, int] = {}
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        while heads[rank] < len(program):
            action = program[heads[rank]]
            needed = _needs(action, stages)
            if needed is not None and needed not in moments:
                waiting[needed] = rank
                break
            arrived = 0 if needed is None else moments[needed]
            clocks[rank] = max(clocks[rank], arrived) + (2 if action.kind is ActionKind.BACKWARD else 1)
            heads[rank] += 1
            given = _gives(action, stages)
            if given is not None:
                moments[given] = clocks[rank]
                if given in waiting:
                    runnable.append(waiting.pop(given))
    assert heads == [len(program) for program in programs], "the schedule deadlocks: validate it first"
    return moments


def _needs(action: Action, stages: int) -> _Message | None:
    if action.kind is ActionKind.FORWARD and action.stage > 0:
        return "forward", action.stage, action.index
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD) and action.stage < stages - 1:
        return "backward", action.stage, action.index
    return None


def _gives(action: Action, stages: int) -> _Message | None:
    if action.kind is ActionKind.FORWARD and action.stage < stages - 1:
        return "forward", action.stage + 1, action.index
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD) and action.stage > 0:
        return "backward", action.stage - 1, action.index
    return None
