"""Schedule -> execution graph: program order on each rank, data between stages, one source and one sink.

Knows no costs. The graph is TimelyFreeze's (section 3.2.1, appendix B) for any family: as a stage lives on
one rank, its own edges follow from the program order; and every action without a successor joins the sink,
not only the last backward of the first stage, whose rank need not finish last.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from planner.ir import Action, ActionKind, Schedule
from planner.schedule.action_arrays import NONE, ActionArrays


def awaited(action: Action, stages: int, actions: Container[Action]) -> Action | None:
    """The action of the neighbouring stage whose output `action` needs; None if it needs none.

    A forward needs the forward of the stage before; a backward or input gradient needs the backward or input
    gradient of the stage after, whichever of the two is among `actions`. What an action needs of its own
    stage (its forward, its input gradient) is on its own rank, earlier in the program.
    """
    if action.kind is ActionKind.FORWARD:
        return Action(ActionKind.FORWARD, action.stage - 1, action.index) if action.stage > 0 else None
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD) and action.stage + 1 < stages:
        full = Action(ActionKind.BACKWARD, action.stage + 1, action.index)
        return full if full in actions else Action(ActionKind.INPUT_GRAD, action.stage + 1, action.index)
    return None


@dataclass(frozen=True)
class Graph:
    """Nodes 0..N-1 are the actions, rank by rank in program order; node N is the source, N + 1 the sink."""

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    """`ranks[node]` of each action."""
    predecessors: tuple[tuple[int, ...], ...]
    """`predecessors[node]`, for all N + 2 nodes."""
    order: tuple[int, ...]
    """All N + 2 nodes, each after its predecessors: the source first, the sink last."""
    inputs: tuple[int | None, ...]
    """Per action, the node of another stage whose output it awaits, on any rank; see `awaited`."""

    @cached_property
    def node_of(self) -> dict[Action, int]:
        return {action: node for node, action in enumerate(self.actions)}

    @cached_property
    def consumers(self) -> tuple[int | None, ...]:
        """Per action, the node of another stage that awaits its output; there is at most one."""
        consumers: list[int | None] = [None] * len(self.actions)
        for node, earlier in enumerate(self.inputs):
            if earlier is not None:
                consumers[earlier] = node
        return tuple(consumers)

    @cached_property
    def by_kind_and_stage(self) -> tuple[tuple[ActionKind, int, tuple[int, ...]], ...]:
        """(kind, stage, the nodes of that kind on that stage)."""
        groups: dict[tuple[ActionKind, int], list[int]] = {}
        for node, action in enumerate(self.actions):
            groups.setdefault((action.kind, action.stage), []).append(node)
        return tuple((kind, stage, tuple(nodes)) for (kind, stage), nodes in groups.items())

    @cached_property
    def steps(self) -> tuple[tuple[int, int, int | None], ...]:
        """(node, its rank, its entry of `inputs`) of every action, in `order`."""
        nodes = self.order[1:-1]
        return tuple(
            zip(nodes, map(self.ranks.__getitem__, nodes), map(self.inputs.__getitem__, nodes), strict=True)
        )

    @property
    def source(self) -> int:
        return len(self.actions)

    @property
    def sink(self) -> int:
        return len(self.actions) + 1

    def crosses_ranks(self, earlier: int, later: int) -> bool:
        """Whether the edge between two nodes is a message from one rank to another."""
        actions = len(self.actions)
        return earlier < actions and later < actions and self.ranks[earlier] != self.ranks[later]


@lru_cache(maxsize=32)
def build_graph(schedule: Schedule) -> Graph:
    """The execution graph of a schedule that `validate` has accepted. Cached, as searches build it repeatedly."""
    arrays = ActionArrays.of(schedule)
    actions = tuple(action for program in schedule.programs for action in program)
    ranks = tuple(arrays.ranks.tolist())
    count = len(actions)
    source, sink = count, count + 1

    awaited_nodes = arrays.inputs
    first = np.ones(count, dtype=bool)
    first[1:] = arrays.ranks[1:] != arrays.ranks[:-1]
    beside = (awaited_nodes != NONE) & (first | (awaited_nodes != np.arange(count) - 1))
    has_successor = np.zeros(count, dtype=bool)
    has_successor[:-1] = ~first[1:]
    has_successor[awaited_nodes[awaited_nodes != NONE]] = True
    inputs = [None if node == NONE else node for node in awaited_nodes.tolist()]
    predecessors: list[tuple[int, ...]] = []
    for node, (begins, needed) in enumerate(
        zip(first.tolist(), np.where(beside, awaited_nodes, NONE).tolist(), strict=True)
    ):
        if begins:
            predecessors.append((source,) if needed == NONE else (needed,))
        else:
            predecessors.append((node - 1,) if needed == NONE else (node - 1, needed))
    predecessors.append(())
    predecessors.append(tuple(np.flatnonzero(~has_successor).tolist()))
    order = _topological_order(predecessors, source, sink)
    return Graph(actions, ranks, tuple(predecessors), order, tuple(inputs))


def _topological_order(predecessors: list[tuple[int, ...]], source: int, sink: int) -> tuple[int, ...]:
    successors: list[list[int]] = [[] for _ in predecessors]
    for node, before in enumerate(predecessors):
        for earlier in before:
            successors[earlier].append(node)
    missing = [len(before) for before in predecessors]
    order = [source]
    for node in order:
        for later in successors[node]:
            missing[later] -= 1
            if missing[later] == 0:
                order.append(later)
    assert len(order) == len(predecessors), "the schedule has a cycle: validate it first"
    assert order[-1] == sink
    return tuple(order)
