"""Setup of a rank for one generation, and what its program builds from it: stages, masks, ties.

Values and their assembly; nothing here runs or sends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from planner.arrivals import Arrivals
from planner.ir import FREEZABLE
from planner.plan import Plan
from planner.rank_program import RankProgram
from planner.rounds import busy_pipelines, executed_by, windows_of
from planner.shards import Piece
from planner.shares import numbers_of, parts_by_window
from workers.commit.unfinished import Greeting
from workers.copies.redundancy import Shipping, ShippingSink
from workers.copies.snapshots import Snapshots
from workers.copies.standby import Base, Standbys
from workers.elastic.modules_ahead import ModulesAhead
from workers.freezing.freezer import Extent, Freezer
from workers.freezing.mask import LayerParameters
from workers.freezing.plans import FreezePlans
from workers.gradients.curvature import CurvatureProbe, Place
from workers.gradients.exchange import ReplicaExchange, TiedUse
from workers.gradients.parts import GradientParts
from workers.gradients.reduce_scatter import MicrobatchReduceScatter
from workers.gradients.replica_sums import ReplicaSums
from workers.gradients.sink import GradientSink
from workers.layers.layer import Layer
from workers.layers.loss import Loss
from workers.protocol.reports import CurvatureReport
from workers.state.layer_state import LayerState
from workers.step.engine import first_free_tag
from workers.step.equipment import Equipment
from workers.step.stage import Stage
from workers.transport.channel import Channel


class Tags(NamedTuple):
    """First tags on the channel of what ranks exchange beside a window's activations.

    A tag means the same on both sides of a pair. Those of siblings come last: their number differs.
    """

    ties: int
    buffers: int
    standbys: int
    replicas: int
    weights: int
    shards: int


@dataclass(frozen=True, kw_only=True)
class GenerationSetup(Equipment):
    """Setup with which a rank trains in a generation. All of it outlives the generation."""

    place: int
    """pipeline * P + pipeline rank."""
    plan: Plan
    program: RankProgram
    """Its own, of its pipeline."""
    layers: Mapping[int, tuple[Layer, LayerState]]
    """The layers that it owns by `plan`."""
    standbys: Standbys
    """The copies that it keeps by `plan`."""
    greeting: Greeting
    """The first message that it sends to the other ranks."""
    offer: Callable[[Iterable[Piece]], None]
    """Offers copies of its layers or shards, as they are now, to the ranks that keep standbys of them."""
    bring: Callable[[Piece, Greeting, threading.Event], Base]
    """Layer or shard, its owner's greeting -> its state at the start of the generation; stops when the event is
    set."""
    build: Callable[[Piece], Layer]
    """Builds the layer of a shard beside training; its weights are of no step."""
    coming: ModulesAhead[tuple[Layer, LayerState]]
    """Layers that it builds ahead for the next generation."""
    withdraw: Callable[[], None]
    """Stops offering the layers as they were at the start of the generation."""
    snapshots: Snapshots
    """Snapshots of its layers and of those that it keeps for others by `plan`."""
    fetch: Callable[[Piece, int, Greeting, threading.Event], LayerState]
    """Layer or shard, step, its owner's greeting -> the owner's snapshot; stops when the event is set."""
    resumed: bool = False
    """Whether all ranks start from a checkpoint."""
    held: Arrivals = ()
    """Layers, or shards, whose updates are held back, and their destinations."""
    freeze_plans: FreezePlans
    """Freeze plans whose start is known; adopted ones are added."""

    @property
    def pipeline_rank(self) -> int:
        return self.plan.place(self.place).rank

    @property
    def pipeline(self) -> int:
        return self.plan.place(self.place).pipeline

    @property
    def siblings(self) -> tuple[int, ...]:
        """Places that hold the same layers, by pipeline."""
        return self.plan.siblings(self.pipeline_rank)

    @property
    def tags(self) -> Tags:
        ties, layers = first_free_tag(self.program.stages), len(self.definition.layers)
        buffers = ties + sum(len(uses) for uses in self.definition.ties)
        weights = buffers + 4 * layers + 1
        return Tags(ties, buffers, buffers + layers, buffers + 2 * layers, weights, weights + layers)

    @property
    def windows(self) -> tuple[Sequence[int], ...]:
        """The global microbatches of each window that its pipeline executes in a step: one window per replica, or with
        uneven shares one for all."""
        plan, microbatches = self.plan, self.plan.microbatches
        if plan.shard == "gradients":
            return windows_of(plan, self.pipeline)
        if plan.shares:
            return (numbers_of(plan, self.pipeline),)
        own = range(self.pipeline, plan.replicas, plan.pipeline_count)
        return tuple(range(r * microbatches, (r + 1) * microbatches) for r in own)


def make_freezer(setup: GenerationSetup, step: int) -> Freezer:
    """The freezing of the rank's layers after `step` steps."""
    config, plan = setup.config, setup.plan
    stages = setup.program.own_stages
    extent = Extent(
        seed=config.job.seed,
        rank=setup.place,
        microbatches=plan.microbatches,
        replicas=plan.replicas,
        passes=sum(map(len, setup.windows)),
        layers=len(setup.definition.layers),
        stages={stage: tuple(range(*plan.layers[stage])) for stage in stages},
    )
    states = {index: state for index, (_, state) in sorted(setup.layers.items())}
    parameters = {
        index: LayerParameters.among(layer.name, layer.trained)
        for index, (layer, _) in sorted(setup.layers.items())
    }
    return Freezer(config.freeze, extent, states, parameters, setup.freeze_plans, step)


def make_curvature_probe(
    setup: GenerationSetup, counted: Mapping[Place, Tensor], report: Callable[[CurvatureReport], None]
) -> CurvatureProbe | None:
    """Make the probe of how fast the gradient changes, if the job wants that and no sibling does it for this rank.

    Args:
        counted: the rank's parameters, each tied one once.
    """
    every, plan = setup.config.job.curvature_every, setup.plan
    if not every or (setup.pipeline != 0 and plan.shards == 1):
        return None
    states = {layer: state for layer, (_, state) in setup.layers.items()}
    sampled = {place: p for place, p in counted.items() if place[1] in states[place[0]].updates}
    weights = {(layer, name): states[layer].weights[name] for layer, name in sampled}
    return CurvatureProbe(every, setup.place, sampled, weights, report)


def make_sink(setup: GenerationSetup, channel: Channel, shipping: Shipping) -> GradientSink:
    """The sink of the rank's gradients; it ships them ahead where nothing is added to those of a window."""
    plan, tags = setup.plan, setup.tags.replicas
    summed = {index: layer.summed for index, (layer, _) in setup.layers.items()}
    cuts = {
        index: layer.shared.cuts for index, (layer, _) in setup.layers.items() if layer.shared is not None
    }
    if plan.shard == "gradients":
        backwards = [action.stage for action in setup.program.actions if action.kind in FREEZABLE]
        return MicrobatchReduceScatter(
            channel,
            setup.siblings,
            summed,
            tags,
            cuts=cuts,
            rounds=busy_pipelines(plan),
            order=[layer for stage in backwards for layer in reversed(range(*plan.layers[stage]))],
            executed_by=executed_by(plan) if plan.shares else (),
            device=setup.device,
            activity=setup.activity,
        )
    if plan.replicas > 1 and plan.pipeline_count == 1:
        return ReplicaSums(summed, plan.microbatches)
    if plan.pipeline_count > 1:
        windows = parts_by_window(plan)
        exchange = ReplicaExchange(
            channel, setup.siblings, summed, tags, tuple(chain.from_iterable(windows)), cuts
        )
        return GradientParts(exchange, plan.microbatches, summed, windows)
    return GradientSink(summed) if setup.definition.ties else ShippingSink(summed, shipping)


def make_stages(setup: GenerationSetup, freezer: Freezer, sink: GradientSink) -> dict[int, Stage]:
    """The stages that the program names."""
    plan, config = setup.plan, setup.config
    stages: dict[int, Stage] = {}
    for stage in setup.program.own_stages:
        first, stop = plan.layers[stage]
        layers = [setup.layers[index][0] for index in range(first, stop)]
        loss = None
        if stop == len(setup.definition.layers):
            device = setup.device.torch_device
            loss = Loss(
                layers[-1],
                setup.definition.loss,
                precision=config.job.precision,
                device=device,
                measure=setup.measure,
            )
        stages[stage] = Stage(
            layers,
            loss,
            frozenset(plan.recompute),
            config.job.seed,
            sink,
            freezing=freezer,
            forward_only=stage < setup.program.frozen_stages,
            check=setup.check,
            kept=setup.kept if stage == 0 else None,
        )
    return stages


def tied_uses(setup: GenerationSetup) -> list[list[TiedUse]]:
    """Per tied parameter, its uses in layer order."""
    names, plan = setup.definition.names, setup.plan
    groups = []
    for group in setup.definition.ties:
        uses = sorted((names.index(ref.layer), ref.parameter) for ref in group)
        groups.append([TiedUse(i, n, plan.stage_ranks[plan.stage_of_layer(i)]) for i, n in uses])
    return groups
