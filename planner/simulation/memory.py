"""Profile + plan + simulation -> the device memory of every rank over one step, and its peak.

Counts the storages that training allocates, not what an allocator reserves. The simulation gives the times,
`stage_memory.py` the bytes of a stage, and `planner/schedule/in_flight.py` when an action takes and frees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.freezing import Ratios
from planner.ir import ActionKind, Schedule
from planner.plan import Plan
from planner.profile import Cluster, LayerProfile, Profile
from planner.schedule.action_arrays import NONE, Integers
from planner.schedule.graph import Graph, build_graph
from planner.schedule.in_flight import Counts, changes_of
from planner.shares import gradients_held, most_held
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
    """Statistics of the freezing method, and samples of the gradient's change."""
    standbys: int
    """Copies of layers of other ranks, with their optimizer state and one step's gradients, and what is sent for such
    copies beside the gradients themselves; those of the pipeline that keeps the most on this rank. Of copies in a GPU's
    host, only the one that is being brought up to date. Where the device's memory is the host's, also snapshots."""
    scratch: int
    """Buffers in which weight gradients are computed before they are added; layers share them. None where each
    microbatch's have memory of their own, in 32 bits."""
    gradients: int
    """The sums of the layers that form any, whose memory stays from step to step; also those of replicas that this
    pipeline has executed before, and of microbatches whose gradients it keeps apart. Where they are shared out: the
    sums of the own shards, and what is under way."""
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
    """Working memory of the running action."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


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


@dataclass(frozen=True)
class _Changes:
    """Memory that a rank takes and frees during a step, in the order in which it counts; N changes."""

    at_s: NDArray[np.float64]
    parts: Integers
    """`_Part` of each."""
    sizes: Integers
    """Bytes more."""


_SLOTS = 16
"""Numbers for the changes of one action on its own rank; it makes fewer."""
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


def most_bytes(
    profile: Profile, plan: Plan, schedule: Schedule, in_flight: Sequence[Sequence[Counts]]
) -> tuple[int, ...]:
    """Per pipeline rank, no less than its peak with nothing frozen: as if all that it ever holds came together. Needs
    no simulation; with uneven shares it does not hold.

    Args:
        in_flight: per stage, the largest counts of microbatches that it holds; see `largest_counts`.
    """
    fullest = _fullest(profile, plan)
    splits = schedule.splits_backward
    stages = stage_memory(
        profile,
        plan,
        None,
        schedule.microbatches,
        schedule.frozen_stages,
        splits=splits,
        places=[each.place for each in fullest],
    )
    forward_bytes, backward_bytes = boundary_bytes(profile, plan)
    layers = _layers_of_ranks(profile, plan)
    apart = most_held(plan) - 1
    most = [
        _steady(own, full.kept, full.copies, apart, scratch=True).total
        for own, full in zip(layers, fullest, strict=True)
    ]
    working = [0] * plan.pipeline_ranks
    for number, (stage, rank) in enumerate(zip(stages, plan.stage_ranks, strict=True)):
        held = max(stage.held)
        most[rank] += stage.gradients + max(
            counts.activations * stage.kept + counts.rebuilt * stage.rebuilt + counts.waiting * held
            for counts in in_flight[number]
        )
        arriving = (forward_bytes[number - 1] if number else 0) + (
            backward_bytes[number + 1] if number + 1 < len(stages) else 0
        )
        most[rank] += schedule.microbatches * (forward_bytes[number] + backward_bytes[number])
        most[rank] += min(schedule.microbatches, profile.cluster.receives_ahead) * arriving
        working[rank] = max(working[rank], *(stage.working(kind) for kind in ActionKind))
    return tuple(a + b for a, b in zip(most, working, strict=True))


def _layers_of_ranks(profile: Profile, plan: Plan) -> list[list[LayerProfile]]:
    layers: list[list[LayerProfile]] = [[] for _ in range(plan.pipeline_ranks)]
    for (first, stop), rank in zip(plan.layers, plan.stage_ranks, strict=True):
        layers[rank] += profile.model.layers[first:stop]
    return layers


def _ranks(
    profile: Profile, plan: Plan, simulation: Simulation, ratios: Ratios | None, pipeline: int | None
) -> Iterator[tuple[MemoryParts, _Changes]]:
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
        splits=any(kind is ActionKind.WEIGHT_GRAD for kind, _, _ in graph.by_kind_and_stage),
        places=[each.place for each in fullest],
    )
    _check_recomputes(graph, plan, schedule.frozen_stages)
    changes = _Recorder(graph, simulation, stages, *boundary_bytes(profile, plan), profile.cluster).by_rank()
    layers = _layers_of_ranks(profile, plan)
    held = most_held(plan) if pipeline is None else gradients_held(plan, pipeline)
    for own, full, of_rank in zip(layers, fullest, changes, strict=True):
        formed_in_place = plan.shard == "gradients" and profile.model.precision == "float32"
        steady = _steady(own, full.kept, full.copies, held - 1, scratch=not formed_in_place)
        yield steady, of_rank


class _Fullest(NamedTuple):
    """Place that keeps most, of a rank and its siblings."""

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


class _Recorder:
    """Records what each action takes and frees."""

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
        self._start_s, self._end_s = np.array(simulation.start_s), np.array(simulation.end_s)
        self._stages = stages
        self._forward_bytes, self._backward_bytes = forward_bytes, backward_bytes
        self._frozen_stages = simulation.schedule.frozen_stages
        self._count = simulation.schedule.ranks
        self._indices = np.array([action.index for action in graph.actions], dtype=np.int64)
        self._consumers = np.array([NONE if node is None else node for node in graph.consumers])
        # (rank, moment, number of the change among those of one moment, part, bytes more)
        self._found: list[tuple[Integers, NDArray[np.float64], Integers, Integers, Integers]] = []
        left_s = self._leave(cluster.sends_kept)
        for kind, stage, of_kind in graph.by_kind_and_stage:
            nodes = np.array(of_kind)
            self._compute(kind, stage, nodes)
            if kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
                sums = self._stages[stage].gradients
                self._record(graph.ranks[nodes[0]], np.zeros(1), np.zeros(1, int), _Part.GRADIENTS, sums)
            self._send(kind, stage, nodes[self._consumers[nodes] != NONE], left_s)
        if cluster.receives_ahead:
            self._receive(cluster.receives_ahead)

    def by_rank(self) -> Iterator[_Changes]:
        """By time; at one moment, what other ranks release comes first, then the rank's own in program order."""
        ranks, at_s, numbers, parts, sizes = (np.concatenate(each) for each in zip(*self._found, strict=True))
        order = np.lexsort((numbers, at_s, ranks))
        stops = np.searchsorted(ranks[order], np.arange(self._count + 1))
        for begin, stop in pairwise(stops.tolist()):
            own = order[begin:stop]
            yield _Changes(at_s[own], parts[own], sizes[own])

    def _record(
        self,
        ranks: Integers | int,
        at_s: NDArray[np.float64],
        numbers: Integers,
        part: _Part,
        sizes: Integers | int,
    ) -> None:
        count = len(at_s)
        self._found.append(
            (_filled(ranks, count), at_s, numbers, _filled(int(part), count), _filled(sizes, count))
        )

    def _own(self, nodes: Integers, slot: int) -> Integers:
        """The numbers of the `slot`th changes that actions make on their own rank: after all that others release."""
        return (len(self._graph.actions) + nodes) * _SLOTS + slot

    def _compute(self, kind: ActionKind, number: int, nodes: Integers) -> None:
        """Records what the actions take and free as they start, and as they end."""
        stage, rank, indices = self._stages[number], self._graph.ranks[nodes[0]], self._indices[nodes]
        start, end = changes_of(self._graph.actions[nodes[0]], self._frozen_stages)
        working = [stage.working(kind)] * len(stage.held)
        starts: _Sizes = [*_sizes(stage, start), (_Part.WORKING, working)]
        ends: _Sizes = [(_Part.WORKING, [-size for size in working]), *_sizes(stage, end)]
        slot = 0
        for at_s, changes in ((self._start_s[nodes], starts), (self._end_s[nodes], ends)):
            for part, of_microbatch in changes:
                sizes = np.array(of_microbatch, dtype=np.int64)[indices]
                some = sizes != 0
                self._record(rank, at_s[some], self._own(nodes[some], slot), part, sizes[some])
                slot += 1

    def _send(self, kind: ActionKind, number: int, nodes: Integers, left_s: NDArray[np.float64]) -> None:
        """An output stays on its rank until the next stage has taken it in and the rank's outbox has freed it."""
        if not len(nodes):
            return
        rank, from_s = self._graph.ranks[nodes[0]], self._end_s[nodes]
        until_s = np.maximum(self._start_s[self._consumers[nodes]], left_s[nodes])
        if kind is ActionKind.FORWARD:
            size = self._forward_bytes[number]
            if self._stages[number].keeps_output:
                # It is one of the activations until the backward ends.
                from_s = self._end_s[self._backwards_of(number, nodes)]
        else:
            size = self._backward_bytes[number]
        if size:
            some = until_s > from_s
            nodes = nodes[some]
            self._record(rank, from_s[some], self._own(nodes, _SLOTS - 1), _Part.MESSAGES, size)
            self._record(rank, until_s[some], nodes, _Part.MESSAGES, -size)

    def _backwards_of(self, stage: int, forwards: Integers) -> Integers:
        backward_of = np.full(int(self._indices.max()) + 1, NONE)
        for kind in (ActionKind.INPUT_GRAD, ActionKind.BACKWARD):
            nodes = np.array(self._nodes.get((kind, stage), ()), dtype=np.int64)
            backward_of[self._indices[nodes]] = nodes
        return backward_of[self._indices[forwards]]

    @cached_property
    def _nodes(self) -> dict[tuple[ActionKind, int], tuple[int, ...]]:
        return {(kind, stage): nodes for kind, stage, nodes in self._graph.by_kind_and_stage}

    def _leave(self, kept: int) -> NDArray[np.float64]:
        """When the sender of each message to another rank frees it, by node; 0 where that is no matter.

        A sender keeps up to `kept` messages that have left; with the next one it frees all but half of them, and the
        rest at the end of its window.
        """
        graph = self._graph
        left_s = np.zeros(len(graph.actions))
        if not kept:
            return left_s
        ranks, consumers = np.array(graph.ranks), self._consumers
        crosses = (consumers != NONE) & (ranks[consumers] != ranks)
        for rank in range(self._count):
            own = np.flatnonzero(ranks == rank)
            held: list[int] = []
            for node in own[crosses[own]].tolist():
                held.append(node)
                if len(held) > kept:
                    gone, held = held[: -(kept // 2)], held[-(kept // 2) :]
                    left_s[gone] = self._end_s[node]
            left_s[held] = self._end_s[own[-1]]
        return left_s

    def _receive(self, ahead: int) -> None:
        """From the start of the step, each stream has memory for its next `ahead` messages, if there are as many."""
        graph = self._graph
        number = len(graph.actions)
        for kind, stage, of_kind in graph.by_kind_and_stage:
            nodes = np.array(of_kind)
            consumers = self._consumers[nodes]
            taken = consumers[consumers != NONE]
            if not len(taken):
                continue
            rank = graph.ranks[taken[0]]
            if rank == graph.ranks[nodes[0]]:
                continue
            size = (self._forward_bytes if kind is ActionKind.FORWARD else self._backward_bytes)[stage]
            last = taken[-ahead:]
            numbers = number + np.arange(len(last) + 1)
            number += len(numbers)
            self._record(rank, np.zeros(1), numbers[:1], _Part.MESSAGES, min(ahead, len(taken)) * size)
            self._record(rank, self._start_s[last], numbers[1:], _Part.MESSAGES, -size)


def _filled(one_or_all: Integers | int, count: int) -> Integers:
    return np.full(count, one_or_all) if isinstance(one_or_all, int) else one_or_all


def _sizes(stage: StageMemory, counts: Counts) -> _Sizes:
    """Memory of a stage that `counts` take, or free; parts of which they take nothing are left out."""
    activations, rebuilt, waiting, _ = counts
    parts: _Sizes = [
        (_Part.ACTIVATIONS, [activations * stage.kept + rebuilt * stage.rebuilt] * len(stage.held)),
        (_Part.HOLDS, [waiting * size for size in stage.held]),
    ]
    return [(part, sizes) for part, sizes in parts if any(sizes)]


def _check_recomputes(graph: Graph, plan: Plan, frozen_stages: int) -> None:
    again = {stage for kind, stage, _ in graph.by_kind_and_stage if kind is ActionKind.RECOMPUTE}
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
        gradients=gradients_apart * sum(layer.summed_bytes for layer in layers),
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


def _add_up(steady: MemoryParts, changes: _Changes) -> RankMemory:
    totals = steady.total + np.cumsum(changes.sizes)
    at_peak, most = _changing(steady), steady.total
    if len(totals) and int(totals.max()) > most:
        first = int(totals.argmax())
        most = int(totals[first])
        until, sizes = changes.parts[: first + 1], changes.sizes[: first + 1]
        at_peak = [
            before + int(sizes[until == part].sum()) for part, before in zip(_Part, at_peak, strict=True)
        ]
    # The last total of each moment, and the first of the step where nothing changes at once.
    last = np.ones(len(totals), dtype=bool)
    last[:-1] = changes.at_s[1:] != changes.at_s[:-1]
    at_s, levels = changes.at_s[last], totals[last]
    if not len(at_s) or at_s[0] != 0.0:
        at_s, levels = np.concatenate([[0.0], at_s]), np.concatenate([[steady.total], levels])
    new = np.ones(len(levels), dtype=bool)
    new[1:] = levels[1:] != levels[:-1]
    return RankMemory(
        timeline=tuple(zip(at_s[new].tolist(), levels[new].tolist(), strict=True)),
        peak=_with(steady, at_peak),
        peak_bytes=most,
    )


def _over_time(steady: MemoryParts, changes: _Changes) -> OverTime:
    used = _changing(steady)
    levels = [(0.0, list(used))]
    all_changes = zip(changes.at_s.tolist(), changes.parts.tolist(), changes.sizes.tolist(), strict=True)
    for time_s, at_once in groupby(all_changes, key=itemgetter(0)):
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
