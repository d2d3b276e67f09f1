"""From a spec to a settled job, in one call."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.planning import unmeasured_plan
from orchestrator.prepare.settling import Settled, on_cluster, with_model, with_plan
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import check
from planner.plan import Plan


def settle_spec(spec: Spec, found: ModelOutline, totals: Mapping[str, float]) -> Spec:
    """`spec`, with only the plan left to choose."""
    return on_cluster(with_model(check(spec), found), totals)


def resolve_spec(
    spec: Spec, found: ModelOutline, totals: Mapping[str, float], *, epoch: int, plan: Plan | None = None
) -> Settled:
    spec = settle_spec(spec, found, totals)
    return with_plan(spec, found, plan or unmeasured_plan(spec, found), epoch=epoch)
