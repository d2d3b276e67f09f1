"""From a spec to the configuration of its ranks, in one call."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.resolve import Resolved, resolve
from orchestrator.prepare.settling import SettledSpec, settle
from orchestrator.spec.checks import check
from orchestrator.spec.job_spec import Spec
from planner.plan import Plan


def settle_spec(spec: Spec, found: ModelOutline, totals: Mapping[str, float]) -> SettledSpec:
    return settle(check(spec), found, totals)


def resolve_spec(
    spec: Spec, found: ModelOutline, totals: Mapping[str, float], *, epoch: int, plan: Plan | None = None
) -> Resolved:
    return resolve(settle_spec(spec, found, totals), epoch=epoch, plan=plan)
