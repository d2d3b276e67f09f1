"""What snapshots cost a step, and how many steps a lost rank undoes: `workers/elastic/snapshots.py` in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.plan import Plan
from planner.profile import Profile
from planner.shards import WHOLE, Piece
from planner.simulation.links_of_places import link_between
from planner.simulation.shard_parts import part_of

COPIED_BYTES_PER_S = 5e9
"""Into host memory: what one core copies into fresh pages. From a GPU another copy comes before, which is faster
(`docs/measurements.md`)."""
KEPT = 2
"""Snapshots that a rank has at most: the one that all have, and the next."""
COMMIT_STEPS = 1
"""Steps from the end of a transfer until all ranks know of it."""


@dataclass(frozen=True, kw_only=True)
class SnapshotCost:
    """Of all snapshots of a plan, per step."""

    bytes_per_step: int
    """Sent by all owners, on average."""
    seconds_per_step: float
    """How much longer a step takes on average: what copies, sends and receives has no idle time, and the next update
    waits until layers are copied."""
    memory_bytes: int
    """Of the host, at the rank that keeps most."""
    undone_steps: int
    """The most committed steps that a lost rank undoes, with a step as long as given."""


def cost_of_snapshots(profile: Profile, plan: Plan, step_s: float, idle_s: Sequence[float]) -> SnapshotCost:
    """The cost of the snapshots of `plan`, which has some.

    Args:
        step_s: the step without them.
        idle_s: per place, time in a step in which it computes nothing.
    """
    every, places = plan.snapshot_every, range(plan.world_size)
    sent, received = [0.0] * plan.world_size, [0.0] * plan.world_size
    sending_s, receiving_s = [0.0] * plan.world_size, [0.0] * plan.world_size
    on_link_s: dict[tuple[int, int], float] = {}
    for target in places:
        for piece in plan.snapshots_at(target):
            source, size = plan.owner_of(piece), _size(profile, piece)
            sent[source] += size
            received[target] += size
            link = link_between(profile, plan, source, target)
            if link is not None:
                sending_s[source] += link.sender_busy_s(size)
                receiving_s[target] += link.receiver_busy_s(size)
                way = source, target
                on_link_s[way] = on_link_s.get(way, 0.0) + link.transfer_s(size)
    copying_s = [_copying_s(profile, plan.pieces_of_place(place)) for place in places]
    computes = [profile.cluster.devices[plan.place(place).rank].kind != "cuda" for place in places]
    busy_s = [
        (out_s + in_s + own * copied_s) / every
        for out_s, in_s, copied_s, own in zip(sending_s, receiving_s, copying_s, computes, strict=True)
    ]
    beyond_s = max(max(0.0, busy - idle) for busy, idle in zip(busy_s, idle_s, strict=True))
    added_s = max(0.0, max(copying_s) - step_s) / every + beyond_s
    # A rank fetches from one owner after the other; an owner may send to several at once.
    fetching_s = [
        sum(seconds for (_, target), seconds in on_link_s.items() if target == place) + receiving_s[place]
        for place in places
    ]
    leaving_s = [
        sum(seconds for (source, _), seconds in on_link_s.items() if source == place) + sending_s[place]
        for place in places
    ]
    longest_s = max(copying_s) + max((*fetching_s, *leaving_s))
    steps = math.ceil(longest_s / (step_s + added_s)) + COMMIT_STEPS
    return SnapshotCost(
        bytes_per_step=round(sum(sent) / every),
        seconds_per_step=added_s,
        memory_bytes=snapshot_bytes(profile, plan),
        undone_steps=undone_steps(every, steps),
    )


def undone_steps(every: int, steps: int) -> int:
    """The most committed steps that a lost rank undoes, where a snapshot begins every `every` steps, or once the one
    before is complete, and takes `steps`: it is lost just before the next one is complete."""
    return max(every, steps) + steps - 1


def snapshot_bytes(profile: Profile, plan: Plan) -> int:
    """Host memory of the snapshots at the place that keeps most."""
    return max(snapshot_bytes_of_places(profile, plan), default=0)


def snapshot_bytes_of_places(profile: Profile, plan: Plan) -> tuple[int, ...]:
    """Host memory of the snapshots, by place."""
    if not plan.snapshots:
        return (0,) * plan.world_size
    return tuple(
        round(
            KEPT
            * sum(
                _size(profile, piece) for piece in (*plan.pieces_of_place(place), *plan.snapshots_at(place))
            )
        )
        for place in range(plan.world_size)
    )


def _size(profile: Profile, piece: Piece) -> float:
    """Bytes of the state of `piece` in a snapshot: that of a shard has 32-bit weights, as large as gradients."""
    layer = profile.model.layers[piece.layer]
    if piece.shard == WHOLE:
        return layer.moved_bytes
    return part_of(layer, piece) * (layer.gradient_bytes + layer.optimizer_bytes)


def _copying_s(profile: Profile, pieces: Iterable[Piece]) -> float:
    return sum(_size(profile, piece) for piece in pieces) / COPIED_BYTES_PER_S
