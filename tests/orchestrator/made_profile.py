"""A profile made by hand, with round times so that a test can compute what a plan must take."""

from __future__ import annotations

from collections.abc import Sequence

from planner.profile import Cluster, DeviceProfile, LayerProfile, Link, Matrix, ModelProfile, Profile

MEMORY_BYTES = 10**9


def made_profile(
    names: Sequence[str],
    parameters: Sequence[int],
    ranks: int,
    *,
    weights: Sequence[float] | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> Profile:
    """F = I = W = 10 ms times `weights[layer]` (1 if unset), on `ranks` equal devices with fast links."""
    factors = weights or [1.0] * len(names)
    layers = tuple(
        LayerProfile(
            name=name,
            forward_s=0.01 * factor,
            input_grad_s=0.01 * factor,
            weight_grad_s=0.01 * factor,
            update_s=0.001,
            parameters=count,
            parameter_bytes=4 * count,
            gradient_bytes=4 * count,
            optimizer_bytes=8 * count,
            activation_bytes=1000,
            input_bytes=100,
            weight_grad_hold_bytes=200,
            boundary_bytes=100,
            boundary_grad_bytes=100,
            matrices=(Matrix(name="weight", parameters=count, weight_grad_s=0.01 * factor),),
        )
        for name, count, factor in zip(names, parameters, factors, strict=True)
    )
    device = DeviceProfile(kind="cpu", name="made by hand", memory_bytes=memory_bytes)
    return Profile(
        model=ModelProfile(layers=layers, microbatch_size=2, precision="float32", threads=1),
        cluster=Cluster.uniform(device, ranks, Link(latency_s=1e-4, bytes_per_s=1e9), commit_s=0.002),
        key="by hand",
        source="made by hand",
    )
