"""Plans of a job: the current one, earlier ones, proposals, and applying one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from dashboard.api.models import Model
from dashboard.api.sources import Live
from dashboard.service.problems import Problem, documented
from orchestrator.history.job_view import Decision, JobView

router = APIRouter(tags=["plans"], prefix="/jobs/{job}")


class PlanAnswer(Model):
    """A plan, and what it was chosen from."""

    version: str = Field(examples=["1.2"])
    """`EPOCH.VERSION`: the ETag, to send as If-Match."""
    time_s: float
    """When it was issued, in seconds since the Unix epoch."""
    reason: str
    """Why it was chosen, in words."""
    plan: dict[str, Any]
    alternatives: list[dict[str, Any]]
    """The plans that were considered, each with its predicted step; empty if there was no search."""


class Plans(Model):
    """The newest plans, oldest first."""

    plans: list[PlanAnswer]


def _answer(decision: Decision) -> PlanAnswer:
    plan = decision.plan
    return PlanAnswer(
        version=f"{plan.epoch}.{plan.version}",
        time_s=decision.time_s,
        reason=plan.reason,
        plan=asdict(plan),
        alternatives=[asdict(each) for each in decision.alternatives],
    )


def _newest(view: JobView) -> PlanAnswer:
    if not view.decisions:
        raise Problem(
            409, f"job {view.job!r} has no plan yet: it is {view.state}", action="Ask again in a moment."
        )
    return _answer(view.decisions[-1])


@router.get("/plan", responses=documented(401, 403, 404, 409, 422))
async def plan(live: Live, response: Response) -> PlanAnswer:
    """The plan that the job follows or is about to follow. Its version is the ETag."""
    found = await live.read(_newest)
    response.headers["ETag"] = f'"{found.version}"'
    return found


@router.get("/plans", responses=documented(401, 403, 404, 422))
async def plans(live: Live) -> Plans:
    """The newest plans, each with the reason for it."""
    return await live.read(lambda view: Plans(plans=[_answer(each) for each in view.decisions]))
