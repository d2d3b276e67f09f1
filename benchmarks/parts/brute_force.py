"""The partition programs' objectives, computed independently layer by layer, and the best cut under each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

from planner.partition.stage_costs import Ranges
from planner.profile import Link, Profile
from planner.search.end_to_end import SharedStage

Objective = Callable[[Profile, Ranges, int], float]
"""(profile, one stage per device, microbatches) -> the value to minimize."""


def all_cuts(layers: int, stages: int) -> Iterator[Ranges]:
    """Every way to cut `layers` layers into `stages` stages."""
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(pairwise([0, *inner, layers]))


def stage_bytes(profile: Profile, layers: Ranges, stage: int, microbatches: int) -> int:
    """Peak memory of a stage in 1F1B. The stage keeps one microbatch for itself and for each later stage,
    each with the input from the previous stage."""
    first, stop = layers[stage]
    arrived = profile.model.layers[first].input_bytes if stage else 0
    kept = min(microbatches, len(layers) - stage)
    return kept * arrived + sum(
        layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes + kept * layer.activation_bytes
        for layer in profile.model.layers[first:stop]
    )


def fullest_share(profile: Profile, layers: Ranges, microbatches: int) -> float:
    """`memory`: the share of its device's memory that the fullest stage takes."""
    return max(
        stage_bytes(profile, layers, stage, microbatches) / profile.cluster.devices[stage].memory_bytes
        for stage in range(len(layers))
    )


def stage_s(profile: Profile, layers: Ranges, stage: int) -> float:
    return profile.cluster.devices[stage].slowdown * sum(
        layer.forward_s + layer.backward_s for layer in profile.model.layers[slice(*layers[stage])]
    )


def slowest_stage_s(profile: Profile, layers: Ranges, microbatches: int) -> float:
    """`time`: the slowest stage."""
    return max(stage_s(profile, layers, stage) for stage in range(len(layers)))


def slowest_resource_s(profile: Profile, layers: Ranges, microbatches: int) -> float:
    """`bottleneck`: the rank or link that is busy longest with one microbatch."""
    ranks_s = [stage_s(profile, layers, stage) for stage in range(len(layers))]
    links_s = [0.0]
    for stage, (_, stop) in enumerate(layers[:-1]):
        last = profile.model.layers[stop - 1]
        there, back = profile.cluster.link(stage, stage + 1), profile.cluster.link(stage + 1, stage)
        for source, link, size in (
            (stage, there, last.boundary_bytes),
            (stage + 1, back, last.boundary_grad_bytes),
        ):
            ranks_s[source] += link.sender_s + size * link.sender_s_per_byte
            ranks_s[2 * stage + 1 - source] += link.receiver_s + size * link.receiver_s_per_byte
            links_s.append(size / link.bytes_per_s)
    return max(*ranks_s, *links_s)


def merged_s(profile: Profile, layers: Ranges, microbatches: int) -> float:
    """`dynpipe`: eq. 4 to 7 with the third case corrected, one device per stage."""
    return iteration_s(
        profile,
        tuple(
            SharedStage(first=first, stop=stop, device=stage, devices=1)
            for stage, (first, stop) in enumerate(layers)
        ),
        1,
    )


def iteration_s(profile: Profile, stages: tuple[SharedStage, ...], microbatches_per_update: int) -> float:
    """Eq. 4 to 7 with the corrected third case, for any number of devices per stage."""
    cluster, layers = profile.cluster, profile.model.layers
    merged = 0.0
    for before, stage in zip((None, *stages), stages, strict=False):
        own = range(stage.device, stage.device + stage.devices)
        last = sum(layer.forward_s + layer.backward_s for layer in layers[stage.first : stage.stop])
        last *= max(cluster.devices[device].slowdown for device in own) / stage.devices
        if stage.devices > 1:
            inside = [cluster.link(a, b) for a in own for b in own if a != b]
            share = sum(layer.gradient_bytes for layer in layers[stage.first : stage.stop]) / stage.devices
            each_s = share / _bandwidth(inside) + max(link.latency_s for link in inside)
            last += 2 * (stage.devices - 1) * each_s / microbatches_per_update
        if before is None:
            merged = last
            continue
        others = range(before.device, before.device + before.devices)
        between = [cluster.link(a, b) for a in own for b in others]
        between += [cluster.link(b, a) for a in own for b in others]
        cut = layers[stage.first - 1]
        size = cut.boundary_bytes + cut.boundary_grad_bytes
        c = size / (before.devices * stage.devices * _bandwidth(between))
        merged = max(merged, last, (c + merged + last) / 2)
    return merged


def all_pipelines(profile: Profile, stages: int, sizes: tuple[int, ...]) -> Iterator[tuple[SharedStage, ...]]:
    """Every way to cut the model into `stages` stages over all devices, each stage within one machine."""
    machines = [device.machine for device in profile.cluster.devices]
    for cut in all_cuts(len(profile.model.layers), stages):
        for groups in all_cuts(len(machines), stages):
            if all(stop - first in sizes and len(set(machines[first:stop])) == 1 for first, stop in groups):
                yield tuple(
                    SharedStage(first=first, stop=stop, device=device, devices=end - device)
                    for (first, stop), (device, end) in zip(cut, groups, strict=True)
                )


def _bandwidth(links: list[Link]) -> float:
    return min(link.bytes_per_s for link in links)
