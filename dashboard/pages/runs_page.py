"""Past runs: all of them, and some beside each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response

from dashboard.api.runs import list_of
from dashboard.pages.head import tone_of
from dashboard.pages.shown import page_router
from dashboard.pages.sparkline import sparkline
from dashboard.pages.templating import page
from dashboard.service.problems import Problem
from dashboard.service.services import From, Parts
from orchestrator.report.comparison import comparison

router = page_router()

MOST_COMPARED = 6


@router.get("/runs")
async def runs(parts: Parts, caller: From) -> Response:
    """Past runs in the folders that the service was started with."""

    def made() -> Response:
        found = list_of(parts.past)
        rows = [
            (run, tone_of(run.summary.state), sparkline(run.summary.losses))
            if run.summary
            else (run, "bad", None)
            for run in found.runs
        ]
        return page(
            "runs.html.j2", runs=rows, left_out=found.left_out, folders=parts.settings.runs, caller=caller
        )

    return await parts.threads.read_files(made)


@router.get("/compare")
async def compare(
    parts: Parts,
    caller: From,
    run: Annotated[list[str] | None, Query(description="A run; once for each.")] = None,
) -> Response:
    """Runs beside each other."""
    names = list(dict.fromkeys(run or ()))
    if not 2 <= len(names) <= MOST_COMPARED:
        raise Problem(
            422,
            f"{len(names)} runs are chosen, and 2 to {MOST_COMPARED} can be compared",
            action="Choose some of the list of past runs.",
        )

    def made() -> object:
        return comparison([(name, parts.past.view(parts.past.find(name))) for name in names])

    return page("compare.html.j2", compared=await parts.threads.read_files(made), names=names, caller=caller)
