"""Binding predecessor of each action of a step, and the chain of actions that explains the length of the step's window.

Every action has at most one *binding predecessor*: whichever of two came last, the action before it on its rank or the
arrival of its input from another rank. Nobody records when a message arrives, so it counts as arrived as soon after
its sender's action as the fastest message between the two ranks. Following binding predecessors back from an action
accounts for every instant before it: an action ran, a message travelled, or a rank did nothing although nothing was
missing. Times are whole nanoseconds, so that parts add up exactly. Pure; knows no plan and no profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from orchestrator.pictures.spans import Timeline, parsed
from planner.ir import Action, Schedule
from planner.schedule.graph import build_graph

NANOSECONDS = 1_000_000_000


class Between(Enum):
    """Pieces of a chain that are not actions."""

    MESSAGE = "message"
    """A message is in flight, or a rank hands one over between two actions."""
    DELAY = "delay"
    """A rank does nothing although nothing is missing."""


@dataclass(frozen=True, slots=True)
class ChainStretch:
    """A stretch of a chain."""

    start_ns: int
    end_ns: int
    what: int | Between
    """The number of an action, or what lies between two."""


@dataclass(frozen=True)
class CriticalPath:
    """The chain of actions that ends last. Its three parts add up to the window exactly."""

    spans: tuple[tuple[int, int], ...]
    """(lane, number of the span in the lane), in order of time."""
    computing_ns: int
    message_ns: int
    delay_ns: int


@dataclass(frozen=True)
class Bindings:
    """A step as it ran: actions numbered lane by lane, each with its binding predecessor."""

    actions: tuple[Action, ...]
    lanes: tuple[range, ...]
    """The actions of each lane."""
    lane_of: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    binding: tuple[int | None, ...]
    messages: tuple[bool, ...]
    """Whether the action takes a message or the one before it sends one."""

    @cached_property
    def last(self) -> int:
        """The action that ends last."""
        return max(range(len(self.end_ns)), key=self.end_ns.__getitem__)

    @property
    def begin_ns(self) -> int:
        """The start of the window: when its first action starts."""
        return min(self.start_ns)

    @property
    def stop_ns(self) -> int:
        """The end of the window: when its last action ends."""
        return self.end_ns[self.last]

    def before(self, action: int, since_ns: int) -> Iterator[ChainStretch]:
        """Chain of pieces that leads to the start of `action`, back to `since_ns`: without gaps, the latest first."""
        until = self.start_ns[action]
        while until > since_ns:
            earlier = self.binding[action]
            if earlier is None:
                yield ChainStretch(since_ns, until, Between.DELAY)
                return
            ended = max(self.end_ns[earlier], since_ns)
            if ended < until:
                yield ChainStretch(ended, until, Between.MESSAGE if self.messages[action] else Between.DELAY)
                until = ended
            yield from self._running(earlier, since_ns, until)
            action, until = earlier, min(until, self.start_ns[earlier])

    def until_end(self, since_ns: int) -> Iterator[ChainStretch]:
        """Chain of pieces that leads to the end of the window, back to `since_ns`: without gaps, the latest first."""
        yield from self._running(self.last, since_ns, self.stop_ns)
        yield from self.before(self.last, since_ns)

    def _running(self, action: int, since_ns: int, until_ns: int) -> Iterator[ChainStretch]:
        start = max(self.start_ns[action], since_ns)
        if start < until_ns:
            yield ChainStretch(start, until_ns, action)

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain back from the end of the window."""
        spent = {Between.MESSAGE: 0, Between.DELAY: 0}
        chain: list[int] = []
        computing = 0
        for piece in self.until_end(self.begin_ns):
            length = piece.end_ns - piece.start_ns
            if isinstance(piece.what, Between):
                spent[piece.what] += length
            else:
                chain.append(piece.what)
                computing += length
        spans = tuple(
            (self.lane_of[node], node - self.lanes[self.lane_of[node]].start) for node in reversed(chain)
        )
        return CriticalPath(spans, computing, spent[Between.MESSAGE], spent[Between.DELAY])


def bindings(schedule: Schedule, timeline: Timeline) -> Bindings:
    """Binding predecessor of each action of `timeline`.

    Args:
        schedule: one pipeline's step, which `validate` accepts.
        timeline: spans per rank, pipeline by pipeline, in the order of the schedule's programs; microbatch numbers
            may start again from 0 with each window.

    Raises:
        ValueError: the timeline holds no action, or other actions than the schedule.
    """
    _check(schedule, timeline)
    graph = build_graph(schedule)
    size = len(graph.actions)
    pipelines = len(timeline) // schedule.ranks
    starts = [round(span.start_s * NANOSECONDS) for spans in timeline for span in spans]
    ends = [round(span.end_s * NANOSECONDS) for spans in timeline for span in spans]
    lane_of = [p * schedule.ranks + rank for p in range(pipelines) for rank in graph.ranks]
    inputs = [
        None if earlier is None or graph.ranks[earlier] == graph.ranks[node] else p * size + earlier
        for p in range(pipelines)
        for node, earlier in enumerate(graph.inputs)
    ]
    sends = [False] * len(starts)
    fastest: dict[tuple[int, int], int] = {}
    for node, earlier in enumerate(inputs):
        if earlier is not None:
            sends[earlier] = True
            link = lane_of[earlier], lane_of[node]
            flight = starts[node] - ends[earlier]
            fastest[link] = min(fastest.get(link, flight), flight)
    lanes: list[range] = []
    binding: list[int | None] = []
    for spans in timeline:
        first = lanes[-1].stop if lanes else 0
        lanes.append(range(first, first + len(spans)))
        for node in lanes[-1]:
            own = node - 1 if node > first else None
            sender = inputs[node]
            if sender is None or own is None:
                binding.append(own if sender is None else sender)
            else:
                arrival = ends[sender] + fastest[lane_of[sender], lane_of[node]]
                binding.append(sender if arrival > ends[own] else own)
    messages = tuple(
        sender is not None or (node > 0 and lane_of[node - 1] == lane_of[node] and sends[node - 1])
        for node, sender in enumerate(inputs)
    )
    return Bindings(
        actions=graph.actions * pipelines,
        lanes=tuple(lanes),
        lane_of=tuple(lane_of),
        start_ns=tuple(starts),
        end_ns=tuple(ends),
        binding=tuple(binding),
        messages=messages,
    )


def _check(schedule: Schedule, timeline: Timeline) -> None:
    counts: Sequence[int] = [len(program) for program in schedule.programs]
    lanes = [len(spans) for spans in timeline]
    if not sum(lanes) or lanes != [*counts] * (len(lanes) // len(counts)):
        raise ValueError(
            f"a timeline with {lanes} actions per rank is none of a schedule with {[*counts]}; use the"
            " schedule that the step ran"
        )
    for rank, actions in enumerate(parsed(timeline)):
        program = schedule.programs[rank % schedule.ranks]
        for ran, planned in zip(actions, program, strict=True):
            if (ran.kind, ran.stage) != (planned.kind, planned.stage):
                raise ValueError(
                    f"rank {rank} ran {ran} where the schedule has {planned}; use the schedule that the step ran"
                )
