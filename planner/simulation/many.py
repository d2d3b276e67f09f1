"""Many cost assignments of one schedule, laid out in time together: what `simulate` computes, for N of them at once.

Searches compare hundreds of cuts of the same schedule. Actions that cannot wait for each other form a level; numpy
takes a level of all assignments in one step. Knows no layer and no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.ir import ActionKind, Schedule
from planner.schedule.graph import build_graph

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ManyMessages:
    """Per group of actions and assignment, the parts of the message that carries an action's output to another rank:
    float[G, N] each, as in `MessageCost`; 0 where there is no message."""

    sender_s: Floats
    link_s: Floats
    latency_s: Floats
    receiver_s: Floats


@dataclass(frozen=True)
class _Level:
    """Actions of different ranks, each after all that it waits for."""

    begin: int
    """The number of its first action, in the order of levels; the others follow."""
    stop: int
    ranks: Integers
    groups: Integers
    inputs: Integers
    """The number of the action whose output each awaits; A where it awaits none."""
    input_groups: Integers
    """The group of that action; G where it awaits none."""


@dataclass(frozen=True)
class Levels:
    """A schedule's actions by level. `groups` are the (kind, stage) of all actions, G of them."""

    groups: tuple[tuple[ActionKind, int], ...]
    links: Integers
    """int[G]: the link that a group's messages take; the groups of one link have the same number."""
    group_of: Integers
    """int[A]: by action, in the order of levels."""
    index_of: Integers
    """int[A]: its microbatch."""
    ranks: int
    levels: tuple[_Level, ...]

    @property
    def actions(self) -> int:
        return len(self.group_of)


@lru_cache(maxsize=16)
def levels_of(schedule: Schedule) -> Levels:
    """The levels of a validated schedule. Cached, as searches ask repeatedly."""
    graph = build_graph(schedule)
    count = len(graph.actions)
    depth = [0] * (count + 2)
    for node in graph.order[1:-1]:
        depth[node] = 1 + max((depth[before] for before in graph.predecessors[node]), default=0)
    order = sorted(range(count), key=lambda node: (depth[node], graph.ranks[node]))
    number = {node: place for place, node in enumerate(order)}
    groups = [(kind, stage) for kind, stage, _ in graph.by_kind_and_stage]
    group_of = {node: g for g, (_, _, nodes) in enumerate(graph.by_kind_and_stage) for node in nodes}
    levels: list[_Level] = []
    begin = 0
    while begin < count:
        stop = begin
        while stop < count and depth[order[stop]] == depth[order[begin]]:
            stop += 1
        nodes = order[begin:stop]
        awaited = [graph.inputs[node] for node in nodes]
        levels.append(
            _Level(
                begin=begin,
                stop=stop,
                ranks=np.array([graph.ranks[node] for node in nodes]),
                groups=np.array([group_of[node] for node in nodes]),
                inputs=np.array([count if node is None else number[node] for node in awaited]),
                input_groups=np.array([len(groups) if node is None else group_of[node] for node in awaited]),
            )
        )
        begin = stop
    return Levels(
        groups=tuple(groups),
        links=_links(schedule, groups),
        group_of=np.array([group_of[node] for node in order]),
        index_of=np.array([graph.actions[node].index for node in order]),
        ranks=schedule.ranks,
        levels=tuple(levels),
    )


def neighbour_of(kind: ActionKind, stage: int) -> int:
    """The stage that awaits the output of an action of `kind` on `stage`, if there is such a stage."""
    return stage + 1 if kind is ActionKind.FORWARD else stage - 1


def _links(schedule: Schedule, groups: list[tuple[ActionKind, int]]) -> Integers:
    known: dict[tuple[object, ...], int] = {}
    links: list[int] = []
    for group, (kind, stage) in enumerate(groups):
        source = schedule.rank_of_stage[stage]
        target = schedule.rank_of_stage.get(neighbour_of(kind, stage))
        key = ("none", group) if target is None or target == source else (source, target)
        links.append(known.setdefault(key, len(known)))
    return np.array(links)


def rank_ends_s(levels: Levels, seconds: Floats, messages: ManyMessages) -> Floats:
    """When each rank's last action ends, float[R, N]; the largest of a column is that assignment's makespan.

    Args:
        seconds: float[G, N], per group; or float[A, N], per action in the order of levels.
        messages: as `simulate` has them when they do not block.
    """
    count = seconds.shape[1]
    by_group = len(seconds) == len(levels.groups)
    arrival = np.zeros((levels.actions + 1, count))
    free, ends = np.zeros((levels.ranks, count)), np.zeros((levels.ranks, count))
    link_free = np.zeros((int(levels.links.max()) + 1, count))
    receiver_s = np.vstack([messages.receiver_s, np.zeros((1, count))])
    for level in levels.levels:
        ranks, groups = level.ranks, level.groups
        links = levels.links[groups]
        end = np.maximum(free[ranks], arrival[level.inputs])
        end += receiver_s[level.input_groups]
        end += seconds[groups] if by_group else seconds[level.begin : level.stop]
        ends[ranks] = end
        end += messages.sender_s[groups]
        free[ranks] = end
        np.maximum(end, link_free[links], out=end)
        end += messages.link_s[groups]
        link_free[links] = end
        end += messages.latency_s[groups]
        arrival[level.begin : level.stop] = end
    return ends
