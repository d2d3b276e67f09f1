"""Schedule + costs -> when every action runs, makespan, bubble and in-flight microbatches per rank.

Knows no device and no layer. A rank runs its program in order, one action at a time; a message between ranks
takes `communication_s`, delays who waits for it and never who sends it, and links have no limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph import build_graph
from planner.ir import Action, Kind, Program, Schedule

Seconds = float | tuple[float, ...]
"""One number for all stages, or one per stage."""


@dataclass(frozen=True)
class Costs:
    """What each kind of action takes, and a message from rank to rank."""

    seconds: Mapping[Kind, Seconds]
    """Per kind, for one microbatch on one stage."""
    communication_s: float = 0.0
    """From the end of an action on one rank until its output has arrived on another."""

    @staticmethod
    def uniform(
        *, forward_s: float, input_grad_s: float, weight_grad_s: float, communication_s: float = 0.0
    ) -> Costs:
        """All stages alike; a full backward is input plus weight gradient, a recompute is a forward."""
        return Costs(
            {
                Kind.FORWARD: forward_s,
                Kind.BACKWARD: input_grad_s + weight_grad_s,
                Kind.INPUT_GRAD: input_grad_s,
                Kind.WEIGHT_GRAD: weight_grad_s,
                Kind.RECOMPUTE: forward_s,
            },
            communication_s,
        )

    def of_action(self, action: Action) -> float:
        """Seconds that `action` takes.

        Raises:
            ValueError: no cost for its kind or its stage.
        """
        cost = self.seconds.get(action.kind)
        if isinstance(cost, tuple):
            cost = cost[action.stage] if action.stage < len(cost) else None
        if cost is None:
            raise ValueError(
                f"no cost for {action}: the costs lack kind {action.kind} on stage {action.stage}"
            )
        return cost


@dataclass(frozen=True)
class TimedAction:
    """One action as it runs."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """A schedule laid out in time, from 0 to `makespan_s`."""

    schedule: Schedule
    timeline: tuple[tuple[TimedAction, ...], ...]
    """`timeline[rank]`, in program order."""
    makespan_s: float
    busy_s: tuple[float, ...]
    """Per rank, the sum over its actions."""
    in_flight: tuple[int, ...]
    """Per rank, see `in_flight`."""
    in_flight_input_grad: tuple[int, ...]
    """Per rank, counted up to the input gradient only."""

    @property
    def bubble(self) -> tuple[float, ...]:
        """Per rank, the share of the makespan in which it does not compute; in [0, 1]."""
        if self.makespan_s == 0:
            return (0.0,) * self.schedule.ranks
        return tuple(max(0.0, (self.makespan_s - busy) / self.makespan_s) for busy in self.busy_s)


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Lay out a validated schedule in time: every action starts as soon as its rank and its input are there.

    Raises:
        ValueError: `costs` lacks a kind or a stage of the schedule.
    """
    graph = build_graph(schedule)
    actions = graph.actions
    cost = [costs.of_action(action) for action in actions]
    start, end = [0.0] * len(graph.order), [0.0] * len(graph.order)
    for node in graph.order:
        for earlier in graph.predecessors[node]:
            arrival = end[earlier] + (costs.communication_s if graph.crosses_ranks(earlier, node) else 0.0)
            if arrival > start[node]:
                start[node] = arrival
        end[node] = start[node] + (cost[node] if node < len(actions) else 0.0)

    timeline: list[tuple[TimedAction, ...]] = []
    busy_s: list[float] = []
    first = 0
    for program in schedule.programs:
        nodes = range(first, first + len(program))
        timeline.append(tuple(TimedAction(actions[node], start[node], end[node]) for node in nodes))
        busy_s.append(sum(cost[node] for node in nodes))
        first = nodes.stop
    return Simulation(
        schedule=schedule,
        timeline=tuple(timeline),
        makespan_s=end[graph.sink],
        busy_s=tuple(busy_s),
        in_flight=in_flight(schedule),
        in_flight_input_grad=in_flight(schedule, until=(Kind.BACKWARD, Kind.INPUT_GRAD)),
    )


def in_flight(
    schedule: Schedule, until: tuple[Kind, ...] = (Kind.BACKWARD, Kind.WEIGHT_GRAD)
) -> tuple[int, ...]:
    """Per rank, the most pairs (stage, microbatch) at once between the begin of F and the end of `until`.

    By default up to the weight gradient, for which each matrix's input is kept; with
    `until=(BACKWARD, INPUT_GRAD)` as long as everything is kept. On a frozen stage a pair is in flight during
    its forward only. One that recomputes counts all the way, though it keeps but its input.
    """
    return tuple(_peak(program, until, schedule.frozen_stages) for program in schedule.programs)


def _peak(program: Program, until: tuple[Kind, ...], frozen_stages: int) -> int:
    current = peak = 0
    for action in program:
        if action.kind is Kind.FORWARD:
            peak = max(peak, current + 1)
            current += action.stage >= frozen_stages
        elif action.kind in until:
            current -= 1
    return peak
