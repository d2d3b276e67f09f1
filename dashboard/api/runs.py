"""Past runs, from their folders."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from fastapi import APIRouter, Response
from pydantic import ValidationError

from dashboard.api.examples import SUMMARY, VIEW, answered, example
from dashboard.api.models import Model, Summary
from dashboard.api.sources import Past
from dashboard.jobs.past_runs import MOST_RUNS, PastRuns
from dashboard.service.problems import documented
from dashboard.service.services import Parts
from orchestrator.analysis.job_summary import job_summary
from orchestrator.client.errors import JobError
from orchestrator.history.job_view import JobView

router = APIRouter(tags=["runs"])


class Run(Model):
    """A past run."""

    run: str
    """How routes and pages call it."""
    folder: str
    summary: Summary | None
    """None if its log cannot be read."""
    problem: str
    """Why not."""


class Runs(
    Model,
    json_schema_extra=example(
        {
            "runs": [{"run": "gpt", "folder": "/data/runs/gpt", "summary": SUMMARY, "problem": ""}],
            "left_out": 0,
        }
    ),
):
    """Past runs, by name."""

    runs: list[Run]
    left_out: int
    """How many more there are: at most 1,000 are listed."""


def list_of(past: PastRuns) -> Runs:
    """The first `MOST_RUNS` past runs, by name. Reads the logs that are not known yet."""
    found: list[Run] = []
    runs = past.runs()
    for run in runs[:MOST_RUNS]:
        try:
            summary, problem = Summary.model_validate(asdict(past.summary(run))), ""
        except JobError as error:
            summary, problem = None, str(error)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            summary, problem = (
                None,
                f"the event log of {run.name} cannot be understood: {where}: {first['msg']}",
            )
        found.append(Run(run=run.name, folder=str(run.path), summary=summary, problem=problem))
    return Runs(runs=found, left_out=len(runs) - len(found))


@router.get("/runs", responses=documented(401, 403))
async def list_runs(parts: Parts) -> Runs:
    """Past runs in the folders that the service was started with."""
    return await parts.threads.read_files(partial(list_of, parts.past))


@router.get("/runs/{run}", responses=documented(401, 403, 404, 422))
async def get_run(past: Past) -> Summary:
    """A past run in a few numbers."""
    return await past.read(lambda view: Summary.model_validate(asdict(job_summary(view, lost=True))))


@router.get(
    "/runs/{run}/view",
    responses=documented(401, 403, 404, 422)
    | answered(VIEW, "A `JobView`, as the Python client reads it; the example is abridged."),
    response_class=Response,
)
async def get_run_view(past: Past) -> Response:
    """Everything that is kept of a past run, as the Python client reads it."""
    return Response(await past.read(JobView.to_json), media_type="application/json")
