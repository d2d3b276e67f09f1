"""The one shape of errors: problem+json (RFC 9457), with what to do about it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from dashboard.service.mistakes import mistakes
from orchestrator.client.errors import (
    CommandIdReused,
    ControllerSilent,
    JobError,
    NoController,
    NoSuchJob,
    PlanChanged,
    Refused,
    problem_type,
)

TITLES = {
    400: "Bad request",
    401: "Not logged in",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Refused",
    413: "Too large",
    414: "Address too long",
    415: "Unsupported media type",
    422: "Invalid input",
    429: "Too many requests",
    431: "Headers too large",
    500: "Our mistake",
    503: "No answer",
}
ACTIONS = {
    400: "Correct the request.",
    401: "Send the token as `Authorization: Bearer TOKEN`, or log in at /login.",
    403: "Use the control token.",
    404: "See GET /api/v1/jobs for what there is.",
    405: "See /openapi.json for the methods of this path.",
    408: "Send it again.",
    409: "See the job's state, then ask again with another Idempotency-Key.",
    413: "Send less.",
    414: "Send less of it in the address.",
    415: "Send JSON, with `Content-Type: application/json`.",
    422: "Correct what the detail names.",
    429: "Wait as long as Retry-After says.",
    431: "Send fewer and shorter headers.",
    500: "Report it, with the lines of the service's log.",
    503: "Ask again in a few seconds.",
}


class ProblemModel(BaseModel):
    """An error."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Not found",
                    "status": 404,
                    "detail": "no job 'gtp' is running at auto; did you mean 'gpt'?",
                    "action": "See GET /api/v1/jobs for what there is.",
                }
            ]
        }
    )
    type: str = "about:blank"
    """`urn:freshet:...` where a client can tell errors of one status apart."""
    title: str
    status: int
    detail: str
    """The cause of the error, with the number concerned."""
    action: str
    """Advice on resolving the error."""
    version: str | None = None
    """`EPOCH.VERSION` of the newest plan, if the request was for an older one, or a move is about to replace it."""


class ProblemAnswer(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        action: str = "",
        version: str | None = None,
        type: str = "about:blank",
        **headers: str,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.action = action or ACTIONS.get(status, "")
        self.version = version
        self.type = type
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        """The answer."""
        body = ProblemModel(
            type=self.type,
            title=TITLES.get(self.status, "Error"),
            status=self.status,
            detail=self.detail,
            action=self.action,
            version=self.version,
        )
        return JSONResponse(
            body.model_dump(exclude_none=True),
            status_code=self.status,
            headers=self.headers,
            media_type="application/problem+json",
        )


class PlanMoving(PlanChanged):
    """The plan that was to be replaced is the newest one, but a move is about to replace it."""


def problem_of(error: JobError) -> ProblemAnswer:
    """The answer that tells of `error`."""
    kind = problem_type(error)
    match error:
        case NoSuchJob():
            return ProblemAnswer(404, str(error), type=kind)
        case NoController():
            action = "Resume it with POST /api/v1/jobs, resume = true."
            return ProblemAnswer(409, str(error), action=action, type=kind)
        case ControllerSilent():
            return ProblemAnswer(503, str(error), type=kind, Retry_After="5")
        case PlanMoving(epoch=epoch, version=version):
            newest = f"{epoch}.{version}"
            kind = problem_type(PlanChanged(str(error), epoch, version))
            action = (
                "Ask again once its layers have moved, for the plan that GET /api/v1/jobs/JOB/plan has then."
            )
            return ProblemAnswer(409, str(error), action=action, version=newest, type=kind)
        case PlanChanged(epoch=epoch, version=version):
            newer = f"{epoch}.{version}"
            action = f"Read plan {newer} with GET /api/v1/jobs/JOB/plan, then decide again, with If-Match: {newer}."
            return ProblemAnswer(409, str(error), action=action, version=newer, type=kind)
        case Refused() | CommandIdReused():
            return ProblemAnswer(409, str(error), type=kind)
    return ProblemAnswer(422, str(error))


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these errors."""
    schema = {"$ref": "#/components/schemas/ProblemModel"}
    return {
        status: {
            "description": TITLES[status],
            "model": ProblemModel,
            "content": {"application/problem+json": {"schema": schema}},
        }
        for status in statuses
    }


def problem_of_http(request: Request, error: HTTPException) -> ProblemAnswer:
    """The answer to a request for which there is no route."""
    details = {404: f"there is no {request.url.path}", 405: f"{request.url.path} has no {request.method}"}
    detail = details.get(error.status_code, str(error.detail))
    headers = {name.replace("-", "_"): value for name, value in (error.headers or {}).items()}
    return ProblemAnswer(error.status_code, detail, **headers)


def answer_to(request: Request, problem: ProblemAnswer) -> JSONResponse:
    """The answer that tells of `problem`, which the audit log has too if it takes a line of the request."""
    request.state.why = problem.detail
    return problem.response()


def install(app: FastAPI) -> None:
    """Have `app` answer every error in the one shape."""

    @app.exception_handler(ProblemAnswer)
    async def _problem(request: Request, error: ProblemAnswer) -> JSONResponse:
        return answer_to(request, error)

    @app.exception_handler(JobError)
    async def _job_error(request: Request, error: JobError) -> JSONResponse:
        return answer_to(request, problem_of(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer_to(request, ProblemAnswer(422, mistakes(error.errors())))
