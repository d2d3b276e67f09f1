"""If-Match: a control names the plan that its sender saw. The job's controller refuses it if there is another one by
now."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header
from pydantic import Field

from dashboard.service.mistakes import ETAG, VERSION
from dashboard.service.problems import ProblemAnswer
from orchestrator.history.job_view import JobView

Version = Annotated[str | None, Field(pattern=VERSION)]
Match = Annotated[
    str | None,
    Header(
        alias="If-Match",
        pattern=ETAG,
        description="Version of the plan that the sender saw; another one now: 409 with the newer version.",
        examples=['"1.2"'],
    ),
]


def no_plan(view: JobView) -> ProblemAnswer:
    """The answer about a job that has no plan yet."""
    return ProblemAnswer(
        409, f"job {view.job!r} has no plan yet: it is {view.state}", action="Ask again in a moment."
    )


def base_of(*versions: str | None) -> tuple[int, int] | None:
    """The (epoch, version) that is named, as `1.2` or as an ETag; None: whichever is the newest.

    Raises:
        ProblemAnswer: two different ones are named.
    """
    named = sorted({version.strip('"') for version in versions if version is not None})
    if len(named) > 1:
        raise ProblemAnswer(422, f"If-Match and version name different plans: {named[0]} and {named[1]}")
    if not named:
        return None
    epoch, version = map(int, named[0].split("."))
    return epoch, version
