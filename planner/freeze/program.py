"""TimelyFreeze's linear program: which share of each action's weight gradients to skip (section 3.2).

Knows time bounds and a schedule; not which parameters freeze, not when, and not the source of the times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.freeze.linear_program import FreezeModel, Instance
from planner.freezing import Ratios
from planner.ir import FREEZABLE, Action, Schedule
from planner.plan import Plan
from planner.schedule.graph import Graph, build_graph
from planner.simulation.longest_path import Floats, Integers, Network, build_network
from planner.simulation.simulate import Costs

_SLACK = 1e-7
"""Share of the makespan below which an action's slack counts as 0; above the solver's tolerance."""


@dataclass(frozen=True, kw_only=True)
class FreezeSolution:
    """Freeze ratios, and the resulting makespan."""

    ratios: tuple[tuple[int, int, float], ...]
    """(stage, microbatch, ratio) of every action that computes weight gradients; ratios in [0, 1]."""
    start_s: tuple[float, ...]
    """Per node of the schedule's graph, its earliest start."""
    unfrozen_s: float
    """Makespan with nothing frozen."""
    solved_s: float
    """Makespan with `ratios`."""
    all_frozen_s: float
    """Makespan with everything frozen."""
    critical: tuple[Action, ...]
    """With `ratios`, the actions whose delay delays the end of the window."""
    mean_per_stage: tuple[float, ...]
    """Mean ratio over a stage's freezable actions, at most `r_max`; 0 for a stage without any."""
    duals: tuple[float, ...]
    """Per stage, seconds by which a window shortens per unit of the stage's `r_max`."""


LayerRatios = dict[tuple[int, int], float]
"""(layer, microbatch) -> ratio."""


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage whose weight gradients can be frozen."""

    parts: tuple[tuple[int, float, float], ...]
    """(layer, part of the time of the stage's weight gradients, share of a step's progress that freezing it costs). A
    layer has one or several. Parts of a stage add up to 1 at most, and so do shares of all stages."""


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Times of a schedule's actions, and what can be saved of them."""

    network: Network
    longest: Floats
    """float[A], with nothing frozen."""
    shortest: Floats
    """float[A], with everything frozen."""
    nodes: Integers
    """int[K], the actions that compute weight gradients."""
    savings: Floats
    """float[K], seconds that freezing all of them saves."""
    stage_of: Integers
    """int[K], their stages."""

    def count_of(self, stages: int) -> Integers:
        """int[S], per stage the actions that freezing shortens."""
        return np.bincount(self.stage_of[self.savings > 0], minlength=stages)


class FreezeProgram:
    """The program of one schedule, for repeated solves as times change: each starts from the previous basis."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._graph = build_graph(schedule)
        self._model = FreezeModel()
        self._plain: dict[float, Network] = {}

    def solve(self, upper: Costs, lower: Costs, r_max: float) -> FreezeSolution:
        """Minimise the makespan, then the sum of ratios. This is the meaning of the small lambda in eq. 6; a later
        solve holds the makespan to within 1e-8 of the least.

        A B or a W takes between its time in `lower` and its time in `upper`. If it is not shorter in `lower`, and for
        all other kinds, it takes its time in `upper`. Messages are those of `upper`. The mean ratio over a stage's
        freezable actions is at most `r_max` (constraint [4] as corrected: over freezable actions only).

        Raises:
            ValueError: `r_max` is not in [0, 1]; a time is missing, negative or not finite; nothing can be frozen.
        """
        if not 0 <= r_max <= 1:
            raise ValueError(
                f"r_max is {r_max}: it is the largest mean share of a stage's weight gradients that is frozen,"
                " and must lie in [0, 1]"
            )
        times = self._times(upper, lower)
        count = times.count_of(self.schedule.stages)
        optimum = self._model.solve(
            Instance(
                network=times.network,
                longest=times.longest,
                freezable=times.nodes,
                savings=times.savings,
                limit_of=times.stage_of,
                weights=np.ones(len(times.nodes)),
                limits=(r_max * count).astype(np.float64),
            )
        )
        ratios = np.where(times.savings > 0, optimum.ratios, 0.0)
        return self._solution(times, ratios, tuple((optimum.limit_values * count).tolist()))

    def solve_for_accuracy(
        self, upper: Costs, lower: Costs, layers: Sequence[StageLayers], *, rest_s: float, least_update: float
    ) -> tuple[FreezeSolution, LayerRatios]:
        """Minimise the time to a given accuracy: the step over the share of its progress that is left (eq. 13), which
        is linear in ratios where each layer of a stage has its own.

        Args:
            layers: of each stage.
            rest_s: seconds of a step outside of the window.
            least_update: the least share of a step's progress that is to be left, in (0, 1].

        Returns:
            The solution, in which a stage's ratio is the mean over its layers by their times; and the layers' ratios.

        Raises:
            ValueError: as `solve`; `least_update` is not in (0, 1]; no layer of a stage that forms weight gradients
                takes time.
        """
        if not 0 < least_update <= 1:
            raise ValueError(
                f"least_update is {least_update}: it is the least share of a step's progress that is left, and must be"
                " above 0 and at most 1"
            )
        times = self._times(upper, lower)
        microbatches = np.bincount(times.stage_of, minlength=self.schedule.stages)
        parts = [
            (number, layer, part, energy / microbatches[stage])
            for number, stage in enumerate(times.stage_of.tolist())
            for layer, part, energy in layers[stage].parts
        ]
        if not parts:
            raise ValueError(
                f"{self.schedule.name}: no layer of a stage that forms weight gradients takes time for them by the"
                " profile. Turn freezing off, or profile again"
            )
        action_of, layer_of, part_of, shares = (np.array(column) for column in zip(*parts, strict=True))
        savings = times.savings[action_of] * part_of
        solved = self._model.solve_quotient(
            Instance(
                network=times.network,
                longest=times.longest,
                freezable=times.nodes[action_of],
                savings=savings,
                limit_of=np.zeros(len(parts), dtype=np.int64),
                weights=shares,
                limits=np.array([1.0 - least_update]),
            ),
            shares,
            rest_s,
        )
        found = np.where(savings > 0, solved, 0.0)
        ratios = np.bincount(action_of, weights=found * part_of, minlength=len(times.nodes)).astype(
            np.float64
        )
        actions = self._graph.actions
        frozen, of = defaultdict[tuple[int, int], float](float), defaultdict[tuple[int, int], float](float)
        for layer, action, ratio, part in zip(layer_of, action_of, found, part_of, strict=True):
            place = (int(layer), actions[times.nodes[action]].index)
            frozen[place] += float(ratio * part)
            of[place] += float(part)
        of_layers = {place: min(1.0, frozen[place] / of[place]) for place in frozen}
        return self._solution(times, ratios, (0.0,) * self.schedule.stages), of_layers

    def _times(self, upper: Costs, lower: Costs) -> _Times:
        graph = self._graph
        longest = _seconds(upper, graph, "with nothing frozen")
        freezable = [node for node, action in enumerate(graph.actions) if action.kind in FREEZABLE]
        shortest_of = _seconds(lower, graph, "with everything frozen")
        shortest = longest.copy()
        shortest[freezable] = np.minimum(longest, shortest_of)[freezable]
        savings = longest - shortest
        if not savings.any():
            raise ValueError(_nothing_to_freeze(self.schedule, bool(freezable)))
        nodes = np.array(freezable)
        return _Times(
            network=self._network(upper, shortest),
            longest=longest,
            shortest=shortest,
            nodes=nodes,
            savings=savings[nodes],
            stage_of=np.array([graph.actions[node].stage for node in freezable]),
        )

    def _solution(self, times: _Times, ratios: Floats, duals: tuple[float, ...]) -> FreezeSolution:
        network, actions = times.network, self._graph.actions
        seconds = times.longest.copy()
        seconds[times.nodes] -= times.savings * ratios
        start = network.starts(seconds.tolist())
        sums = np.bincount(times.stage_of, weights=ratios, minlength=self.schedule.stages)
        count = times.count_of(self.schedule.stages)
        return FreezeSolution(
            ratios=tuple(
                (actions[node].stage, actions[node].index, float(ratio))
                for node, ratio in zip(times.nodes.tolist(), ratios, strict=True)
            ),
            start_s=tuple(start[: network.actions]),
            unfrozen_s=network.starts(times.longest.tolist())[network.sink],
            solved_s=start[network.sink],
            all_frozen_s=network.starts(times.shortest.tolist())[network.sink],
            critical=_critical(network, seconds.tolist(), start),
            mean_per_stage=tuple((sums / np.maximum(count, 1)).tolist()),
            duals=duals,
        )

    def _network(self, costs: Costs, shortest: Floats) -> Network:
        """The network; kept between solves where it cannot change because messages occupy no link."""
        if costs.messages is not None or costs.blocking:
            return build_network(self.schedule, self._graph, costs, shortest.tolist())
        if costs.communication_s not in self._plain:
            self._plain = {
                costs.communication_s: build_network(self.schedule, self._graph, costs, shortest.tolist())
            }
        return self._plain[costs.communication_s]


def solve(schedule: Schedule, upper: Costs, lower: Costs, r_max: float) -> FreezeSolution:
    """Solve the freeze program once; see `FreezeProgram.solve`."""
    return FreezeProgram(schedule).solve(upper, lower, r_max)


def layer_ratios(shares: Iterable[tuple[int, int, float]], plan: Plan) -> Ratios:
    """`ratios[layer][microbatch]` from `shares`, (stage, microbatch, ratio) of every action that computes weight
    gradients. Every layer of a stage has the stage's ratio. Layers of a frozen prefix have 1."""
    of_stage = [[1.0] * plan.microbatches for _ in range(plan.stages)]
    for stage, microbatch, ratio in shares:
        of_stage[stage][microbatch] = ratio
    return tuple(
        tuple(of_stage[stage]) for stage, (first, stop) in enumerate(plan.layers) for _ in range(first, stop)
    )


def _seconds(costs: Costs, graph: Graph, when: str) -> Floats:
    """float[A]: seconds of every action.

    Raises:
        ValueError: one is missing, negative or not finite.
    """
    seconds = np.array(costs.of_nodes(graph), dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))
    if len(wrong):
        node = int(wrong[0])
        raise ValueError(
            f"{graph.actions[node]} takes {seconds[node]} s {when}; a measured time is finite and not negative:"
            " measure again"
        )
    return seconds


def _nothing_to_freeze(schedule: Schedule, forms_gradients: bool) -> str:
    if not forms_gradients:
        return (
            f"{schedule.name}: the schedule has no weight gradients to skip: it has neither B nor W"
            f" ({schedule.frozen_stages} of {schedule.stages} stages are frozen). Turn freezing off"
        )
    return (
        f"{schedule.name}: freezing saves no time: no B or W takes less with everything frozen than with nothing"
        " frozen. Turn freezing off, or measure again"
    )


def _critical(network: Network, seconds: Sequence[float], start: Sequence[float]) -> tuple[Action, ...]:
    makespan_s = start[network.sink]
    latest = network.latest_starts(seconds, makespan_s)
    return tuple(
        action
        for node, action in enumerate(network.graph.actions)
        if latest[node] - start[node] <= _SLACK * makespan_s
    )
