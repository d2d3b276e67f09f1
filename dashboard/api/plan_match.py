"""If-Match: a control names the plan that its sender saw, and is refused if the job has another one by now."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from dashboard.api.models import JobName, Key
from dashboard.service.problems import Problem
from dashboard.service.services import Parts
from orchestrator.client.errors import PlanChanged
from orchestrator.history.job_view import JobView

VERSION = r"^\d{1,9}\.\d{1,9}$"
Match = Annotated[
    str | None,
    Header(
        alias="If-Match",
        pattern=r'^"?\d{1,9}\.\d{1,9}"?$',
        description="Version of the plan that the sender saw; another one now: 409 with the newer version.",
        examples=['"1.2"'],
    ),
]


async def unchanged(job: JobName, parts: Parts, match: Match = None, key: Key = None) -> None:
    """Check that the job, as it is known here, still has the plan of If-Match. A control that has arrived before is the
    same one again: it is not asked what the plan is now, which it may have changed itself.

    Raises:
        PlanChanged: it has a newer one.
        Problem: it has none yet.
    """
    base = base_of(match)
    if base is None:
        return
    view = (await parts.live.find(job)).view
    if key is not None and view.commands.get(key) is not None:
        return
    if view.plan is None:
        raise no_plan(view)
    newest = view.plan.epoch, view.plan.version
    if base != newest:
        raise PlanChanged(
            f"plan {base[0]}.{base[1]} is not the newest one any more: that is {newest[0]}.{newest[1]}",
            *newest,
        )


def no_plan(view: JobView) -> Problem:
    """The answer about a job that has no plan yet."""
    return Problem(
        409, f"job {view.job!r} has no plan yet: it is {view.state}", action="Ask again in a moment."
    )


def base_of(*versions: str | None) -> tuple[int, int] | None:
    """The (epoch, version) that is named, as `1.2` or as an ETag; None: whichever is the newest.

    Raises:
        Problem: two different ones are named.
    """
    named = sorted({version.strip('"') for version in versions if version is not None})
    if len(named) > 1:
        raise Problem(422, f"If-Match and version name different plans: {named[0]} and {named[1]}")
    if not named:
        return None
    epoch, version = map(int, named[0].split("."))
    return epoch, version
