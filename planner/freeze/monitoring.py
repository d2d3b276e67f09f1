"""Monitored steps -> the upper and the lower bound of each kind of action on each stage.

TimelyFreeze bounds every single action (section 3.1). Here all actions of one kind on one stage share one mean. Knows
neither processes nor the freeze program: it turns spans into `Costs`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from planner.freezing import Phase, Phases
from planner.ir import FREEZABLE, Action, ActionKind, Schedule
from planner.plan import Place
from planner.schedule.graph import build_graph
from planner.simulation.simulate import Costs

Spans = tuple[tuple[str, float, float], ...]
"""(token, start, end) of measured actions; seconds since the start of the step."""
Key = tuple[ActionKind, int]
"""Kind and stage."""


class MonitoringError(ValueError):
    """The monitored steps do not time some kind of action on some stage."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The measured actions of one rank in one step."""

    step: int
    rank: int
    """Global: replica * P + pipeline rank."""
    step_s: float
    spans: Spans
    energies: tuple[float, ...] = ()
    """Per layer, the squared norm of its gradient in a step that froze nothing; empty: told by another rank."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Time of each kind of action on each stage, and of the step around them."""

    upper: Costs
    """With nothing frozen."""
    lower: Costs
    """With everything frozen; never above `upper`."""
    outside_s: float
    """Seconds of a step outside its window with nothing frozen: first batch, exchange, commit, update."""
    upper_step_s: float | None
    """Median step of the upper half, if it was observed."""
    lower_step_s: float | None
    """Median step of the lower half, if it was observed."""
    saving_error_s: float = 0.0
    """Standard error of the difference of these two."""
    known_share: float = 1.0
    """Value of `confirmed` where a half was not observed: as other steps have shown, or 1."""

    def confirmed(self, saving_s: float) -> float:
        """The share, 0 to 1, of `saving_s` that the monitored steps show.

        The program has each rank compute by itself. Where ranks share cores, the time that one saves goes to others,
        whose actions no bound tells apart. One standard error more than what was measured may be there.

        Args:
            saving_s: what everything frozen saves of a step by the times of single actions.
        """
        if saving_s <= 0.0:
            return 1.0
        if self.upper_step_s is None or self.lower_step_s is None:
            return self.known_share
        seen_s = self.upper_step_s - self.lower_step_s + self.saving_error_s
        return min(1.0, max(0.0, seen_s / saving_s))


def complete(observations: Iterable[Observation], phases: Phases, world_size: int) -> bool:
    """Whether every rank has reported the last step of monitoring; each reports its steps in order."""
    reported = {seen.rank for seen in observations if seen.step == phases.monitoring}
    return len(reported) == world_size


def observed_energies(observations: Iterable[Observation], phases: Phases) -> tuple[float, ...]:
    """Per layer, the mean energy of its gradient in the steps that froze nothing; empty if nobody told any. Steps weigh
    as their gradients do (definition D.8)."""
    told = [seen.energies for seen in observations if seen.energies and phases.of(seen.step) is Phase.UPPER]
    return tuple(map(mean, zip(*told, strict=True)))


def measure(schedule: Schedule, phases: Phases, observations: Iterable[Observation]) -> Bounds:
    """The bounds of each kind of action on each stage, and the time of a message between ranks.

    A bound is the median over steps of the mean over a step's microbatches and replicas. The mean, because a window is
    a sum of actions; the median, because a single step may be disturbed. Kinds that freezing does not shorten (F, I, R)
    have one time, from both halves.

    Raises:
        MonitoringError: a half was not observed, or lacks a kind of action on a stage.
    """
    by_phase: dict[Phase, list[Observation]] = {Phase.UPPER: [], Phase.LOWER: []}
    for seen in observations:
        by_phase.get(phases.of(seen.step), []).append(seen)
    upper, lower = by_phase[Phase.UPPER], by_phase[Phase.LOWER]
    kinds = {(action.kind, action.stage) for program in schedule.programs for action in program}
    both = _seconds(upper + lower)
    longest, shortest = _seconds(upper), _seconds(lower)
    upper_s: dict[Key, float] = {}
    lower_s: dict[Key, float] = {}
    for key in sorted(kinds):
        if key[0] in FREEZABLE:
            upper_s[key] = _known(longest, key, phases, Phase.UPPER)
            # A weight gradient that is never computed has no time.
            gone = key[0] is ActionKind.WEIGHT_GRAD and lower and key not in shortest
            lower_s[key] = 0.0 if gone else min(upper_s[key], _known(shortest, key, phases, Phase.LOWER))
        else:
            upper_s[key] = lower_s[key] = _known(both, key, phases, Phase.UPPER)
    communication_s = _message_s(schedule, upper)
    return Bounds(
        upper=_costs(schedule, upper_s, communication_s),
        lower=_costs(schedule, lower_s, communication_s),
        outside_s=median(map(observed_outside_s, _by_step(upper))),
        upper_step_s=median(map(_step_s, _by_step(upper))),
        lower_step_s=median(map(_step_s, _by_step(lower))),
        saving_error_s=math.hypot(*(_error_s([*map(_step_s, _by_step(half))]) for half in (upper, lower))),
    )


def mean_costs(schedule: Schedule, observations: Sequence[Observation]) -> Costs:
    """The costs of actions and messages in equally configured steps: per kind and stage, the median over steps of the
    mean over a step's microbatches and replicas.

    Raises:
        MonitoringError: no rank reported a kind of action on a stage.
    """
    seconds = _seconds(observations)
    for action in build_graph(schedule).actions:
        if (action.kind, action.stage) not in seconds:
            raise MonitoringError(f"no rank reported how long {action.kind} of stage {action.stage} takes")
    return _costs(schedule, seconds, _message_s(schedule, observations))


def _seconds(observations: Iterable[Observation]) -> dict[Key, float]:
    """Per kind and stage, the median over steps of a step's mean."""
    seen: dict[Key, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for observation in observations:
        for token, start_s, end_s in observation.spans:
            action = Action.parse(token)
            seen[action.kind, action.stage][observation.step].append(end_s - start_s)
    return {key: median(mean(times) for times in steps.values()) for key, steps in seen.items()}


def _known(seconds: Mapping[Key, float], key: Key, phases: Phases, phase: Phase) -> float:
    if key in seconds:
        return seconds[key]
    first, last = (
        (phases.warm_up + 1, phases.middle)
        if phase is Phase.UPPER
        else (phases.middle + 1, phases.monitoring)
    )
    kind, stage = key
    raise MonitoringError(
        f"no rank reported how long {kind} of stage {stage} takes in the monitored steps {first} to {last}"
        f" ({phase} bound), so the freeze program cannot be solved"
    )


def _costs(schedule: Schedule, seconds: Mapping[Key, float], communication_s: float) -> Costs:
    return Costs(
        {
            kind: tuple(seconds.get((kind, stage), 0.0) for stage in range(schedule.stages))
            for kind in {kind for kind, _ in seconds}
        },
        communication_s,
    )


def _by_step(observations: Iterable[Observation]) -> Sequence[Sequence[Observation]]:
    steps: dict[int, list[Observation]] = defaultdict(list)
    for seen in observations:
        steps[seen.step].append(seen)
    return [steps[step] for step in sorted(steps)]


def _step_s(step: Sequence[Observation]) -> float:
    return max(seen.step_s for seen in step)


def _error_s(times_s: Sequence[float]) -> float:
    """Standard error of the median of steps, with a spread that single disturbed ones do not move: the median absolute
    deviation, both times the factors of normal noise. Infinite for one step, which tells of none."""
    if len(times_s) < 2:
        return math.inf
    middle_s = median(times_s)
    spread_s = 1.4826 * median(abs(time_s - middle_s) for time_s in times_s)
    return math.sqrt(math.pi / 2 / len(times_s)) * spread_s


def observed_outside_s(step: Sequence[Observation]) -> float:
    """Seconds of a step before its first action and after its last, where the other ranks wait in the commit."""
    timed = [seen for seen in step if seen.spans]
    before_s = min((min(start_s for _, start_s, _ in seen.spans) for seen in timed), default=0.0)
    after_s = min(seen.step_s - max((end_s for _, _, end_s in seen.spans), default=0.0) for seen in step)
    return before_s + after_s


def _message_s(schedule: Schedule, observations: Iterable[Observation]) -> float:
    """Seconds from the end of an action to the start of the action on another rank that waits only for it.

    It is the shortest such time of a pair of ranks in a step. Each rank's clock starts with its window, and ranks do
    not start together. The offset adds to messages one way and subtracts from those the other way, so the mean of both
    ways does not contain it."""
    graph = build_graph(schedule)
    edges = [
        (graph.actions[earlier], graph.actions[node], graph.ranks[earlier], graph.ranks[node])
        for node in range(len(graph.actions))
        for earlier in graph.predecessors[node]
        if graph.crosses_ranks(earlier, node)
    ]
    both_ways: list[float] = []
    for step in _by_step(observations):
        for pipeline in {Place.of(seen.rank, schedule.ranks).pipeline for seen in step}:
            times = {
                Action.parse(token): (start_s, end_s)
                for seen in step
                if Place.of(seen.rank, schedule.ranks).pipeline == pipeline
                for token, start_s, end_s in seen.spans
            }
            shortest: dict[tuple[int, int], float] = {}
            for sender, receiver, source, target in edges:
                if sender in times and receiver in times:
                    wait_s = times[receiver][0] - times[sender][1]
                    shortest[source, target] = min(wait_s, shortest.get((source, target), wait_s))
            both_ways += [
                (wait_s + shortest[target, source]) / 2
                for (source, target), wait_s in shortest.items()
                if source < target and (target, source) in shortest
            ]
    return max(0.0, median(both_ways)) if both_ways else 0.0
