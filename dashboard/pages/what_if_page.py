"""The what-if page: change ranks, schedule, cut, r_max, a device or a link, and see the step the simulator expects.

The change is in the address, so that a link shares it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query, Response
from markupsafe import Markup
from pydantic import BaseModel, Field, model_validator

from dashboard.pages.shown import Job, Run, Shown, ShownJob, page_router
from dashboard.pages.templating import html, rendered
from dashboard.service.access import Caller
from dashboard.service.mistakes import CUT
from dashboard.service.services import From
from orchestrator.analysis.job_summary import plan_version
from orchestrator.analysis.what_if import WhatIf, what_if
from orchestrator.client.errors import JobError
from orchestrator.commands.change import BEST, KEEP, WhatIfChange
from orchestrator.report.step.what_if_part import WhatIfPart, what_if_part
from planner.schedule.registry import families

router = page_router()


class WhatIfForm(BaseModel):
    """The form; what is left out stays as it is."""

    ranks: int | None = Field(default=None, ge=1, le=512)
    schedule: str | None = Field(default=None, max_length=40)
    cut: str = Field(default=BEST, max_length=2000, pattern=CUT)
    r_max: float | None = Field(default=None, ge=0, le=1)
    slow_rank: int | None = Field(default=None, ge=0, le=10_000)
    slowdown: float = Field(default=2.0, gt=0, le=1000)
    source: int | None = Field(default=None, ge=0, le=10_000)
    target: int | None = Field(default=None, ge=0, le=10_000)
    bandwidth: float = Field(default=0.1, gt=0, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value != ""} if isinstance(data, dict) else data

    @property
    def change(self) -> WhatIfChange:
        """The change to simulate."""
        cut = self.cut
        return WhatIfChange(
            ranks=self.ranks,
            schedule=self.schedule,
            cut=cut
            if cut in (BEST, KEEP)
            else tuple(map(int, cut.replace("+", " ").replace(",", " ").split())),
            r_max=self.r_max,
            slow_rank=self.slow_rank,
            slowdown=self.slowdown if self.slow_rank is not None else 1.0,
            source=self.source,
            target=self.target,
            bandwidth=self.bandwidth if None not in (self.source, self.target) else 1.0,
        )


@dataclass(frozen=True)
class WayToApply:
    """A way to apply one part of a change, or why there is none."""

    text: str
    control: str = ""
    """Address of the form that does it, below the job's page; empty: none does."""


def ways(found: WhatIf, asked: WhatIfForm, version: str | None) -> list[WayToApply]:
    """Ways to apply the change to the running job, one per part of it."""
    now, then = found.now, found.then
    wanted: list[WayToApply] = []

    def form(name: str, **fields: object) -> str:
        """The form of a control: for the plan that this was simulated for."""
        return f"{name}?{urlencode({**fields, **({'version': version} if version else {})})}"

    if then.plan.schedule != now.plan.schedule:
        wanted.append(
            WayToApply(
                "A running job keeps its schedule. Cancel it, and submit it again with resume and pipeline.schedule ="
                f' "{then.plan.schedule}": it goes on from its checkpoint, with the same bits.'
            )
        )
    if then.plan.pipeline_ranks != now.plan.pipeline_ranks:
        ranks = then.plan.pipeline_ranks
        wanted.append(
            WayToApply(f"Scale to {ranks} ranks; the job cuts the layers itself.", form("scale", ranks=ranks))
        )
    if found.same_shape and then.cut != now.cut:
        cut = "+".join(map(str, then.cut))
        wanted.append(
            WayToApply("Have the ranks take up this cut while they train.", form("plan", partition=cut))
        )
    if then.r_max != now.r_max:
        fields = {"r_max": then.r_max} if then.r_max else {"method": "none"}
        wanted.append(WayToApply("Change what is frozen, from a commit on.", form("freeze", **fields)))
    if asked.slow_rank is not None or None not in (asked.source, asked.target):
        wanted.append(
            WayToApply(
                "The slower device or the other link is an assumption: nothing in the running job changes it."
            )
        )
    return wanted


async def _page(subject: ShownJob, asked: WhatIfForm, caller: Caller) -> Response:
    def made(shown: Shown) -> Markup:
        part: WhatIfPart | None = None
        possible: list[WayToApply] = []
        problem = ""
        try:
            found = what_if(shown.view, shown.profile(), asked.change)
        except JobError as error:
            problem = str(error)
        else:
            part, possible = what_if_part(found), ways(found, asked, plan_version(shown.view))
        return rendered(
            "what_if.html.j2",
            shown=shown,
            asked=asked,
            families=list(families()),
            part=part,
            ways=possible,
            problem=problem,
            caller=caller,
        )

    return html(await subject.read(made, simulates=True))


@router.get("/jobs/{job}/what-if")
async def job_what_if(job: Job, caller: From, asked: Annotated[WhatIfForm, Query()]) -> Response:
    """Show the what-if page of a job."""
    return await _page(job, asked, caller)


@router.get("/runs/{run}/what-if")
async def run_what_if(run: Run, caller: From, asked: Annotated[WhatIfForm, Query()]) -> Response:
    """Show the what-if page of a past run."""
    return await _page(run, asked, caller)
