"""Cost of snapshots per step, and steps that a lost rank undoes: `workers/copies/snapshots.py` in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.plan import Plan, undone_steps
from planner.profile import Profile
from planner.simulation.places import device_of, link_between
from planner.simulation.shard_parts import sent_bytes
from planner.simulation.traffic_cost import stream_s_per_byte

COPIED_BYTES_PER_S = 5e9
"""Into host memory: what one core copies into fresh pages. From a GPU another copy comes before, which is faster
(`docs/measurements.md`)."""
DISTURBANCE = 0.1
"""Share by which steps are longer while layer states travel; `docs/measurements.md`, "Layers that move"."""
KEPT = 2
"""Snapshots that a rank has at most: the one that all have, and the next."""
COMMIT_STEPS = 1
"""Steps from the end of a transfer until all ranks know of it."""


@dataclass(frozen=True, kw_only=True)
class SnapshotCost:
    """Cost of all snapshots of a plan, per step."""

    bytes_per_step: int
    """Sent by all owners, on average."""
    seconds_per_step: float
    """Average time added to a step: states that travel disturb messages of training; where ranks compute on the host,
    copying, sending and receiving takes processor time from them; and the next update waits until layers are copied."""
    memory_bytes: int
    """Host memory, at the rank that keeps most."""
    undone_steps: int
    """The most committed steps that a lost rank undoes, with a step as long as given."""


def cost_of_snapshots(profile: Profile, plan: Plan, step_s: float) -> SnapshotCost:
    """The cost of the snapshots of `plan`, which has some.

    Args:
        step_s: the step without them.
    """
    every, places = plan.snapshot_every, range(plan.world_size)
    sent, received = [0.0] * plan.world_size, [0.0] * plan.world_size
    leaving_s, fetching_s = [0.0] * plan.world_size, [0.0] * plan.world_size
    for target in places:
        for piece in plan.snapshots_at(target):
            source, size = plan.owner_of(piece), sent_bytes(profile.model.layers[piece.layer], piece)
            sent[source] += size
            received[target] += size
            link = link_between(profile, plan, source, target)
            if link is not None:
                # A rank fetches one after the other; an owner may send to several at once.
                fetching_s[target] += link.total_s(size)
                leaving_s[source] += link.total_s(size)
    copying_s = [
        sum(sent_bytes(profile.model.layers[piece.layer], piece) for piece in plan.pieces_of_place(place))
        for place in places
    ]
    copying_s = [size / COPIED_BYTES_PER_S for size in copying_s]
    travelling_s = max((*fetching_s, *leaving_s))
    working_s = [
        copied_s + stream_s_per_byte(device) * (out + back) if device.kind == "cpu" else 0.0
        for device, copied_s, out, back in zip(
            (device_of(profile, plan, place) for place in places), copying_s, sent, received, strict=True
        )
    ]
    waiting_s = max(0.0, max(copying_s) - step_s)
    added_s = (max(working_s) + DISTURBANCE * travelling_s + waiting_s) / every
    longest_s = max(copying_s) + travelling_s
    steps = math.ceil(longest_s / (step_s + added_s)) + COMMIT_STEPS
    return SnapshotCost(
        bytes_per_step=round(sum(sent) / every),
        seconds_per_step=added_s,
        memory_bytes=snapshot_bytes(profile, plan),
        undone_steps=undone_steps(every, steps),
    )


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
                sent_bytes(profile.model.layers[piece.layer], piece)
                for piece in (*plan.pieces_of_place(place), *plan.snapshots_at(place))
            )
        )
        for place in range(plan.world_size)
    )
