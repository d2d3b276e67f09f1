"""Why ranks were idle in a step: each rank's idle time divided by cause.

The step's *window* lasts from the start of its first action to the end of its last one, on all ranks. A rank is idle
whenever it runs no action in the window. While it is idle, something else happens on the chain of events that it waits
for (`critical_path.py`), and that decides the cause of each instant:

- **communication**: a message is in flight, or the rank or one that it waits for hands a message over.
- **straggler**: a rank that it waits for takes longer than expected. Of each action that the rank waits for, this is
  the time beyond the action's expected time; and the time in which a rank does nothing although nothing is missing.
- **imbalance**: the rank's own stage is shorter. Of the expected time of each action that the rank waits for, this is
  what exceeds the expected time of an action of that kind on the rank's own stages (0 if they have no such action).
- **dependency**: the remaining time. The rank would wait for an action that is on time even if all stages were equal:
  pipelines fill and drain.

An action that a rank waits for only in part counts by the share of it that falls into the idle time. A machine that is
slower as a whole has no stragglers: expected times are scaled so that the median rank takes as long as expected (the
lower of two medians). Parts are whole nanoseconds and add up exactly. Pure: a timeline and a schedule in, numbers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low

from orchestrator.analysis.critical_path import (
    NANOSECONDS,
    Between,
    Bindings,
    ChainStretch,
    CriticalPath,
    bindings,
)
from orchestrator.pictures.spans import Timeline
from planner.ir import ActionKind, Schedule


@dataclass(frozen=True, kw_only=True)
class IdleTime:
    """One rank's idle time in the window."""

    busy_ns: int
    dependency_ns: int
    imbalance_ns: int
    communication_ns: int
    straggler_ns: int

    @property
    def idle_ns(self) -> int:
        """The window less `busy_ns`, exactly."""
        return self.dependency_ns + self.imbalance_ns + self.communication_ns + self.straggler_ns

    @property
    def window_ns(self) -> int:
        return self.busy_ns + self.idle_ns


@dataclass(frozen=True)
class IdleCauses:
    """One step."""

    ranks: tuple[IdleTime, ...]
    """Per lane of the timeline."""
    critical: CriticalPath

    @property
    def window_ns(self) -> int:
        return self.ranks[0].window_ns


def idle_causes(
    schedule: Schedule, timeline: Timeline, expected_s: Sequence[Sequence[float]] | None = None
) -> IdleCauses:
    """Divide each rank's idle time by cause, and find the critical path.

    Args:
        schedule: one pipeline's step, as in `bindings`.
        timeline: spans per rank, measured or simulated, as in `bindings`.
        expected_s: expected seconds of every action, lane by lane like `timeline`; None: the median time of the
            actions of that kind and stage in this step.

    Raises:
        ValueError: timeline, schedule and expected times do not fit together; says where.
    """
    step = bindings(schedule, timeline)
    lengths = [end - start for start, end in zip(step.start_ns, step.end_ns, strict=True)]
    if expected_s is None:
        expected = _usual(step, lengths)
    else:
        if [len(rank) for rank in expected_s] != [len(lane) for lane in step.lanes]:
            raise ValueError(
                f"expected times of {[len(rank) for rank in expected_s]} actions per rank do not fit a step of"
                f" {[len(lane) for lane in step.lanes]}"
            )
        expected = _paced(step, lengths, [seconds * NANOSECONDS for rank in expected_s for seconds in rank])
    ranks = tuple(_of_lane(step, lane, lengths, expected) for lane in step.lanes)
    return IdleCauses(ranks, step.critical_path)


def _of_lane(step: Bindings, lane: range, lengths: Sequence[int], expected: Sequence[int]) -> IdleTime:
    own: dict[ActionKind, list[int]] = defaultdict(list)
    for node in lane:
        own[step.actions[node].kind].append(expected[node])
    tally = _Tally(lengths, expected, step, {kind: round(fmean(times)) for kind, times in own.items()})
    free = step.begin_ns
    for node in lane:
        if step.start_ns[node] > free:
            tally.add(step.before(node, free))
        free = max(free, step.end_ns[node])
    tally.add(step.until_end(free))
    return tally.result(sum(lengths[node] for node in lane))


@dataclass
class _Tally:
    """The idle time of one rank, summed piece by piece."""

    lengths: Sequence[int]
    expected: Sequence[int]
    step: Bindings
    own: Mapping[ActionKind, int]
    dependency: int = 0
    imbalance: int = 0
    communication: int = 0
    straggler: int = 0

    def add(self, pieces: Iterable[ChainStretch]) -> None:
        for piece in pieces:
            idle = piece.end_ns - piece.start_ns
            if piece.what is Between.MESSAGE:
                self.communication += idle
            elif piece.what is Between.DELAY:
                self.straggler += idle
            else:
                self._wait(piece.what, idle)

    def _wait(self, node: int, idle: int) -> None:
        length = self.lengths[node]
        in_time = min(length, self.expected[node])
        beyond_own = max(0, in_time - self.own.get(self.step.actions[node].kind, 0))
        late = (length - in_time) * idle // length
        uneven = beyond_own * idle // length
        self.straggler += late
        self.imbalance += uneven
        self.dependency += idle - late - uneven

    def result(self, busy_ns: int) -> IdleTime:
        return IdleTime(
            busy_ns=busy_ns,
            dependency_ns=self.dependency,
            imbalance_ns=self.imbalance,
            communication_ns=self.communication,
            straggler_ns=self.straggler,
        )


def _usual(step: Bindings, lengths: Sequence[int]) -> list[int]:
    """The median time of the actions of each action's kind and stage."""
    groups: dict[tuple[ActionKind, int], list[int]] = defaultdict(list)
    for action, length in zip(step.actions, lengths, strict=True):
        groups[action.kind, action.stage].append(length)
    usual = {group: round(median(times)) for group, times in groups.items()}
    return [usual[action.kind, action.stage] for action in step.actions]


def _paced(step: Bindings, lengths: Sequence[int], expected: Sequence[float]) -> list[int]:
    """`expected`, scaled so that the median rank takes as long as expected."""
    paces = [
        sum(lengths[node] for node in lane) / foreseen
        for lane in step.lanes
        if (foreseen := sum(expected[node] for node in lane)) > 0
    ]
    pace = median_low(paces) if paces else 1.0
    return [round(time * pace) for time in expected]
