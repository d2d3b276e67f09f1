"""A job's recorded history: curves, checkpoints, timelines, profile. The same for live jobs and past runs."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from dashboard.api.examples import CHECKPOINTS, PROFILE, TELEMETRY, TIMELINE, TRACE, answered, example
from dashboard.api.models import JsonObject, StrictModel
from dashboard.api.sources import JobSource, Live, Past
from dashboard.service.problems import ProblemAnswer, documented
from orchestrator.analysis.metric_curves import metric_curves
from orchestrator.analysis.step_memory import profile_beside
from orchestrator.analysis.throughput import throughput
from orchestrator.events.types import named_floats
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import JobView
from orchestrator.report.step.step_timeline import StepTimeline, measured_step
from planner.profile import Profile

router = APIRouter(tags=["history"])
ERRORS = documented(401, 403, 404, 422, 503)
PROFILE_ANSWER = answered(PROFILE, "As docs/profile.md describes it; the example is abridged.")

Last = Annotated[int, Query(ge=1, le=5_000, description="How many of the newest steps.")]
Step = Annotated[int | None, Query(ge=1, le=2**53, description="A measured step; unset: the newest one.")]
Picture = Annotated[Literal["measured", "simulated"], Query(alias="source", description="Which timeline.")]
Format = Annotated[
    Literal["json", "perfetto"], Query(description="`perfetto`: a trace for ui.perfetto.dev, with both.")
]


class Telemetry(StrictModel, json_schema_extra=example(TELEMETRY)):
    """Curves over the newest steps; an older entry may stand for its neighbours too. Null: not finite."""

    step: list[int]
    loss: list[float | None]
    grad_norm: list[float | None]
    step_s: list[float]
    tokens_per_s: list[float]
    bubble: list[float]
    """Share of a step in which the ranks did not compute."""
    validation: dict[int, float | None]
    """Step -> validation loss."""
    metrics: dict[str, dict[int, float]]
    """Metric of validations -> step -> value."""


class ListedCheckpoint(StrictModel):
    """A written checkpoint, or a failed one."""

    step: int
    path: str
    bytes: int
    seconds: float
    error: str | None


class Checkpoints(StrictModel, json_schema_extra=example(CHECKPOINTS)):
    """The newest checkpoints, oldest first."""

    checkpoints: list[ListedCheckpoint]


class HistorySpan(StrictModel):
    """One action of a rank, timed in seconds since the step began."""

    rank: int
    action: str
    """Its token, such as `2F0`: stage, kind, microbatch."""
    start_s: float
    end_s: float


class TimelineModel(StrictModel, json_schema_extra=example(TIMELINE)):
    """One step of all ranks."""

    step: int
    source: str
    step_s: float
    """From commit to commit, or as predicted."""
    title: str
    spans: list[HistorySpan]
    steps: list[int]
    """The steps of which a timeline is kept."""


class ChromeTrace(StrictModel, json_schema_extra=example(TRACE)):
    """A trace in Chrome's format, which ui.perfetto.dev opens."""

    displayTimeUnit: str
    traceEvents: list[JsonObject]


def profile_in(folder: str) -> Profile | None:
    """The profile in a job's folder, if there is one that is visible here. Reads a file."""
    return profile_beside(JobFolder(folder).events_path) if folder else None


def _telemetry(view: JobView, last: int) -> Telemetry:
    steps = [view.steps[step] for step in sorted(view.steps)[-last:]]
    return Telemetry(
        step=[each.step for each in steps],
        loss=[_finite(each.loss) for each in steps],
        grad_norm=[_finite(each.grad_norm) for each in steps],
        step_s=[each.step_s for each in steps],
        tokens_per_s=[throughput(each) if each.step_s > 0 else 0.0 for each in steps],
        bubble=[each.bubble for each in steps],
        validation={step: _finite(report.loss) for step, report in sorted(view.validations.items())},
        metrics=metric_curves(view),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _checkpoints(view: JobView) -> Checkpoints:
    return Checkpoints(checkpoints=[ListedCheckpoint(**vars(each)) for each in view.checkpoints])


def _profile(folder: str) -> JsonObject:
    found = profile_in(folder)
    if found is None:
        raise ProblemAnswer(
            404,
            "the job has no profile: it was planned without measuring, or its folder is not visible here",
            action="Plan by time (pipeline.partition = 'dynpipe'), or ask where the folder is.",
        )
    return named_floats(json.loads(found.to_json()))


def step_of(view: JobView, folder: str, step: int | None) -> StepTimeline:
    """The timelines of a measured step.

    Raises:
        ProblemAnswer: there is none, or not of this step.
    """
    kept = step is None or step in view.measured
    found = measured_step(view, profile_in(folder), step) if kept else None
    if found is None:
        listed = ", ".join(map(str, sorted(view.measured)[-20:])) or "none yet"
        raise ProblemAnswer(
            404,
            f"no timeline of step {step} is kept" if step is not None else "no step was measured yet",
            action=f"Ask for one of the measured steps: {listed}.",
        )
    return found


def _timeline(view: JobView, folder: str, step: int | None, source: str) -> TimelineModel:
    found = step_of(view, folder, step)
    measured = TimelineModel.model_validate(found.values())
    if source == "measured":
        return measured
    predicted = found.predicted
    if predicted is None:
        raise ProblemAnswer(404, f"step {found.step} has no prediction: the plan was made without a profile")
    spans = [
        HistorySpan(rank=rank, action=str(span.action), start_s=span.start_s, end_s=span.end_s)
        for rank, spans in enumerate(predicted.timeline)
        for span in spans
    ]
    return measured.model_copy(update={"source": source, "step_s": predicted.step_s, "spans": spans})


async def _timeline_answer(
    source: JobSource, step: int | None, picture: str, format: str
) -> TimelineModel | Response:
    if format == "perfetto":
        trace = await source.read(lambda view: step_of(view, source.folder(view), step).trace())
        return Response(trace, media_type="application/json")
    return await source.read(lambda view: _timeline(view, source.folder(view), step, picture))


@router.get("/jobs/{job}/telemetry", responses=ERRORS)
async def job_telemetry(live: Live, last: Last = 1_000) -> Telemetry:
    """Loss, gradient norm, step time and throughput over the newest steps."""
    return await live.read(lambda view: _telemetry(view, last))


@router.get("/runs/{run}/telemetry", responses=ERRORS)
async def run_telemetry(past: Past, last: Last = 1_000) -> Telemetry:
    """The same of a past run."""
    return await past.read(lambda view: _telemetry(view, last))


@router.get("/jobs/{job}/checkpoints", responses=ERRORS)
async def job_checkpoints(live: Live) -> Checkpoints:
    """The newest checkpoints."""
    return await live.read(_checkpoints)


@router.get("/runs/{run}/checkpoints", responses=ERRORS)
async def run_checkpoints(past: Past) -> Checkpoints:
    """The same of a past run."""
    return await past.read(_checkpoints)


@router.get("/jobs/{job}/profile", responses=ERRORS | PROFILE_ANSWER)
async def job_profile(live: Live) -> dict[str, Any]:
    """The profile that the job was planned with: docs/profile.md describes it."""
    return await live.read(lambda view: _profile(live.folder(view)))


@router.get("/runs/{run}/profile", responses=ERRORS | PROFILE_ANSWER)
async def run_profile(past: Past) -> dict[str, Any]:
    """The same of a past run."""
    return await past.read(lambda view: _profile(past.folder(view)))


@router.get("/jobs/{job}/timeline", responses=ERRORS, response_model=TimelineModel | ChromeTrace)
async def job_timeline(
    live: Live, step: Step = None, picture: Picture = "measured", format: Format = "json"
) -> Any:
    """Timeline of every rank in a measured step, as measured or as simulated."""
    return await _timeline_answer(live, step, picture, format)


@router.get("/runs/{run}/timeline", responses=ERRORS, response_model=TimelineModel | ChromeTrace)
async def run_timeline(
    past: Past, step: Step = None, picture: Picture = "measured", format: Format = "json"
) -> Any:
    """The same of a past run."""
    return await _timeline_answer(past, step, picture, format)
