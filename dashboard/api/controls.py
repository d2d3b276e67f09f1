"""Controls of a job. Each is one command of the job client; a controller decides what happens."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field, model_validator

from dashboard.api.examples import example
from dashboard.api.faults import Drill
from dashboard.api.models import Answer, JobName, Key, Model
from dashboard.api.plan_match import Match, Version, base_of
from dashboard.service.mistakes import KEY, LAYERS
from dashboard.service.problems import PlanMoving, documented
from dashboard.service.services import From, Parts, Services
from orchestrator.client.errors import PlanChanged
from orchestrator.client.jobs import Command

router = APIRouter(tags=["controls"], prefix="/jobs/{job}")

Wait = Annotated[
    float,
    Query(ge=0, le=60, description="How long to wait for the outcome; 0: answer once it is accepted."),
]
ERRORS = documented(400, 401, 403, 404, 408, 409, 413, 422, 429, 503)


class Cancel(Model, json_schema_extra=example({"abort": False})):
    """Options for ending a job."""

    abort: bool = False
    """End at once, without a checkpoint."""


class Freeze(Model, json_schema_extra=example({"method": "timelyfreeze", "r_max": 0.5})):
    """New freeze settings; a field left out keeps its value."""

    method: str | None = None
    """Freeze method, as `freeze.method` in a spec: `none` turns freezing off."""
    r_max: float | None = Field(default=None, ge=0, le=1)
    """Largest mean share of a stage's weight gradients to leave out."""
    version: Version = None
    """The same as If-Match, for those who send no headers."""

    @model_validator(mode="after")
    def _some(self) -> Freeze:
        if self.method is None and self.r_max is None:
            raise ValueError("send method, r_max or both")
        return self


class Move(Model, json_schema_extra=example({"layers": "3-4", "rank": 1})):
    """Layers to move."""

    layers: str = Field(pattern=LAYERS)
    """A layer, or a run of them."""
    rank: int = Field(ge=0, le=10**6)
    """Number of the rank that gets them; it has the layers before or after them."""
    version: Version = None
    """The same as If-Match, for those who send no headers."""


class Scale(Model, json_schema_extra=example({"ranks": 4, "spares": 1})):
    """Numbers of ranks and spares to train with; a field left out keeps its value."""

    ranks: int | None = Field(default=None, ge=1, le=10**6)
    """Ranks of the job's pipelines."""
    spares: int | None = Field(default=None, ge=0, le=10**6)
    """Idle ranks, ready to replace lost ones."""
    version: Version = None
    """The same as If-Match, for those who send no headers."""

    @model_validator(mode="after")
    def _some(self) -> Scale:
        if self.ranks is None and self.spares is None:
            raise ValueError("send ranks, spares or both")
        return self


class Drain(Model, json_schema_extra=example({"node": "10.0.0.7", "deadline_s": 30.0})):
    """A node that the job must leave."""

    node: str = Field(min_length=1, max_length=200)
    """Its id in the cluster, the beginning of it, or its address."""
    deadline_s: float = Field(default=30.0, gt=0, le=86_400)
    """Seconds that the job's ranks have to hand over."""
    version: Version = None
    """The same as If-Match, for those who send no headers."""


class Undrain(Model, json_schema_extra=example({"node": "10.0.0.7"})):
    """A drained node that the job may use again."""

    node: str = Field(min_length=1, max_length=200)
    """Its id in the cluster, the beginning of it, or its address."""


async def outcome_of(
    parts: Services, sending: Awaitable[Command], wait_s: float, base: tuple[int, int] | None = None
) -> Answer:
    """Send a command, wait up to `wait_s` for what comes of it, and tell.

    Args:
        base: the plan that the command is for.

    Raises:
        PlanMoving: the job has that plan, and a move is about to replace it.
        PlanChanged: the job has a newer one.
    """
    try:
        command = await sending
    except PlanChanged as changed:
        if base == (changed.epoch, changed.version):
            raise PlanMoving(str(changed), changed.epoch, changed.version) from None
        raise
    answer = Answer(job=command.job, id=command.id, text=command.text)
    if wait_s <= 0:
        return answer
    try:
        answered = await parts.client.outcome(command, timeout_s=wait_s)
    except TimeoutError:
        return answer
    return Answer(job=command.job, id=command.id, text=answered.text, done=answered.done, step=answered.step)


@router.post("/cancel", status_code=202, responses=ERRORS)
async def cancel(
    job: JobName, parts: Parts, by: From, body: Cancel | None = None, key: Key = None, wait_s: Wait = 0.0
) -> Answer:
    """Stop after the step in flight, with a checkpoint; or at once, without one."""
    client, abort = parts.client, body is not None and body.abort
    sending = client.abort if abort else client.stop
    return await outcome_of(parts, sending(job, id=key, by=by.name), wait_s)


@router.post("/pause", status_code=202, responses=ERRORS)
async def pause(job: JobName, parts: Parts, by: From, key: Key = None, wait_s: Wait = 0.0) -> Answer:
    """Pause after the step in flight, with a checkpoint, and give the ranks back."""
    return await outcome_of(parts, parts.client.pause(job, id=key, by=by.name), wait_s)


@router.post("/resume", status_code=202, responses=ERRORS)
async def resume(job: JobName, parts: Parts, by: From, key: Key = None, wait_s: Wait = 0.0) -> Answer:
    """Go on with a paused job, once there is room for its ranks."""
    return await outcome_of(parts, parts.client.resume(job, id=key, by=by.name), wait_s)


@router.post("/checkpoint", status_code=202, responses=ERRORS)
async def checkpoint(job: JobName, parts: Parts, by: From, key: Key = None, wait_s: Wait = 0.0) -> Answer:
    """Write a checkpoint after the step in flight."""
    return await outcome_of(parts, parts.client.checkpoint(job, id=key, by=by.name), wait_s)


@router.post("/freeze", status_code=202, responses=ERRORS)
async def freeze(
    job: JobName,
    body: Freeze,
    parts: Parts,
    by: From,
    match: Match = None,
    key: Key = None,
    wait_s: Wait = 0.0,
) -> Answer:
    """Change how much of the backward passes is frozen, from a commit on."""
    base = base_of(match, body.version)
    sending = parts.client.freeze(job, method=body.method, r_max=body.r_max, base=base, id=key, by=by.name)
    return await outcome_of(parts, sending, wait_s, base)


@router.post("/move", status_code=202, responses=ERRORS)
async def move(
    job: JobName,
    body: Move,
    parts: Parts,
    by: From,
    match: Match = None,
    key: Key = None,
    wait_s: Wait = 0.0,
) -> Answer:
    """Move layers to another rank while the job trains."""
    base = base_of(match, body.version)
    sending = parts.client.move(job, body.layers, body.rank, base=base, id=key, by=by.name)
    return await outcome_of(parts, sending, wait_s, base)


@router.post("/scale", status_code=202, responses=ERRORS)
async def scale(
    job: JobName,
    body: Scale,
    parts: Parts,
    by: From,
    match: Match = None,
    key: Key = None,
    wait_s: Wait = 0.0,
) -> Answer:
    """Change the number of ranks or spares, with the same bits."""
    base = base_of(match, body.version)
    sending = parts.client.scale(job, ranks=body.ranks, spares=body.spares, base=base, id=key, by=by.name)
    return await outcome_of(parts, sending, wait_s, base)


@router.post("/drain", status_code=202, responses=ERRORS)
async def drain(
    job: JobName,
    body: Drain,
    parts: Parts,
    by: From,
    match: Match = None,
    key: Key = None,
    wait_s: Wait = 0.0,
) -> Answer:
    """Have the job leave a node, as before a preemption, and start no ranks there until it is undrained."""
    base = base_of(match, body.version)
    sending = parts.client.drain(job, body.node, body.deadline_s, base=base, id=key, by=by.name)
    return await outcome_of(parts, sending, wait_s, base)


@router.post("/undrain", status_code=202, responses=ERRORS)
async def undrain(
    job: JobName, body: Undrain, parts: Parts, by: From, key: Key = None, wait_s: Wait = 0.0
) -> Answer:
    """Have the job use a node again that it was asked to leave."""
    return await outcome_of(parts, parts.client.undrain(job, body.node, id=key, by=by.name), wait_s)


@router.post("/faults", status_code=202, responses=ERRORS)
async def fault(
    job: JobName,
    body: Drill,
    parts: Parts,
    by: From,
    key: Key = None,
    wait_s: Wait = 0.0,
) -> Answer:
    """Inject a fault, as `freshet fault` does, into a job that allows faults."""
    drill = body.model_dump(mode="json", exclude_defaults=True)
    return await outcome_of(parts, parts.client.fault(job, drill, id=key, by=by.name), wait_s)


@router.get("/commands/{id}", responses=documented(401, 403, 404, 409, 422, 503))
async def command(
    job: JobName,
    id: Annotated[str, Path(pattern=KEY, description="The command's id.")],
    parts: Parts,
    wait_s: Wait = 0.0,
) -> Answer:
    """Outcome of a control."""

    async def sent() -> Command:
        return Command(job=job, id=id, text="it is under way")

    # At least a moment: an outcome that is known already is told.
    return await outcome_of(parts, sent(), max(wait_s, 0.05))
