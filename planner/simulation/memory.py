"""Profile + plan + simulation -> the memory of every rank over one step, and its peak.

Counts the storages that training allocates, not what an allocator reserves. The simulation gives the times,
`stage_memory.py` the bytes of a stage, and `planner/schedule/in_flight.py` when an action takes and frees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from planner.freezing import Ratios
from planner.ir import Action, Kind
from planner.plan import Plan
from planner.profile import Cluster, LayerProfile, Profile
from planner.schedule.graph import Graph, build_graph
from planner.schedule.in_flight import Counts, effect_of
from planner.shares import most_parts, parts_kept
from planner.simulation.costs import boundary_bytes, check_fit
from planner.simulation.shard_parts import gradient_bytes, kept_bytes
from planner.simulation.simulate import Simulation
from planner.simulation.snapshot_cost import snapshot_bytes_of_places
from planner.simulation.stage_memory import StageMemory, stage_memory
from planner.simulation.standby_memory import standby_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """The parts of a rank's memory, in bytes."""

    weights: int
    """With buffers."""
    optimizer: int
    statistics: int
    """Of the freezing method, and of samples of the gradient's change."""
    standbys: int
    """Copies of layers of other ranks, with their optimizer state and one step's gradients, and what is sent for such
    copies beside the gradients themselves; those of the pipeline that keeps the most on this rank. Of copies in a GPU's
    host, only the one that is being brought up to date. Where the device's memory is the host's, also snapshots."""
    scratch: int
    """Buffers in which weight gradients are computed before they are added; layers share them. None where each
    microbatch's have memory of their own, in 32 bits."""
    gradients: int
    """From the first weight gradient of a layer to the end of the step; for replicas that this pipeline has executed
    before, and for microbatches whose gradients it keeps apart, from the start. Where they are shared out: the sums of
    the own shards, and what is under way."""
    activations: int
    """Per microbatch from the start of its forward to the end of its input gradient; a layer that recomputes keeps only
    its inputs until its recompute starts."""
    weight_grad_holds: int
    """Per microbatch from the end of its input gradient to the end of its weight gradient; frozen shares hold
    nothing."""
    messages: int
    """Outputs that the next stage has not taken in or that the outbox still holds, unless they are activations, on the
    rank that made them; and the memory of receives that are posted ahead."""
    working: int
    """Of the running action."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


OverTime = tuple[tuple[float, MemoryParts], ...]
"""(time_s, the parts of a rank's memory from then on), from 0."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's memory over one step."""

    timeline: tuple[tuple[float, int], ...]
    """(time_s, bytes from then on), from 0; one entry per moment of change. During an action, the most that it
    needs."""
    peak: MemoryParts
    """At the first moment of the peak."""
    peak_bytes: int


@dataclass(frozen=True)
class Memory:
    """The memory of all pipeline ranks over one step."""

    ranks: tuple[RankMemory, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(rank.peak_bytes for rank in self.ranks)


class _Part(IntEnum):
    """Index of each part that changes during a step."""

    GRADIENTS = 0
    ACTIVATIONS = 1
    HOLDS = 2
    MESSAGES = 3
    WORKING = 4


_Change = tuple[float, _Part, int]
"""(time_s, part, bytes more)."""
_Sizes = list[tuple[_Part, Sequence[int]]]
"""(part, bytes more by microbatch)."""


def memory(
    profile: Profile,
    plan: Plan,
    simulation: Simulation,
    ratios: Ratios | None = None,
    *,
    pipeline: int | None = None,
) -> Memory:
    """The memory of every pipeline rank while `simulation` runs.

    Args:
        ratios: `ratios[layer][microbatch]`, the frozen share of each weight gradient; None freezes nothing.
        pipeline: whose simulation it is; None: of any.

    Raises:
        ValueError: the arguments do not fit together.
    """
    return Memory(tuple(_add_up(*rank) for rank in _ranks(profile, plan, simulation, ratios, pipeline)))


def memory_over_time(
    profile: Profile,
    plan: Plan,
    simulation: Simulation,
    ratios: Ratios | None = None,
    *,
    pipeline: int | None = None,
) -> tuple[OverTime, ...]:
    """Per rank, the parts of its memory over time: an entry per moment of change, and one more for memory that is
    needed at that moment only. The arguments are those of `memory`."""
    return tuple(_over_time(*rank) for rank in _ranks(profile, plan, simulation, ratios, pipeline))


def _ranks(
    profile: Profile, plan: Plan, simulation: Simulation, ratios: Ratios | None, pipeline: int | None
) -> Iterator[tuple[MemoryParts, list[_Change]]]:
    """Per rank, its memory before the step, and what the step adds and frees."""
    schedule = simulation.schedule
    check_fit(profile, plan, schedule.stages, ratios, schedule.microbatches)
    graph = build_graph(schedule)
    fullest = _fullest(profile, plan)
    stages = stage_memory(
        profile,
        plan,
        ratios,
        schedule.microbatches,
        schedule.frozen_stages,
        splits=any(kind is Kind.WEIGHT_GRAD for kind, _, _ in graph.by_kind_and_stage),
        places=[each.place for each in fullest],
    )
    _check_recomputes(graph, plan, schedule.frozen_stages)
    changes = _Changes(graph, simulation, stages, *boundary_bytes(profile, plan), profile.cluster)
    layers: list[list[LayerProfile]] = [[] for _ in schedule.programs]
    for (first, stop), rank in zip(plan.layers, plan.stage_ranks, strict=True):
        layers[rank] += profile.model.layers[first:stop]
    kept_parts = most_parts(plan) if pipeline is None else parts_kept(plan, pipeline)
    for rank, (own, full) in enumerate(zip(layers, fullest, strict=True)):
        formed_in_place = plan.shard == "gradients" and profile.model.precision == "float32"
        steady = _steady(own, full.kept, full.copies, kept_parts - 1, scratch=not formed_in_place)
        yield steady, changes.of_rank(rank)


class _Fullest(NamedTuple):
    """Of a rank and its siblings, the one that keeps most."""

    place: int
    kept: tuple[int, int, int]
    """(weights, optimizer state, statistics and samples)."""
    copies: int


def _fullest(profile: Profile, plan: Plan) -> list[_Fullest]:
    """By rank."""
    copies = standby_bytes(profile, plan)
    if all(device.kind != "cuda" for device in profile.cluster.devices):  # their memory is the host's
        snapshots = snapshot_bytes_of_places(profile, plan)
        copies = tuple(sum(both) for both in zip(copies, snapshots, strict=True))

    def total(each: _Fullest) -> int:
        pieces = plan.pieces_of_place(each.place) if plan.shard == "gradients" else ()
        sums = sum(gradient_bytes(profile.model.layers[piece.layer], piece) for piece in pieces)
        return each.copies + sum(each.kept) + sums

    found: list[_Fullest] = []
    for rank in range(plan.pipeline_ranks):
        kept = {place: kept_bytes(profile, plan, place) for place in plan.unlike_siblings(rank)}
        of_places = (
            _Fullest(place, kept.get(place, kept[rank]), copies[place]) for place in plan.siblings(rank)
        )
        found.append(max(of_places, key=total))
    return found


class _Changes:
    """Goes through all actions and records what each takes and frees."""

    def __init__(
        self,
        graph: Graph,
        simulation: Simulation,
        stages: Sequence[StageMemory],
        forward_bytes: Sequence[int],
        backward_bytes: Sequence[int],
        cluster: Cluster,
    ) -> None:
        self._graph = graph
        self._start_s, self._end_s = simulation.start_s, simulation.end_s
        self._stages = stages
        self._forward_bytes, self._backward_bytes = forward_bytes, backward_bytes
        self._frozen_stages = simulation.schedule.frozen_stages
        ranks = range(simulation.schedule.ranks)
        self._own: list[list[_Change]] = [[] for _ in ranks]
        self._released: list[list[_Change]] = [[] for _ in ranks]
        self._left_s = self._leave(cluster.sends_kept)
        for node, action in enumerate(graph.actions):
            self._compute(node, action)
            self._send(node, action)
        if cluster.receives_ahead:
            self._receive(cluster.receives_ahead)

    def of_rank(self, rank: int) -> list[_Change]:
        """By time; at one moment, what other ranks release comes first, then the rank's own in program order."""
        return sorted(self._released[rank] + self._own[rank], key=itemgetter(0))

    def _compute(self, node: int, action: Action) -> None:
        starts, ends = self._taken[action.kind, action.stage]
        own, index = self._own[self._graph.ranks[node]], action.index
        for at_s, changes in ((self._start_s[node], starts), (self._end_s[node], ends)):
            for part, sizes in changes:
                if size := sizes[index]:
                    own.append((at_s, part, size))

    @cached_property
    def _taken(self) -> dict[tuple[Kind, int], tuple[_Sizes, _Sizes]]:
        """(kind, stage) -> what an action takes and frees as it starts, and as it ends."""
        found: dict[tuple[Kind, int], tuple[_Sizes, _Sizes]] = {}
        for kind, number, nodes in self._graph.by_kind_and_stage:
            stage = self._stages[number]
            start, end = effect_of(self._graph.actions[nodes[0]], self._frozen_stages)
            working = [stage.working(kind)] * len(stage.held)
            found[kind, number] = (
                [*_sizes(stage, start), (_Part.WORKING, working)],
                [(_Part.WORKING, [-size for size in working]), *_sizes(stage, end)],
            )
        return found

    def _send(self, node: int, action: Action) -> None:
        """An output stays on its rank until the next stage has taken it in and the rank's outbox has freed it."""
        consumer = self._graph.consumers[node]
        if consumer is None:
            return
        from_s, until_s = self._end_s[node], max(self._start_s[consumer], self._left_s.get(node, 0.0))
        if action.kind is Kind.FORWARD:
            size = self._forward_bytes[action.stage]
            if self._stages[action.stage].keeps_output:
                # It is one of the activations until the backward ends.
                from_s = self._end_s[self._backward_of(action)]
        else:
            size = self._backward_bytes[action.stage]
        if size and until_s > from_s:
            rank = self._graph.ranks[node]
            self._own[rank].append((from_s, _Part.MESSAGES, size))
            self._released[rank].append((until_s, _Part.MESSAGES, -size))

    def _backward_of(self, forward: Action) -> int:
        nodes = self._graph.node_of
        whole = Action(Kind.BACKWARD, forward.stage, forward.index)
        return nodes[whole] if whole in nodes else nodes[replace(whole, kind=Kind.INPUT_GRAD)]

    def _leave(self, kept: int) -> dict[int, float]:
        """When the sender of each message to another rank frees it.

        A sender keeps up to `kept` messages that have left; with the next one it frees all but half of them, and the
        rest at the end of its window.
        """
        graph, left_s = self._graph, dict[int, float]()
        if not kept:
            return left_s
        of_rank: list[list[int]] = [[] for _ in self._own]
        for node, rank in enumerate(graph.ranks):
            of_rank[rank].append(node)
        for own in of_rank:
            held: list[int] = []
            for node in own:
                consumer = graph.consumers[node]
                if consumer is None or not graph.crosses_ranks(node, consumer):
                    continue
                held.append(node)
                if len(held) > kept:
                    gone, held = held[: -(kept // 2)], held[-(kept // 2) :]
                    left_s.update((earlier, self._end_s[node]) for earlier in gone)
            left_s.update((node, self._end_s[own[-1]]) for node in held)
        return left_s

    def _receive(self, ahead: int) -> None:
        """From the start of the step, each stream has memory for its next `ahead` messages, if there are as many."""
        graph = self._graph
        for kind, stage, nodes in graph.by_kind_and_stage:
            taken = [node for node in nodes if graph.consumers[node] is not None]
            if not taken:
                continue
            rank = graph.ranks[graph.consumers[taken[0]] or 0]
            if rank == graph.ranks[taken[0]]:
                continue
            size = (self._forward_bytes if kind is Kind.FORWARD else self._backward_bytes)[stage]
            self._released[rank].append((0.0, _Part.MESSAGES, min(ahead, len(taken)) * size))
            for node in taken[-ahead:]:
                consumer = graph.consumers[node]
                assert consumer is not None
                self._released[rank].append((self._start_s[consumer], _Part.MESSAGES, -size))


def _sizes(stage: StageMemory, counts: Counts) -> _Sizes:
    """What `counts` take, or free, of a stage; parts of which they take nothing are left out."""
    activations, rebuilt, waiting, gradients = counts
    parts: _Sizes = [
        (_Part.GRADIENTS, [gradients * size for size in stage.new_gradients]),
        (_Part.ACTIVATIONS, [activations * stage.kept + rebuilt * stage.rebuilt] * len(stage.held)),
        (_Part.HOLDS, [waiting * size for size in stage.held]),
    ]
    return [(part, sizes) for part, sizes in parts if any(sizes)]


def _check_recomputes(graph: Graph, plan: Plan, frozen_stages: int) -> None:
    again = {stage for kind, stage, _ in graph.by_kind_and_stage if kind is Kind.RECOMPUTE}
    for stage, (first, stop) in enumerate(plan.layers):
        layers = [layer for layer in plan.recompute if first <= layer < stop]
        if layers and stage not in again and stage >= frozen_stages:
            raise ValueError(
                f"the plan recomputes layers {layers} of stage {stage}, the schedule has no R for it"
            )


def _steady(
    layers: Sequence[LayerProfile],
    kept: tuple[int, int, int],
    standbys: int,
    gradients_apart: int,
    *,
    scratch: bool,
) -> MemoryParts:
    scratches: dict[tuple[int, ...], int] = {}
    for layer in layers if scratch else ():
        for matrix in layer.matrices:
            scratches[matrix.shape] = max(scratches.get(matrix.shape, 0), matrix.scratch_bytes)
    return MemoryParts(
        weights=kept[0],
        optimizer=kept[1],
        statistics=kept[2],
        standbys=standbys,
        scratch=sum(scratches.values()),
        gradients=gradients_apart * sum(layer.gradient_bytes for layer in layers),
        activations=0,
        weight_grad_holds=0,
        messages=0,
        working=0,
    )


def _changing(steady: MemoryParts) -> list[int]:
    """By `_Part`."""
    return [steady.gradients, 0, 0, 0, 0]


def _with(steady: MemoryParts, used: Sequence[int]) -> MemoryParts:
    return replace(
        steady,
        gradients=used[_Part.GRADIENTS],
        activations=used[_Part.ACTIVATIONS],
        weight_grad_holds=used[_Part.HOLDS],
        messages=used[_Part.MESSAGES],
        working=used[_Part.WORKING],
    )


def _add_up(steady: MemoryParts, changes: Iterable[_Change]) -> RankMemory:
    used, at_peak = _changing(steady), _changing(steady)
    total = most = steady.total
    levels = [(0.0, total)]
    for time_s, part, size in changes:
        used[part] += size
        total += size
        if total > most:
            most, at_peak = total, list(used)
        if time_s == levels[-1][0]:
            levels[-1] = (time_s, total)
        else:
            levels.append((time_s, total))
    return RankMemory(
        timeline=(levels[0], *(now for before, now in pairwise(levels) if now[1] != before[1])),
        peak=_with(steady, at_peak),
        peak_bytes=most,
    )


def _over_time(steady: MemoryParts, changes: Iterable[_Change]) -> OverTime:
    used = _changing(steady)
    levels = [(0.0, list(used))]
    for time_s, at_once in groupby(changes, key=itemgetter(0)):
        before = most = list(used)
        for _, part, size in at_once:
            used[part] += size
            if sum(used) > sum(most):
                most = list(used)
        if time_s == 0.0:
            levels.clear()
        if sum(most) > max(sum(before), sum(used)):
            levels.append((time_s, most))
        levels.append((time_s, list(used)))
    return tuple((time_s, _with(steady, used)) for time_s, used in levels)
