"""Past runs, from their folders."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Response

from dashboard.api.examples import SUMMARY, VIEW, answered, example
from dashboard.api.models import StrictModel, Summary
from dashboard.api.sources import Past
from dashboard.jobs.past_runs import MOST_RUNS, PastRuns
from dashboard.service.problems import documented
from dashboard.service.services import Parts
from orchestrator.analysis.job_summary import job_summary
from orchestrator.client.errors import JobError
from orchestrator.history.job_view import JobView

router = APIRouter(tags=["runs"])


class ListedRun(StrictModel):
    """A past run."""

    run: str
    """Name of the run in routes and pages."""
    folder: str
    summary: Summary | None
    """None if its log cannot be read."""
    problem: str
    """Why not."""


class Runs(
    StrictModel,
    json_schema_extra=example(
        {
            "runs": [{"run": "gpt", "folder": "/data/runs/gpt", "summary": SUMMARY, "problem": ""}],
            "left_out": 0,
        }
    ),
):
    """Past runs, by name."""

    runs: list[ListedRun]
    left_out: int
    """Number of runs that are not listed: at most 1,000 are."""


def list_of(past: PastRuns) -> Runs:
    """The first `MOST_RUNS` past runs, by name. Reads the logs that are not known yet."""
    found: list[ListedRun] = []
    runs = past.runs()
    for run in runs[:MOST_RUNS]:
        try:
            summary, problem = past.cached(run, _summary), ""
        except JobError as error:
            summary, problem = None, str(error)
        # It is valid: a thousand summaries take long to validate.
        found.append(
            ListedRun.model_construct(run=run.name, folder=str(run.path), summary=summary, problem=problem)
        )
    return Runs.model_construct(runs=found, left_out=len(runs) - len(found))


def _summary(view: JobView) -> Summary:
    return Summary.model_validate(asdict(job_summary(view, lost=True)))


@router.get("/runs", responses=documented(401, 403), response_model=Runs)
async def list_runs(parts: Parts) -> Response:
    """Past runs in the folders that the service was started with."""
    text = await parts.threads.read_files(lambda: list_of(parts.past).model_dump_json())
    return Response(text, media_type="application/json")


@router.get("/runs/{run}", responses=documented(401, 403, 404, 422))
async def get_run(past: Past) -> Summary:
    """A past run in a few numbers."""
    return await past.read(_summary)


@router.get(
    "/runs/{run}/view",
    responses=documented(401, 403, 404, 422)
    | answered(VIEW, "A `JobView`, as the Python client reads it; the example is abridged."),
    response_class=Response,
)
async def get_run_view(past: Past) -> Response:
    """Everything that is kept of a past run, as the Python client reads it."""
    return Response(await past.read(JobView.to_json), media_type="application/json")
