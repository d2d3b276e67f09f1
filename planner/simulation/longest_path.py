"""Schedule + costs -> the longest-path problem that the simulator solves: durations on nodes, delays on edges.

The freeze program, which treats durations as unknown, and the Monte Carlo estimate, which treats them as random, share
this definition. Knows nothing of freezing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.ir import Schedule
from planner.schedule.graph import Graph
from planner.simulation.simulate import Costs, message_of_nodes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Network:
    """A node starts when, for each of its edges, the earlier node has ended and the delay has passed.

    Nodes 0..A-1 are the actions of `graph`. Node A is the sink, whose start is the makespan. The nodes after it are the
    messages that may find their link occupied; they take no time. Any node may start at 0.
    """

    graph: Graph
    order: tuple[int, ...]
    """All nodes, each after its predecessors; the sink is last."""
    incoming: tuple[tuple[tuple[int, float], ...], ...]
    """`incoming[node]`: (earlier node, delay in seconds) per edge."""

    @property
    def actions(self) -> int:
        return len(self.graph.actions)

    @property
    def sink(self) -> int:
        return len(self.graph.actions)

    @property
    def nodes(self) -> int:
        return len(self.incoming)

    @cached_property
    def edges(self) -> tuple[Integers, Integers, Floats]:
        """(earlier node, later node, delay) of every edge, by later node."""
        tails = [tail for before in self.incoming for tail, _ in before]
        heads = [head for head, before in enumerate(self.incoming) for _ in before]
        delays = [delay for before in self.incoming for _, delay in before]
        return np.array(tails, dtype=np.int64), np.array(heads, dtype=np.int64), np.array(delays)

    def starts(self, seconds: Sequence[float]) -> list[float]:
        """The earliest start of each node.

        Args:
            seconds: float[A], per action.
        """
        duration = self._durations(seconds)
        start = [0.0] * self.nodes
        end = start.copy()
        for node in self.order:
            begin = 0.0
            for tail, delay in self.incoming[node]:
                ready = end[tail] + delay
                if ready > begin:
                    begin = ready
            start[node] = begin
            end[node] = begin + duration[node]
        return start

    def critical_edges(self, seconds: Sequence[float]) -> list[int | None]:
        """Per node, the edge for which it waits longest, the first of several; None if it has no edge.

        Args:
            seconds: float[A], per action.
        """
        duration = self._durations(seconds)
        end = [start + own for start, own in zip(self.starts(seconds), duration, strict=True)]
        return [
            max(range(len(before)), key=lambda edge: end[before[edge][0]] + before[edge][1])
            if len(before) > 1
            else (0 if before else None)
            for before in self.incoming
        ]

    def makespans(self, seconds: Floats) -> Floats:
        """The makespans of N windows, computed together.

        Args:
            seconds: float[A, N], per action and window.

        Returns:
            float[N].
        """
        nothing = np.zeros(seconds.shape[1])
        end: list[Floats] = [nothing] * self.nodes
        for node in self.order:
            begin = nothing
            for tail, delay in self.incoming[node]:
                begin = np.maximum(begin, end[tail] + delay)
            end[node] = begin + seconds[node] if node < self.actions else begin
        return end[self.sink]

    def latest_starts(self, seconds: Sequence[float], makespan_s: float) -> list[float]:
        """The latest start of each node with which the sink starts at `makespan_s`.

        Args:
            seconds: float[A], per action.
        """
        duration = self._durations(seconds)
        latest = [makespan_s] * self.nodes
        for node in reversed(self.order):
            begin = latest[node]
            for tail, delay in self.incoming[node]:
                limit = begin - delay - duration[tail]
                if limit < latest[tail]:
                    latest[tail] = limit
        return latest

    def _durations(self, seconds: Sequence[float]) -> list[float]:
        """Per node, its duration: the sink and the messages take no time."""
        return [*seconds, *[0.0] * (self.nodes - len(seconds))]


def build_network(schedule: Schedule, graph: Graph, costs: Costs, shortest: Sequence[float]) -> Network:
    """The network of a validated schedule and its graph, with the messages of `costs`.

    A message becomes a node only if it may have to queue for its link: if the message before it can still occupy the
    link when all actions take their shortest time.

    Args:
        shortest: float[A], the least seconds that each action may take.

    Raises:
        ValueError: `costs` lacks a link that a message needs.
    """
    message = message_of_nodes(graph, schedule, costs)
    sink = len(graph.actions)
    incoming: list[tuple[tuple[int, float], ...]] = [()] * (sink + 1)
    order: list[int] = []
    # Per message: (node, delay) after which it enters the link.
    leaves: dict[int, tuple[int, float]] = {}
    # Per link: (sender of its last message, seconds that the message occupies it, its largest possible delay).
    last_on_link: dict[tuple[int, int], tuple[int, float, float]] = {}
    # Per node, the least time from the start of its rank's program until its message has left the rank.
    elapsed = [0.0] * sink

    for node in graph.order[1:-1]:
        earlier = graph.inputs[node]
        incoming_message = message[earlier] if earlier is not None else None
        receiver_s = incoming_message.receiver_s if incoming_message is not None else 0.0
        before: list[tuple[int, float]] = []
        previous = node - 1 if node > 0 and graph.ranks[node - 1] == graph.ranks[node] else None
        if previous is not None:
            sent = message[previous]
            before.append((previous, receiver_s + (sent.sender_s if sent is not None else 0.0)))
            elapsed[node] = elapsed[previous]
        if earlier is not None:
            if incoming_message is None:
                if earlier != previous:
                    before.append((earlier, 0.0))
            elif costs.blocking:
                before.append((earlier, receiver_s))
            else:
                leaver, delay = leaves[earlier]
                travel_s = incoming_message.link_s + incoming_message.latency_s
                before.append((leaver, delay + travel_s + receiver_s))
        incoming[node] = tuple(before)
        order.append(node)
        elapsed[node] += receiver_s + shortest[node]

        outgoing = message[node]
        if outgoing is None:
            continue
        elapsed[node] += outgoing.sender_s
        if costs.blocking:
            continue
        consumer = graph.consumers[node]
        assert consumer is not None
        link = (graph.ranks[node], graph.ranks[consumer])
        leaves[node], backlog = (node, outgoing.sender_s), 0.0
        if link in last_on_link:
            ahead, link_s, ahead_backlog = last_on_link[link]
            backlog = max(0.0, ahead_backlog + link_s - (elapsed[node] - elapsed[ahead]))
            if backlog > 0:
                leaver, delay = leaves[ahead]
                incoming.append(((node, outgoing.sender_s), (leaver, delay + link_s)))
                leaves[node] = (len(incoming) - 1, 0.0)
                order.append(len(incoming) - 1)
        last_on_link[link] = (node, outgoing.link_s, backlog)

    incoming[sink] = tuple((node, 0.0) for node in graph.predecessors[graph.sink])
    return Network(graph, (*order, sink), tuple(incoming))
