"""Profile + plan + freeze ratios -> the cost of every action and every message of a schedule.

Adds up layers and knows no timeline: that is the simulator's. Place p of the plan is device p; a pipeline rank is as
slow as the slowest of its places in the plan's pipelines, since all pipelines of a step end together.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.freezing import Ratios
from planner.ir import Action, ActionKind, Schedule
from planner.plan import Plan
from planner.profile import Cluster, Profile
from planner.simulation.gradient_communication import folded_s
from planner.simulation.shard_parts import part_of
from planner.simulation.simulate import Costs, Messages
from planner.wording import counted


def action_costs(
    profile: Profile,
    plan: Plan,
    schedule: Schedule,
    ratios: Ratios | None = None,
    *,
    pipeline: int | None = None,
) -> Costs:
    """The costs of `schedule` with the plan's stages on the profile's devices.

    A full backward takes as long as its input gradient plus its weight gradient. A recompute repeats only the forwards
    of the layers that recompute. An update is the update of its stage. Where siblings share out the sums of gradients,
    these travel during the actions that form them.

    Args:
        ratios: `ratios[layer][microbatch]`, the share of weight-gradient time that is frozen; None freezes nothing.
        pipeline: on whose devices; None: each stage on the slowest of its devices in all pipelines.

    Raises:
        ValueError: plan, schedule, profile and ratios do not fit together.
    """
    check_fit(profile, plan, schedule.stages, ratios, schedule.microbatches)
    layers = profile.model.layers
    if pipeline is None:
        of_rank = rank_slowdowns(profile.cluster, plan.pipeline_ranks, plan.pipeline_count)
    else:
        of_rank = pipeline_slowdowns(profile.cluster, plan.pipeline_ranks, pipeline)
    slowdown = [of_rank[rank] for rank in plan.stage_ranks]
    recompute, (_, first_stop) = frozenset(plan.recompute), plan.layers[0]
    of_layers_s = {
        ActionKind.FORWARD: [
            layer.forward_s + (layer.kept_s if i >= first_stop else 0.0) for i, layer in enumerate(layers)
        ],
        ActionKind.BACKWARD: [layer.backward_s for layer in layers],
        ActionKind.INPUT_GRAD: [layer.input_grad_s for layer in layers],
        ActionKind.WEIGHT_GRAD: [layer.weight_grad_s for layer in layers],
        ActionKind.RECOMPUTE: [layer.forward_s if i in recompute else 0.0 for i, layer in enumerate(layers)],
        ActionKind.UPDATE: [layer.update_s for layer in layers],
    }
    per_kind: dict[ActionKind, tuple[float, ...]] = {}
    for kind, layers_s in of_layers_s.items():
        times_s = [layers_s[first:stop] for first, stop in plan.layers]
        per_kind[kind] = tuple(sum(of) * slow for of, slow in zip(times_s, slowdown, strict=True))
        if plan.shard == "gradients" and kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            longer_s = _folded_s(profile, plan, slowdown, times_s)
            per_kind[kind] = tuple(a + b for a, b in zip(per_kind[kind], longer_s, strict=True))
    return Costs(
        seconds=per_kind,
        actions={} if ratios is None else _frozen(profile, plan, slowdown, schedule, ratios),
        messages=_messages(profile, plan),
    )


def bounds(
    profile: Profile, plan: Plan, schedule: Schedule, *, pipeline: int | None = None
) -> tuple[Costs, Costs]:
    """(upper, lower): the costs with nothing frozen and with every weight gradient frozen, on the devices of
    `pipeline`; see `action_costs`."""
    everything = ((1.0,) * schedule.microbatches,) * len(profile.model.layers)
    return (
        action_costs(profile, plan, schedule, pipeline=pipeline),
        action_costs(profile, plan, schedule, everything, pipeline=pipeline),
    )


def update_s(profile: Profile, plan: Plan) -> tuple[float, ...]:
    """Per pipeline rank, seconds of the gradient norm and the optimizer update of all its layers, or of its shards of
    them in the pipeline in which they take longest."""
    slowdown = rank_slowdowns(profile.cluster, plan.pipeline_ranks, plan.pipeline_count)
    layers = profile.model.layers
    if plan.shards == 1:
        seconds = [0.0] * plan.pipeline_ranks
        for (first, stop), rank in zip(plan.layers, plan.stage_ranks, strict=True):
            seconds[rank] += slowdown[rank] * sum(layer.update_s for layer in layers[first:stop])
        return tuple(seconds)

    def at(place: int) -> float:
        pieces = plan.pieces_of_place(place)
        return sum(part_of(layers[piece.layer], piece) * layers[piece.layer].update_s for piece in pieces)

    return tuple(slowdown[rank] * max(map(at, plan.siblings(rank))) for rank in range(plan.pipeline_ranks))


def outside_s(profile: Profile, plan: Plan) -> float:
    """Seconds of a step outside its window: the longest update of any rank, then the commit."""
    return max(update_s(profile, plan)) + profile.cluster.commit_s


def rank_slowdowns(cluster: Cluster, ranks: int, pipelines: int) -> tuple[float, ...]:
    """Per pipeline rank of `pipelines` pipelines of `ranks` ranks, the slowdown of the slowest of its places. A cluster
    may have fewer devices than there are places."""
    return tuple(
        max(device.slowdown for device in cluster.devices[rank : ranks * pipelines : ranks])
        for rank in range(ranks)
    )


def pipeline_slowdowns(cluster: Cluster, ranks: int, pipeline: int) -> tuple[float, ...]:
    """Per pipeline rank of one of several pipelines of `ranks` ranks, the slowdown of its own place; of the first
    pipeline's where the cluster has no device for it."""
    devices, first = cluster.devices, pipeline * ranks
    return tuple(
        devices[first + rank if first + rank < len(devices) else rank].slowdown for rank in range(ranks)
    )


def memory_limits(cluster: Cluster, ranks: int, pipelines: int) -> tuple[int, ...]:
    """Per pipeline rank of `pipelines` pipelines of `ranks` ranks, the memory of the smallest of its places."""
    return tuple(
        min(device.memory_bytes for device in cluster.devices[rank : ranks * pipelines : ranks])
        for rank in range(ranks)
    )


def boundary_bytes(profile: Profile, plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(per stage, bytes that its forward sends to the next stage; per stage, bytes that its backward sends back)."""
    layers = profile.model.layers
    last = len(layers)
    return (
        tuple(layers[stop - 1].boundary_bytes if stop < last else 0 for _, stop in plan.layers),
        tuple(layers[first - 1].boundary_grad_bytes if first else 0 for first, _ in plan.layers),
    )


def check_fit(profile: Profile, plan: Plan, stages: int, ratios: Ratios | None, microbatches: int) -> None:
    """Check that the four arguments fit together.

    Raises:
        ValueError: two sizes differ; names both.
    """
    layers, devices = len(profile.model.layers), len(profile.cluster.devices)
    if plan.layers[-1][1] != layers:
        raise ValueError(f"the plan cuts {counted(plan.layers[-1][1], 'layer')}, the profile has {layers}")
    if plan.pipeline_ranks > devices:
        ranks = counted(plan.pipeline_ranks, "pipeline rank")
        raise ValueError(f"the plan has {ranks}, the profile {counted(devices, 'device')}")
    if plan.stages != stages:
        raise ValueError(f"the plan has {counted(plan.stages, 'stage')}, the schedule {stages}")
    if ratios is not None and (len(ratios) != layers or any(len(row) != microbatches for row in ratios)):
        raise ValueError(
            f"freeze ratios must have a row per layer and a column per microbatch, of {counted(layers, 'layer')} and"
            f" {counted(microbatches, 'microbatch', 'microbatches')}; got {counted(len(ratios), 'row')} of"
            f" {sorted({len(row) for row in ratios})}"
        )


def _folded_s(
    profile: Profile, plan: Plan, slowdown: Sequence[float], times_s: Sequence[Sequence[float]]
) -> tuple[float, ...]:
    """Result of `folded_s` for times on a device of slowdown 1."""
    slowed_s = [[time_s * slow for time_s in of] for of, slow in zip(times_s, slowdown, strict=True)]
    return folded_s(profile, plan, slowed_s)


def _frozen(
    profile: Profile,
    plan: Plan,
    slowdown: Sequence[float],
    schedule: Schedule,
    ratios: Ratios,
) -> dict[Action, float]:
    """Seconds of every action that forms weight gradients. Those of frozen parameters travel like others."""
    layers = profile.model.layers
    kinds = {action.kind for program in schedule.programs for action in program}
    of_kind: dict[ActionKind, list[list[float]]] = {}
    for kind in kinds & {ActionKind.WEIGHT_GRAD, ActionKind.BACKWARD}:
        for index in range(schedule.microbatches):
            times_s = [
                [
                    layers[i].weight_grad_s * (1.0 - ratios[i][index])
                    + (layers[i].input_grad_s if kind is ActionKind.BACKWARD else 0.0)
                    for i in range(first, stop)
                ]
                for first, stop in plan.layers
            ]
            longer_s = _folded_s(profile, plan, slowdown, times_s)
            whole_s = zip(times_s, slowdown, longer_s, strict=True)
            of_kind.setdefault(kind, []).append([sum(of) * slow + more for of, slow, more in whole_s])
    seconds: dict[Action, float] = {}
    for program in schedule.programs:
        for action in program:
            if action.kind in of_kind:
                seconds[action] = of_kind[action.kind][action.index][action.stage]
    return seconds


def _messages(profile: Profile, plan: Plan) -> Messages:
    forward_bytes, backward_bytes = boundary_bytes(profile, plan)
    return Messages(forward_bytes=forward_bytes, backward_bytes=backward_bytes, links=profile.cluster.links)
