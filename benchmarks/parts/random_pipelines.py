"""Random models on random clusters: uneven layers, devices and links, from a seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from planner.profile import Cluster, DeviceProfile, LayerProfile, Link, ModelProfile, Profile

PLENTY_BYTES = 10**12


def random_profile(rng: Random, layers: int, devices: int, *, memory_bytes: int = PLENTY_BYTES) -> Profile:
    """Layers of around 10 ms. Between each pair of ranks, messages take anything from almost no time to a
    layer's.

    Machines hold two devices each. Two devices in three have a slowdown of 1, the others one of up to 2.
    """
    heavy = rng.choice([None, 0, layers - 1])
    cluster = Cluster(
        devices=tuple(
            DeviceProfile(
                kind="emulated",
                name="random",
                memory_bytes=memory_bytes,
                machine=f"machine {device // 2}",
                slowdown=rng.choice([1.0, 1.0, rng.uniform(1.0, 2.0)]),
            )
            for device in range(devices)
        ),
        links=tuple(
            tuple(None if source == target else _link(rng) for target in range(devices))
            for source in range(devices)
        ),
        commit_s=rng.uniform(0, 5e-3),
    )
    model = ModelProfile(
        layers=tuple(_layer(rng, index, 3.0 if index == heavy else 1.0) for index in range(layers)),
        microbatch_size=1,
        precision="float32",
        threads=1,
    )
    return Profile(model=model, cluster=cluster, key="random", source="drawn at random")


def with_memory(profile: Profile, memory_bytes: int) -> Profile:
    """`profile` with `memory_bytes` on every device."""
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in profile.cluster.devices)
    return replace(profile, cluster=replace(profile.cluster, devices=devices))


def _layer(rng: Random, index: int, weight: float) -> LayerProfile:
    parameters = rng.randrange(1_000, 100_000)
    activation_bytes = rng.randrange(100_000, 2_000_000)
    return LayerProfile(
        name=f"layer{index}",
        forward_s=weight * rng.uniform(2e-3, 20e-3),
        input_grad_s=weight * rng.uniform(2e-3, 20e-3),
        weight_grad_s=weight * rng.uniform(0, 20e-3),
        update_s=rng.uniform(0, 5e-3),
        parameters=parameters,
        parameter_bytes=4 * parameters,
        gradient_bytes=4 * parameters,
        optimizer_bytes=8 * parameters,
        activation_bytes=activation_bytes,
        input_bytes=rng.randrange(10_000, 100_000),
        weight_grad_hold_bytes=rng.randrange(0, activation_bytes),
        boundary_bytes=rng.randrange(10_000, 100_000),
        boundary_grad_bytes=rng.randrange(10_000, 100_000),
    )


def _link(rng: Random) -> Link:
    return Link(
        latency_s=rng.uniform(0, 2e-3),
        bytes_per_s=10 ** rng.uniform(6.5, 9),
        sender_s=rng.uniform(0, 5e-4),
        sender_s_per_byte=rng.uniform(0, 1e-8),
        receiver_s=rng.uniform(0, 5e-4),
        receiver_s_per_byte=rng.uniform(0, 1e-8),
    )
