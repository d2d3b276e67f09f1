"""Map of layers: in stages, on ranks, on nodes, and those that are about to change ranks.

Pure: a job's view in, values out. Knows no page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.history.job_view import JobView
from planner.plan import Plan


@dataclass(frozen=True)
class LayerBox:
    """A layer at a rank."""

    layer: int
    state: Literal["here", "leaving", "arriving"]
    other: tuple[int, ...] = ()
    """Ranks that it goes to, or comes from."""


@dataclass(frozen=True)
class StageBox:
    """A stage's layers at a rank."""

    stage: int
    layers: tuple[LayerBox, ...]


@dataclass(frozen=True)
class RankBox:
    """A rank."""

    rank: int
    state: Literal["trains", "spare", "starts", "leaves"]
    pipeline: int | None
    """None for a rank without a place."""
    stages: tuple[StageBox, ...] = ()
    copies: tuple[int, ...] = ()
    """Layers of which it keeps copies."""


@dataclass(frozen=True)
class NodeBox:
    """A node."""

    id: str
    host: str
    leaving: bool
    """Whether the job was told that it will go."""
    ranks: tuple[RankBox, ...]


@dataclass(frozen=True)
class LayerMap:
    """A job's layers."""

    nodes: tuple[NodeBox, ...]
    moving: tuple[int, ...]
    """Layers that are about to change ranks."""
    version: str
    """`EPOCH.VERSION` of the plan that the ranks follow."""
    next: str
    """`EPOCH.VERSION` of the plan on its way to the ranks; empty if there is none."""
    pipelines: int


def layer_map(view: JobView) -> LayerMap | None:
    """The map of a job that has formed; None for one that has not, or holds no ranks."""
    plan, members = view.followed or view.formed, view.ranks.members
    if plan is None or not members or len(members) != plan.world_size:
        return None
    coming = _coming(view, plan)
    ways = _ways(view, plan, coming)
    ranks = {rank: _member(plan, ways, members, place, view) for place, rank in enumerate(members)}
    for rank in sorted(view.ranks.alive - ranks.keys()):
        ranks[rank] = RankBox(rank, "leaves" if rank in view.ranks.going else "spare", None)
    for rank in sorted(view.ranks.placing - ranks.keys()):
        ranks[rank] = RankBox(rank, "starts", None)
    return LayerMap(
        nodes=_nodes(view, ranks),
        moving=tuple(sorted({way.layer for way in ways})),
        version=_version(plan),
        next=_version(coming) if coming is not None else "",
        pipelines=plan.pipeline_count,
    )


@dataclass(frozen=True)
class _Way:
    """A layer's way from one place to another."""

    layer: int
    source: int
    target: int
    stage: int
    """The stage that it will be in."""


def _coming(view: JobView, plan: Plan) -> Plan | None:
    """The issued plan that the ranks do not follow yet, if they can switch to it where they are."""
    newest = view.plan
    if newest is None or view.outcome is not None or view.state != "training":
        return None
    later = (newest.epoch, newest.version) > (plan.epoch, plan.version)
    return newest if later and newest.world_size == plan.world_size else None


def _ways(view: JobView, plan: Plan, coming: Plan | None) -> list[_Way]:
    """The ways of the layers that move. A move's first plan gives a layer's heirs copies of it, and the next one makes
    them its owners."""
    if view.outcome is not None or view.state != "training":
        return []
    if coming is not None and not coming.same_work_as(plan):
        return [
            _Way(layer, source, target, coming.stage_of_layer(layer))
            for layer in range(plan.layers[-1][1])
            for source, target in zip(_owners(plan, layer), _owners(coming, layer), strict=True)
            if source != target
        ]
    before, newest = ([decision.plan for decision in view.decisions[-2:]] + [None, None])[:2]
    if before is None or newest is None or view.formed == newest or not before.same_work_as(newest):
        return []
    kept = all(set(_copies(before, layer)) <= set(_copies(newest, layer)) for layer in _layers(newest))
    return [
        _Way(layer, source, target, newest.stage_of_layer(layer))
        for layer in _layers(newest)
        for target in sorted({*_copies(newest, layer)} - {*_copies(before, layer)})
        for source in _owners(newest, layer)
        if kept and newest.place(source).pipeline == newest.place(target).pipeline
    ]


def _member(plan: Plan, ways: list[_Way], members: tuple[int, ...], place: int, view: JobView) -> RankBox:
    leaving: dict[int, list[int]] = {}
    arriving: dict[int, _Way] = {}
    for way in ways:
        if way.source == place:
            leaving.setdefault(way.layer, []).append(members[way.target])
        if way.target == place:
            arriving[way.layer] = way
    stages: dict[int, list[LayerBox]] = {}
    for layer in plan.layers_of_place(place):
        box = LayerBox(layer, "leaving" if layer in leaving else "here", tuple(leaving.get(layer, ())))
        stages.setdefault(plan.stage_of_layer(layer), []).append(box)
    for layer, way in arriving.items():
        # A copy that is to become the owner's goes to the stage beside it that this rank has.
        stage = min(stages, key=lambda each: abs(each - way.stage), default=way.stage)
        stages.setdefault(stage, []).append(LayerBox(layer, "arriving", (members[way.source],)))
    rank = members[place]
    return RankBox(
        rank=rank,
        state="leaves" if rank in view.ranks.going else "trains",
        pipeline=plan.place(place).pipeline,
        stages=tuple(
            StageBox(stage, tuple(sorted(boxes, key=lambda box: box.layer)))
            for stage, boxes in sorted(stages.items())
        ),
        copies=tuple(
            layer
            for layer in sorted(
                {*plan.standbys_of(place), *(piece.layer for piece in plan.snapshots_at(place))}
            )
            if layer not in arriving
        ),
    )


def _layers(plan: Plan) -> range:
    return range(plan.layers[-1][1])


def _owners(plan: Plan, layer: int) -> tuple[int, ...]:
    """The places that own `layer`, one in each pipeline."""
    return plan.siblings(plan.stage_ranks[plan.stage_of_layer(layer)])


def _copies(plan: Plan, layer: int) -> tuple[int, ...]:
    return plan.copies_of(layer)


def _nodes(view: JobView, ranks: dict[int, RankBox]) -> tuple[NodeBox, ...]:
    homes: dict[str, list[RankBox]] = {}
    for number, box in sorted(ranks.items()):
        homes.setdefault(view.ranks.nodes.get(number, ""), []).append(box)
    return tuple(
        NodeBox(
            id=node,
            host=next((view.ranks.hosts[box.rank] for box in boxes if box.rank in view.ranks.hosts), ""),
            leaving=any(box.rank in view.ranks.going for box in boxes),
            ranks=tuple(boxes),
        )
        for node, boxes in homes.items()
    )


def _version(plan: Plan) -> str:
    return f"{plan.epoch}.{plan.version}"
