"""Plans of a job: the current one, earlier ones, and proposals."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from dashboard.api.controls import ERRORS
from dashboard.api.examples import PLAN_ANSWER, PROPOSAL, example
from dashboard.api.models import JobName, StrictModel
from dashboard.api.plan_match import no_plan
from dashboard.api.sources import Live
from dashboard.service.problems import documented
from dashboard.service.services import Parts
from orchestrator.commands.apply import Layers
from orchestrator.history.job_view import IssuedPlan, JobView

router = APIRouter(tags=["plans"], prefix="/jobs/{job}")


class PlanAnswer(StrictModel, json_schema_extra=example(PLAN_ANSWER)):
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


class PlanList(StrictModel, json_schema_extra=example({"plans": [PLAN_ANSWER]})):
    """The newest plans, oldest first."""

    plans: list[PlanAnswer]


class WantedPartition(StrictModel, json_schema_extra=example({"partition": [3, 2, 1, 2]})):
    """A partition to look at."""

    partition: list[Layers] | None = Field(default=None, max_length=4096)
    """Layers per stage; null: the planner's own best."""


class ProposalAnswer(StrictModel, json_schema_extra=example(PROPOSAL)):
    """A partition that the ranks could have, validated and simulated. Nothing has changed yet."""

    partition: list[int]
    """Layers per stage."""
    current_partition: list[int]
    """Layers per stage once the moves that were requested so far are over."""
    version: str
    """`EPOCH.VERSION` of the job's plan: send it as If-Match to apply this."""
    problem: str | None
    """Why it cannot be applied; null: it can."""
    moved_layers: list[int]
    """The layers that would change ranks."""
    predicted_step_s: float | None
    """With nothing frozen; null without a profile, or for no valid partition."""
    current_predicted_step_s: float | None
    """The same for the current partition."""
    peak_memory_bytes: list[int]
    """Per place of the pipeline; empty where nothing is predicted."""
    memory_limit_bytes: list[int]
    """Per place of the pipeline, what its device has."""
    candidates: list[dict[str, Any]]
    """The cuts that the planner compared, with their predicted steps."""


def _answer(decision: IssuedPlan) -> PlanAnswer:
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
        raise no_plan(view)
    return _answer(view.decisions[-1])


@router.get("/plan", responses=documented(401, 403, 404, 409, 422, 503))
async def plan(live: Live, response: Response) -> PlanAnswer:
    """The plan that the job follows or is about to follow. Its version is the ETag."""
    found = await live.read(_newest)
    response.headers["ETag"] = f'"{found.version}"'
    return found


@router.get("/plans", responses=documented(401, 403, 404, 422, 503))
async def plans(live: Live) -> PlanList:
    """The newest plans, each with the reason for it."""
    return await live.read(lambda view: PlanList(plans=[_answer(each) for each in view.decisions]))


@router.post("/plan/proposal", responses=ERRORS)
async def propose(job: JobName, parts: Parts, body: WantedPartition | None = None) -> ProposalAnswer:
    """Validate and simulate another partition. Nothing changes."""
    found = await parts.client.propose(job, body.partition if body is not None else None)
    values = asdict(found)
    epoch, version = values.pop("base")
    return ProposalAnswer(version=f"{epoch}.{version}", **values)
