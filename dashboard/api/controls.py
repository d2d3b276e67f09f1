"""Controls of a job: a route for each command of the table, with its body. A controller decides what happens."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Path, Query
from pydantic import Field, create_model, model_validator

from dashboard.api.faults import DrillOrder
from dashboard.api.models import Answer, JobName, Key, StrictModel
from dashboard.api.plan_match import Match, Version, base_of
from dashboard.service.mistakes import KEY
from dashboard.service.problems import PlanMoving, documented
from dashboard.service.services import From, Parts, Services
from orchestrator.client.errors import PlanChanged
from orchestrator.client.jobs import Command
from orchestrator.commands.command import FieldLimits, JobCommand, PlanCommand, metadata
from orchestrator.commands.fault import InjectFault
from orchestrator.commands.table import COMMANDS
from planner.wording import some_of

router = APIRouter(tags=["controls"], prefix="/jobs/{job}")

Wait = Annotated[
    float,
    Query(ge=0, le=60, description="How long to wait for the outcome; 0: answer once it is accepted."),
]
ERRORS = documented(400, 401, 403, 404, 408, 409, 413, 422, 429, 503)


class Body(StrictModel):
    """The body of a command: its fields within their limits, and the version of the plan that it is for."""

    kind: ClassVar[type[JobCommand]]

    @model_validator(mode="after")
    def _some(self) -> Body:
        some = self.kind.some
        if some and all(getattr(self, name) is None for name in some):
            raise ValueError(f"send {some_of(some)}")
        return self


def _body_of(kind: type[JobCommand]) -> type[StrictModel] | None:
    if kind is InjectFault:
        return DrillOrder
    fields: dict[str, Any] = {}
    for name, info in kind.own_fields().items():
        limits = metadata(info, FieldLimits) or FieldLimits({})
        shown = Field(default=info.default, description=info.description, **limits.bounds)
        fields[name] = (limits.kind or info.annotation, shown)
    if not fields:
        return None
    if issubclass(kind, PlanCommand):
        same = "The same as If-Match, for those who send no headers."
        fields["version"] = (Version, Field(default=None, description=same))
    extra = {"json_schema_extra": kind.model_config.get("json_schema_extra")}
    body = create_model(kind.__name__, __base__=Body, __doc__=kind.__doc__, __cls_kwargs__=extra, **fields)
    body.kind = kind
    return body


BODIES = {kind: _body_of(kind) for kind in COMMANDS}
"""Command -> the model of its body; None: it has none."""


def command_of(
    kind: type[JobCommand], body: Any, *, id: str | None, by: str, match: str | None = None
) -> JobCommand:
    """The command that a request asks for.

    Args:
        body: None: the fields have their defaults.

    Raises:
        ProblemAnswer: body and If-Match name different plans.
    """
    sent: dict[str, Any] = {"id": id, "by": by}
    if isinstance(body, DrillOrder):
        sent["drill"] = body.model_dump(mode="json", exclude_defaults=True)
    elif body is not None:
        sent |= {name: getattr(body, name) for name in kind.own_fields()}
    if issubclass(kind, PlanCommand):
        sent["base"] = base_of(match, getattr(body, "version", None))
    return kind(**sent)


async def answer_to(parts: Services, job: str, command: JobCommand, wait_s: float = 0.0) -> Answer:
    """Send a command, wait up to `wait_s` for what comes of it, and tell.

    Raises:
        PlanMoving: the job has the plan that the command is for, and a move is about to replace it.
        PlanChanged: the job has a newer one.
    """
    try:
        accepted = await parts.client.send(job, command)
    except PlanChanged as changed:
        if isinstance(command, PlanCommand) and command.base == (changed.epoch, changed.version):
            raise PlanMoving(str(changed), changed.epoch, changed.version) from None
        raise
    return await _outcome_of(parts, accepted, wait_s)


async def _outcome_of(parts: Services, command: Command, wait_s: float) -> Answer:
    answer = Answer(job=command.job, id=command.id, text=command.text)
    if wait_s <= 0:
        return answer
    try:
        answered = await parts.client.outcome(command, timeout_s=wait_s)
    except TimeoutError:
        return answer
    return Answer(job=command.job, id=command.id, text=answered.text, done=answered.done, step=answered.step)


def _add_route(kind: type[JobCommand]) -> None:
    async def send(job: str, parts: Services, by: Any, wait_s: float, key: str | None, **sent: Any) -> Answer:
        command = command_of(kind, sent.get("body"), id=key, by=by.name, match=sent.get("match"))
        return await answer_to(parts, job, command, wait_s)

    taken: dict[str, tuple[Any, Any]] = {
        "job": (JobName, inspect.Parameter.empty),
        "parts": (Parts, inspect.Parameter.empty),
        "by": (From, inspect.Parameter.empty),
        **({"match": (Match, None)} if issubclass(kind, PlanCommand) else {}),
        "key": (Key, None),
        "wait_s": (Wait, 0.0),
    }
    if (body := BODIES[kind]) is not None:
        needed = bool(kind.some) or any(info.is_required() for info in kind.own_fields().values())
        taken["body"] = (body, inspect.Parameter.empty) if needed else (body | None, None)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in taken.items()
    ]
    send.__name__, send.__doc__ = kind.name, kind.__doc__
    send.__signature__ = inspect.Signature(parameters, return_annotation=Answer)  # pyright: ignore[reportFunctionMemberAccess]
    router.post(f"/{kind.route or kind.name}", status_code=202, responses=ERRORS)(send)


for _kind in COMMANDS:
    _add_route(_kind)


@router.get("/commands/{id}", responses=documented(401, 403, 404, 409, 422, 503))
async def command(
    job: JobName,
    id: Annotated[str, Path(pattern=KEY, description="The command's id.")],
    parts: Parts,
    wait_s: Wait = 0.0,
) -> Answer:
    """Outcome of a control."""

    # At least a moment: an outcome that is known already is told.
    return await _outcome_of(parts, Command(job=job, id=id, text="it is under way"), max(wait_s, 0.05))
