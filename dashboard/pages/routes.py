"""All pages, and the files that they load."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send

from dashboard.pages import (
    cluster_page,
    control_pages,
    events_page,
    job_page,
    jobs_page,
    login,
    output_page,
    runs_page,
    what_if_page,
)
from dashboard.pages.shown import error_page
from dashboard.pages.templating import BUNDLES, KINDS, bundle
from dashboard.service.guarded import wants_page
from dashboard.service.problems import ProblemAnswer, answer_to, problem_of_http

router = APIRouter(include_in_schema=False)


@router.get("/static/{name}")
async def file(name: str) -> Response:
    """A style sheet or script. Its address has its hash, so that a browser may keep it."""
    if name not in BUNDLES:
        raise ProblemAnswer(404, f"there is no file {name}")
    kind = KINDS[name.rpartition(".")[2]]
    return Response(
        bundle(name), media_type=kind, headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )


class _Compressed(GZipMiddleware):
    """Compresses pages and files. Programs that read the REST interface get it as it is, which costs no time."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(("/api/", "/metrics")):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def mount_pages(app: FastAPI) -> None:
    """Add the pages to `app`."""
    app.add_middleware(_Compressed, compresslevel=5)
    modules = (
        login,
        jobs_page,
        job_page,
        events_page,
        output_page,
        control_pages,
        what_if_page,
        cluster_page,
        runs_page,
    )
    for part in (router, *(module.router for module in modules)):
        app.include_router(part)

    @app.exception_handler(HTTPException)
    async def _no_route(request: Request, error: HTTPException) -> Response:
        problem = problem_of_http(request, error)
        if not wants_page(request.scope, request.headers):
            return answer_to(request, problem)
        return error_page(request, problem)
