"""Jobs: list, submit, get."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, model_validator

from dashboard.api.examples import SPEC, SUMMARY, VIEW, answered, example
from dashboard.api.models import JobName, Key, StrictModel, Summary
from dashboard.api.sources import Live, LiveSource, live_or_submitted
from dashboard.jobs.live_job import LiveJob
from dashboard.jobs.submission import PendingSubmission
from dashboard.jobs.submitted_spec import check_secrets, check_trust, spec_of, tables_of
from dashboard.service.problems import ProblemAnswer, documented
from dashboard.service.services import Parts, Services
from dashboard.service.settings import ServiceSettings
from orchestrator.analysis.job_summary import job_summary
from orchestrator.client.errors import ClusterSilent, CommandIdReused, JobError, NoSuchJob, Refused
from orchestrator.history.job_view import JobView

router = APIRouter(tags=["jobs"])


class JobList(StrictModel, json_schema_extra=example({"jobs": [SUMMARY], "trouble": ""})):
    """All jobs of the cluster."""

    jobs: list[Summary]
    trouble: str
    """Why the list may be old; empty if all is well."""


class SubmitBody(StrictModel, json_schema_extra=example({"spec": SPEC, "resume": False})):
    """A job to start: its spec as tables or as TOML text."""

    spec: dict[str, Any] | None = Field(default=None, examples=[SPEC])
    toml: str | None = Field(default=None, examples=['[job]\nname = "gpt"\n'])
    resume: bool = False
    """Continue from the newest checkpoint in the job's folder."""

    @model_validator(mode="after")
    def _one(self) -> SubmitBody:
        if (self.spec is None) == (self.toml is None):
            raise ValueError("send either spec or toml")
        return self


class StartedJob(
    StrictModel,
    json_schema_extra=example({"job": "gpt", "folder": "runs/gpt", "accepted": True, "page": "/jobs/gpt"}),
):
    """A job that is being started."""

    job: str
    folder: str
    accepted: bool
    """Whether its controller has accepted it; false: it is being measured and planned, see GET /jobs/JOB."""
    page: str
    """Path of the job's page."""


def summary_of(job: LiveJob) -> Summary:
    """The summary of a live job."""

    def make(view: JobView) -> Summary:
        lost = job.gone and view.outcome is None
        return Summary.model_validate(asdict(job_summary(view, trouble=job.trouble, lost=lost)))

    return job.cached(make)


def _summary_of_submission(submission: PendingSubmission) -> Summary:
    empty = asdict(job_summary(JobView(job=submission.job, state="submitting")))
    if submission.error:
        empty |= {"state": "refused", "trouble": submission.error}
    return Summary.model_validate(empty | {"folder": submission.folder})


def _beside(summary: Summary, refused: PendingSubmission) -> Summary:
    """The summary of a job that runs, while another one of its name was refused."""
    text = f"a job submitted under this name was refused: {refused.error}"
    return summary.model_copy(update={"trouble": summary.trouble or text})


def all_jobs(parts: Parts) -> list[Summary]:
    """Live jobs, and submissions that are not decided yet or were refused."""
    live = {job.name: job for job in parts.live.jobs()}
    found = {name: summary_of(job) for name, job in live.items()}
    for submission in parts.submissions.running() if parts.submissions is not None else ():
        known = live.get(submission.job)
        if known is None or submission.hides(known):
            found[submission.job] = _summary_of_submission(submission)
        elif submission.error and not known.ended:
            found[submission.job] = _beside(found[submission.job], submission)
    return [found[name] for name in sorted(found)]


@router.get("/jobs", responses=documented(401, 403))
async def list_jobs(parts: Parts) -> JobList:
    """All jobs of the cluster, each in a few numbers."""
    return JobList(jobs=all_jobs(parts), trouble=parts.live.trouble)


@router.post("/jobs", status_code=202, responses=documented(400, 401, 403, 408, 409, 413, 422, 429))
async def submit_job(
    body: SubmitBody,
    parts: Parts,
    request: Request,
    response: Response,
    key: Key = None,
    wait_s: Annotated[float, Query(ge=0, le=60, description="How long to wait until it has begun.")] = 0.0,
) -> StartedJob:
    """Submit a job. It is measured, planned and started; GET /jobs/JOB shows how far it is, or why it was refused. A
    job whose name another one has that runs is refused at once. The same request with the same Idempotency-Key is
    answered as the first one, and submits nothing again."""
    tables = tables_of(body.toml) if body.toml is not None else body.spec or {}
    spec = spec_of(tables)
    check_secrets(spec, _secrets(parts.settings))
    if not parts.settings.trust_specs:
        check_trust(spec, parts.settings.roots)
    if parts.submissions is None:
        parts.client  # noqa: B018  raises: there is no cluster
        raise AssertionError
    request.state.about = spec.job.name
    if parts.submissions.earlier(tables, body.resume, key) is None:
        await _check_name(parts, spec.job.name)
    try:
        submission = await parts.submissions.submit(
            tables, spec, resume=body.resume, key=key, decided=partial(_decided, parts)
        )
    except CommandIdReused:
        raise
    except JobError as error:
        raise ProblemAnswer(409, str(error)) from None
    await parts.submissions.wait(submission, wait_s)
    if submission.error:
        raise ProblemAnswer(422, submission.error)
    response.headers["Location"] = f"/api/v1/jobs/{spec.job.name}"
    return StartedJob(
        job=spec.job.name,
        folder=spec.job.folder,
        accepted=submission.done,
        page=f"/jobs/{spec.job.name}",
    )


async def _check_name(parts: Services, name: str) -> None:
    """Raises:
    Refused: a job called `name` runs.
    """
    try:
        known = await parts.live.find(name)
    except (NoSuchJob, ClusterSilent):  # whoever starts the job looks again
        return
    if not known.ended:
        view = known.view
        raise Refused(
            f"a job {name!r} is running (step {view.step} of {view.last_step}, in {view.folder}): cancel it, wait"
            " until it has ended, or choose another job.name"
        )


async def _decided(parts: Services, submission: PendingSubmission) -> None:
    """Look for the job of an accepted submission, and note which ended one a refused submission is newer than."""
    await parts.live.look()
    known = parts.live.known(submission.job)
    submission.ended = known if known is not None and known.ended else None


def _secrets(settings: ServiceSettings) -> list[Path]:
    """The files that no job may read or write."""
    return [*settings.own_files, *([settings.tls_key] if settings.tls_key is not None else [])]


@router.get("/jobs/{job}", responses=documented(401, 403, 404, 422, 503))
async def get_job(job: JobName, parts: Parts) -> Summary:
    """A job in a few numbers."""
    found = await live_or_submitted(job, parts)
    if isinstance(found, PendingSubmission):
        return _summary_of_submission(found)
    summary, refused = summary_of(found.job), parts.submission(job)
    return (
        _beside(summary, refused)
        if refused is not None and refused.error and not found.job.ended
        else summary
    )


@router.get(
    "/jobs/{job}/view",
    responses=documented(401, 403, 404, 422, 503)
    | answered(VIEW, "A `JobView`, as the Python client reads it; the example is abridged."),
    response_class=Response,
)
async def get_view(live: Live) -> Response:
    """Everything that is kept of a job, as the Python client reads it."""
    text = await view_text(live)
    return Response(text, media_type="application/json")


async def view_text(live: LiveSource) -> bytes:
    """The job's view as JSON."""

    def text(view: JobView) -> bytes:
        lost = live.lost and view.outcome is None
        shown = replace(view, trouble=view.trouble or live.trouble, state="lost" if lost else view.state)
        return shown.to_json()

    return await live.read(text)
