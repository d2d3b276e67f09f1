"""A benchmark's job as `freshet train` would settle it on this machine."""

from __future__ import annotations

from orchestrator.prepare.model_outline import ModelOutline, absolute
from orchestrator.prepare.planning import unmeasured_plan
from orchestrator.prepare.settling import Settled, on_cluster, opened, with_plan
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import check


def without_plan(spec: Spec, gpus: float = 0.0) -> tuple[Spec, ModelOutline]:
    """`spec` with only the plan left to choose, on a cluster of so many GPUs, and the outline of its model."""
    spec, found = opened(check(absolute(spec)))
    return on_cluster(spec, {"GPU": gpus}), found


def settled(spec: Spec) -> Settled:
    """The job of `spec` with a plan that needs no profile."""
    spec, found = without_plan(spec)
    return with_plan(spec, found, unmeasured_plan(spec, found), epoch=1)
