"""Settles a checked spec, so that only the plan is left to choose. Pure.

A spec is checked once (`spec/checks.py`) and settled once; later code receives the settled value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.spec.checks import AUTO, CheckedSpec
from orchestrator.spec.job_spec import ClusterConfig, Spec
from planner.ir import Schedule
from workers.protocol import JobError

EMULATED_CPU = 0.05
"""CPUs that an emulated rank reserves: it mostly sleeps."""


@dataclass(frozen=True, kw_only=True)
class SettledSpec:
    """A spec with only the plan left to choose, and the outline of its model."""

    spec: Spec
    schedule: Schedule | None
    """Schedule of one replica, without recomputation; None if a search settles it."""
    outline: ModelOutline


def settle(checked: CheckedSpec, found: ModelOutline, cluster_resources: Mapping[str, float]) -> SettledSpec:
    """Settle the vocabulary, digests, device, resources and modelled times from the model, the data and the cluster.

    Args:
        cluster_resources: totals of the cluster, for `cluster.device = "auto"`.

    Raises:
        JobError: there is nothing to freeze.
    """
    spec = checked.spec
    pipeline = spec.pipeline
    least = pipeline.replicas if pipeline.ranks == AUTO else pipeline.ranks
    cluster = _settle_cluster(spec.cluster, least, cluster_resources)
    if spec.freeze.timely and cluster.device == "emulated" and not any(_times(found.emulated.weight_grad_s)):
        raise JobError(
            f"freeze.method = {spec.freeze.method!r}, but cluster.emulated.weight_grad_s is 0: there are no weight"
            ' gradients to skip; give them a time, or set freeze.method = "none"'
        )
    settled = spec.model_copy(
        update={
            "model": spec.model.settled(vocabulary=found.vocabulary, weights_sha256=found.weights_sha256),
            "data": spec.data.model_copy(update={"sha256": found.data_sha256}),
            "cluster": cluster.model_copy(update={"emulated": found.emulated}),
        }
    )
    return SettledSpec(spec=settled, schedule=checked.schedule, outline=found)


def _settle_cluster(cluster: ClusterConfig, ranks: int, totals: Mapping[str, float]) -> ClusterConfig:
    given = cluster.resources_per_rank
    device = cluster.device
    if device == "auto":
        gpus = ranks * (given.get("GPU", 0.0) if given is not None else 1.0)
        device = "cuda" if 0 < gpus <= totals.get("GPU", 0.0) else "cpu"
    if given is None:
        given = {
            "cpu": {"CPU": 1.0},
            "cuda": {"CPU": 1.0, "GPU": 1.0},
            "emulated": {"CPU": EMULATED_CPU},
        }[device]
    return cluster.model_copy(update={"device": device, "resources_per_rank": given})


def _times(seconds: float | tuple[float, ...]) -> tuple[float, ...]:
    return seconds if isinstance(seconds, tuple) else (seconds,)
