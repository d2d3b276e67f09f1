"""Small profiles and plans for tests, with numbers that add up exactly in binary."""

from itertools import pairwise
from typing import Any

from planner.plan import Plan
from planner.profile import Cluster, DeviceProfile, LayerProfile, Link, ModelProfile, Profile
from planner.schedule.registry import family

FAST = Link(latency_s=0.0, bytes_per_s=1e18)
DEVICE = DeviceProfile(kind="emulated", name="test", memory_bytes=10_000)


def layer(name: str = "layer", **changes: Any) -> LayerProfile:
    fields: dict[str, Any] = {
        "name": name,
        "forward_s": 1.0,
        "input_grad_s": 2.0,
        "weight_grad_s": 4.0,
        "update_s": 0.5,
        "parameters": 10,
        "parameter_bytes": 40,
        "gradient_bytes": 30,
        "optimizer_bytes": 80,
        "activation_bytes": 100,
        "input_bytes": 8,
        "weight_grad_hold_bytes": 16,
        "boundary_bytes": 4,
        "boundary_grad_bytes": 2,
    }
    return LayerProfile(**{**fields, **changes})


def profile(
    *layers: LayerProfile, ranks: int = 2, link: Link = FAST, device: DeviceProfile = DEVICE, **cluster: Any
) -> Profile:
    return Profile(
        model=ModelProfile(layers=layers, microbatch_size=1, precision="float32", threads=1),
        cluster=Cluster.uniform(device, ranks, link, **cluster),
        key="key",
        source="a test",
    )


def plan(
    *counts: int, schedule: str = "1f1b", microbatches: int = 2, chunks: int = 1, **changes: Any
) -> Plan:
    """A plan with `counts` layers per stage."""
    cuts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    ranks = len(counts) // chunks
    fields: dict[str, Any] = {
        "epoch": 1,
        "version": 1,
        "reason": "a test",
        "layers": tuple(pairwise(cuts)),
        "stage_ranks": family(schedule).placement(ranks, chunks),
        "schedule": schedule,
        "chunks": chunks,
        "microbatches": microbatches,
        "replicas": 1,
    }
    return Plan(**{**fields, **changes})
