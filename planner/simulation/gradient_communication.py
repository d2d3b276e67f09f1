"""The cost of gradients that travel: between replicas and to standbys, between the window and the commit of a step; and
between replicas during the window, where they share out the sums.

`workers/gradients/` and `workers/copies/redundancy.py` in numbers. Knows when the window ends, and nothing of the
order of its actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.plan import Plan
from planner.profile import DeviceProfile, Link, Profile
from planner.shares import most_parts
from planner.simulation.places import device_of, link_between
from planner.simulation.shard_parts import exchanged_bytes, part_of, sent_bytes, weight_bytes
from planner.simulation.snapshot_cost import COPIED_BYTES_PER_S
from planner.simulation.traffic_cost import socket_s_per_byte

Floats = NDArray[np.float64]


def shipped_bytes(profile: Profile, plan: Plan) -> int:
    """Bytes that all owners send to their standbys in one step."""
    return sum(
        exchanged_bytes(profile.model.layers[piece.layer], piece) * len(places)
        for piece, places in plan.copied
    )


def standby_update_s(profile: Profile, plan: Plan) -> tuple[float, ...]:
    """Per place, seconds of the updates of its standbys; on average, and with new bases for those in host memory."""
    seconds = [0.0] * plan.world_size
    every = profile.cluster.refresh_every
    for piece, places in plan.copied:
        for place in places:
            device = device_of(profile, plan, place)
            layer = profile.model.layers[piece.layer]
            seconds[place] += device.slowdown * part_of(layer, piece) * layer.update_s
            if every and device.kind == "cpu":
                seconds[place] += (
                    sent_bytes(profile.model.layers[piece.layer], piece) / COPIED_BYTES_PER_S / every
                )
    return tuple(seconds)


def exchanged_s(profile: Profile, plan: Plan) -> tuple[float, ...]:
    """Per pipeline rank, seconds of the gradient exchange with its siblings in other pipelines; 0 with one pipeline.

    Each of D siblings gathers an equal part of every replica's gradients and sends back the sum; where states are
    shared out, not the sum but, at the start of the next step, its weights. With uneven shares, some pipelines send
    more parts of replicas than others: the most count. Of each layer that has gradients, a sibling gets one message for
    each part, and one with the sum or the weights. Where sums are shared out, only the weights travel outside of the
    window (`folded_s`).
    """
    pipelines = plan.pipeline_count
    seconds = [0.0] * plan.pipeline_ranks
    if pipelines == 1:
        return tuple(seconds)
    sent = 0 if plan.shard == "gradients" else most_parts(plan)
    for rank in range(plan.pipeline_ranks):
        layers = [profile.model.layers[layer] for layer in plan.layers_of_rank(rank)]
        part = back = sum(layer.exchanged_bytes for layer in layers) / pipelines
        if plan.shards > 1:
            back = sum(weight_bytes(profile, layer) for layer in layers) / pipelines
        messages = sum(layer.exchanged_bytes > 0 for layer in layers)
        link = link_between(profile, plan, *plan.siblings(rank)[:2])
        if link is None:
            continue
        others = pipelines - 1
        for size, count in ((sent * part, sent * messages), (back, messages)):
            if not count:
                continue
            seconds[rank] += (
                others * link.sender_busy_s(size, count)
                + link.transfer_s(size)
                + others * link.receiver_busy_s(size, count)
            )
    return tuple(seconds)


def folded_s(profile: Profile, plan: Plan, formed_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Per stage, seconds by which an action takes longer that forms its weight gradients of a microbatch, where
    siblings share out their sums: it sends each sibling that one's parts and takes in its own. Those of a layer travel
    while the next layer's are formed, to all siblings over one connection to the network.

    Args:
        formed_s: per stage and layer of it, how long that part of the action takes by itself.
    """
    others = plan.pipeline_count - 1
    if plan.shard != "gradients" or not others:
        return (0.0,) * plan.stages
    seconds: list[float] = []
    for (first, stop), rank, times_s in zip(plan.layers, plan.stage_ranks, formed_s, strict=True):
        link = link_between(profile, plan, *plan.siblings(rank)[:2])
        trained = [
            (layer.exchanged_bytes / plan.pipeline_count, time_s)
            for layer, time_s in zip(profile.model.layers[first:stop], times_s, strict=True)
            if layer.exchanged_bytes
        ]
        if link is None or not trained:
            seconds.append(0.0)
            continue
        sizes = np.array([part for part, _ in trained])
        device = device_of(profile, plan, plan.siblings(rank)[0])
        held_s, travel_s = fold_s(link, device, sizes, others)
        # The last layer is formed first; while the first one's travel, the last of the next microbatch is formed.
        meanwhile_s = np.array([trained[number - 1][1] for number in range(len(trained))])
        seconds.append(float(folding_s(held_s, travel_s, meanwhile_s).sum()))
    return tuple(seconds)


def fold_s(link: Link, device: DeviceProfile, part_bytes: Floats, others: int) -> tuple[Floats, Floats]:
    """Per layer, (seconds that a microbatch's gradients hold a rank on `device` which sends each of `others` siblings
    that one's part, of so many bytes, and takes in its own from each; seconds that the parts travel)."""
    held_s = others * (link.sender_busy_s(part_bytes) + link.receiver_busy_s(part_bytes))
    held_s = held_s + 2 * others * part_bytes * socket_s_per_byte(device)
    return held_s, link.transfer_s(others * part_bytes)


def folding_s(held_s: Floats, travel_s: Floats, meanwhile_s: Floats) -> Floats:
    """Delays of an action by its layers' gradients, where the rank forms others for `meanwhile_s` before it waits for
    them."""
    return held_s + np.maximum(0.0, travel_s - meanwhile_s)


def shipped_s(
    profile: Profile, plan: Plan, ready_s: Sequence[float], early_s: Mapping[int, float]
) -> tuple[float, ...]:
    """Per place, when it may enter the commit: it has sent its own gradients and received those of its standbys, which
    take cores of a host that computes.

    Args:
        ready_s: per place, when its own gradients are final.
        early_s: layer -> when its gradients may leave, of those that leave before the window of their place ends.
            Sending them delays what the place computes meanwhile.
    """
    sent_s = list(ready_s)
    busy_s = [0.0] * plan.world_size
    link_free_s: dict[tuple[int, int], float] = defaultdict(float)
    arrivals: list[list[tuple[float, float]]] = [[] for _ in sent_s]
    in_order = sorted(plan.copied, key=lambda copied: early_s.get(copied[0].layer, float("inf")))
    for piece, places in in_order:
        source = plan.owner_of(piece)
        size = exchanged_bytes(profile.model.layers[piece.layer], piece)
        for target in places:
            link = link_between(profile, plan, source, target)
            if link is None:
                continue
            busy_s[source] += link.sender_busy_s(size)
            sent_s[source] = early_s.get(piece.layer, ready_s[source]) + busy_s[source]
            gone_s = max(sent_s[source], link_free_s[source, target]) + link.link_busy_s(size)
            link_free_s[source, target] = gone_s
            carried_s = size * socket_s_per_byte(device_of(profile, plan, target))
            arrivals[target].append((gone_s + link.latency_s, link.receiver_busy_s(size) + carried_s))
    entered_s: list[float] = []
    ended_s = [end_s + sending_s for end_s, sending_s in zip(ready_s, busy_s, strict=True)]
    for now_s, coming in zip(ended_s, arrivals, strict=True):
        for arrival_s, taken_s in sorted(coming):
            now_s = max(now_s, arrival_s) + taken_s
        entered_s.append(now_s)
    return tuple(entered_s)
