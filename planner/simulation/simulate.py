"""Schedule + costs -> when every action runs, when every message travels, makespan and bubble per rank.

Knows no layer and no device. A rank executes its program in order, one action at a time. Outputs cross ranks as
messages, and `Costs` gives their cost at either end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from planner.ir import Action, ActionKind, Schedule
from planner.profile import Link
from planner.schedule.graph import Graph, build_graph
from planner.schedule.in_flight import in_flight

Seconds = float | tuple[float, ...]
"""One number for all stages, or one per stage."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The sizes of messages between ranks, and the links."""

    forward_bytes: tuple[int, ...]
    """Per stage, bytes that its forward sends to the next stage."""
    backward_bytes: tuple[int, ...]
    """Per stage, bytes that its backward or input gradient sends to the previous stage."""
    links: tuple[tuple[Link | None, ...], ...]
    """`links[source][target]`, by rank."""


@dataclass(frozen=True)
class Costs:
    """The cost of each action, and of each message between ranks.

    With `messages`, a message costs what its `Link` says. After its action it holds its sender. As soon as the earlier
    messages on this ordered pair of ranks have left, it occupies the link, and it arrives one latency later. Right
    before the action that needs it, it holds its receiver. Receives are posted ahead, so a message travels while its
    receiver computes. Stages of one rank pass their outputs without a message, at no cost.
    """

    seconds: Mapping[ActionKind, Seconds]
    """Per kind, for one microbatch on one stage."""
    communication_s: float = 0.0
    """Without `messages`: seconds from the end of an action until its output has arrived on another rank. It holds
    neither rank, and links have no limit."""
    actions: Mapping[Action, float] = field(default_factory=dict)
    """Seconds of single actions, which replace `seconds`."""
    messages: Messages | None = None
    blocking: bool = False
    """Whether a message holds its sender and its receiver for its whole duration (synchronous point-to-point calls, as
    in ChronosPipe, section III) instead of travelling while they compute."""

    @staticmethod
    def uniform(
        *, forward_s: float, input_grad_s: float, weight_grad_s: float, communication_s: float = 0.0
    ) -> Costs:
        """Equal stages; a full backward takes input plus weight gradient, a recompute takes a forward."""
        return Costs(
            {
                ActionKind.FORWARD: forward_s,
                ActionKind.BACKWARD: input_grad_s + weight_grad_s,
                ActionKind.INPUT_GRAD: input_grad_s,
                ActionKind.WEIGHT_GRAD: weight_grad_s,
                ActionKind.RECOMPUTE: forward_s,
            },
            communication_s,
        )

    def of_action(self, action: Action) -> float:
        """Seconds that `action` takes.

        Raises:
            ValueError: there is no cost for the action, nor for its kind and stage.
        """
        cost = self.actions.get(action)
        if cost is None:
            cost = self._of_kind(action.kind, action.stage)
        if cost is None:
            raise ValueError(
                f"no cost for {action}: the costs lack kind {action.kind} on stage {action.stage}"
            )
        return cost

    def of_nodes(self, graph: Graph) -> list[float]:
        """Seconds of every action of `graph`, by node.

        Raises:
            ValueError: as `of_action`.
        """
        cost = [0.0] * len(graph.actions)
        for kind, stage, nodes in graph.by_kind_and_stage:
            usual = self._of_kind(kind, stage)
            for node in nodes:
                cost[node] = self.of_action(graph.actions[node]) if usual is None else usual
        for action, seconds in self.actions.items():
            node = graph.node_of.get(action)
            if node is not None:
                cost[node] = seconds
        return cost

    def _of_kind(self, kind: ActionKind, stage: int) -> float | None:
        cost = self.seconds.get(kind)
        if isinstance(cost, tuple):
            return cost[stage] if stage < len(cost) else None
        return cost


@dataclass(frozen=True)
class TimedAction:
    """One action with its start and end."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedTransfer:
    """One message between two ranks."""

    action: Action
    """The action whose output it carries."""
    source: int
    target: int
    start_s: float
    """When it starts to occupy the link."""
    end_s: float
    """When the link is free again."""
    arrival_s: float


@dataclass(frozen=True)
class Simulation:
    """A schedule laid out in time, from 0 to `makespan_s`."""

    schedule: Schedule
    start_s: tuple[float, ...]
    """Per action, in the node order of the schedule's graph. By then the rank has taken in the input."""
    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    """Per rank, the sum over its actions."""
    on_link: tuple[tuple[int, float, float, float], ...]
    """(sending node, start on the link, end on the link, arrival) of every message."""

    @cached_property
    def makespan_s(self) -> float:
        return max(self.end_s)

    @cached_property
    def timeline(self) -> tuple[tuple[TimedAction, ...], ...]:
        """`timeline[rank]`, in program order."""
        times = zip(self.start_s, self.end_s, strict=True)
        return tuple(
            tuple(TimedAction(action, *next(times)) for action in program)
            for program in self.schedule.programs
        )

    @cached_property
    def transfers(self) -> tuple[SimulatedTransfer, ...]:
        """Every message, in the order of each sender."""
        graph = build_graph(self.schedule)
        transfers: list[SimulatedTransfer] = []
        for node, *times in self.on_link:
            consumer = graph.consumers[node]
            assert consumer is not None
            transfers.append(
                SimulatedTransfer(graph.actions[node], graph.ranks[node], graph.ranks[consumer], *times)
            )
        return tuple(transfers)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Per rank, the share of the makespan in which it does not compute; in [0, 1]."""
        if self.makespan_s == 0:
            return (0.0,) * self.schedule.ranks
        return tuple(max(0.0, (self.makespan_s - busy) / self.makespan_s) for busy in self.busy_s)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per rank, the most microbatches in flight; see `planner.schedule.in_flight`."""
        return in_flight(self.schedule)

    @cached_property
    def in_flight_input_grad(self) -> tuple[int, ...]:
        """Per rank, counted up to the input gradient only."""
        return in_flight(self.schedule, until_weight_grad=False)


class MessageCost(NamedTuple):
    """The cost of one message: the parts of its `Link`, for its size."""

    sender_s: float
    link_s: float
    latency_s: float
    receiver_s: float


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Lay out a validated schedule in time: every action starts as soon as its rank is free and its input there.

    Raises:
        ValueError: `costs` lacks a kind or a stage of the schedule, or a link that a message needs.
    """
    graph = build_graph(schedule)
    actions = len(graph.actions)
    cost = costs.of_nodes(graph)
    # Per node, the message that carries its output to another rank, and the number of its link.
    message: list[MessageCost | None] = [None] * actions
    link_of: list[int] = [0] * actions
    numbers: dict[tuple[int, int], int] = {}
    for senders, ends, one in _messages(graph, schedule, costs):
        number = numbers.setdefault(ends, len(numbers))
        for node in senders:
            message[node], link_of[node] = one, number

    start, end, arrival = [0.0] * actions, [0.0] * actions, [0.0] * actions
    rank_free = [0.0] * schedule.ranks
    link_free = [0.0] * len(numbers)
    blocking = costs.blocking
    on_link: list[tuple[int, float, float, float]] = []
    for node, rank, earlier in graph.steps:
        begin = rank_free[rank]
        if earlier is not None:
            arrived = arrival[earlier]
            if arrived > begin:
                begin = arrived
            incoming = message[earlier]
            if incoming is not None:
                begin += incoming[3]
        start[node] = begin
        done = begin + cost[node]
        end[node] = rank_free[rank] = arrival[node] = done
        outgoing = message[node]
        if outgoing is None:
            continue
        sender_s, link_s, latency_s, _ = outgoing
        sent = rank_free[rank] = done + sender_s
        if blocking:
            # The receiver is held as long, from now on or from when it is free: the arrival stays `done`.
            on_link.append((node, done, sent, sent))
            continue
        leaves = link_free[link_of[node]]
        if sent > leaves:
            leaves = sent
        gone = link_free[link_of[node]] = leaves + link_s
        arrived = arrival[node] = gone + latency_s
        on_link.append((node, leaves, gone, arrived))

    busy_s: list[float] = []
    first = 0
    for program in schedule.programs:
        busy_s.append(sum(cost[first : first + len(program)]))
        first += len(program)
    return Simulation(schedule, tuple(start), tuple(end), tuple(busy_s), tuple(on_link))


def message_of_nodes(graph: Graph, schedule: Schedule, costs: Costs) -> list[MessageCost | None]:
    """Per node, the cost of the message that carries its output to another rank; None without one."""
    message: list[MessageCost | None] = [None] * len(graph.actions)
    for senders, _, one in _messages(graph, schedule, costs):
        for node in senders:
            message[node] = one
    return message


def _messages(
    graph: Graph, schedule: Schedule, costs: Costs
) -> Iterator[tuple[list[int], tuple[int, int], MessageCost]]:
    """(the nodes of one kind and stage that send, from which rank to which, what each message costs)."""
    for kind, stage, nodes in graph.by_kind_and_stage:
        neighbour = stage + 1 if kind is ActionKind.FORWARD else stage - 1
        source, target = graph.ranks[nodes[0]], schedule.rank_of_stage.get(neighbour)
        if target is None or target == source:
            continue
        senders = [node for node in nodes if graph.consumers[node] is not None]
        if senders:
            yield senders, (source, target), _message(kind, stage, source, target, costs)


def _message(kind: ActionKind, stage: int, source: int, target: int, costs: Costs) -> MessageCost:
    messages = costs.messages
    if messages is None:
        total_s = costs.communication_s
        return (
            MessageCost(total_s, 0.0, 0.0, total_s) if costs.blocking else MessageCost(0.0, 0.0, total_s, 0.0)
        )
    link = None
    if source < len(messages.links) and target < len(messages.links[source]):
        link = messages.links[source][target]
    if link is None:
        raise ValueError(f"no link from rank {source} to rank {target}, over which stage {stage} sends")
    sizes = messages.forward_bytes if kind is ActionKind.FORWARD else messages.backward_bytes
    if stage >= len(sizes):
        raise ValueError(f"the costs lack the size of the message that {kind} of stage {stage} sends")
    size = sizes[stage]
    if costs.blocking:
        total_s = link.total_s(size)
        return MessageCost(total_s, 0.0, 0.0, total_s)
    return MessageCost(
        link.sender_busy_s(size), link.link_busy_s(size), link.latency_s, link.receiver_busy_s(size)
    )
