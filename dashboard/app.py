"""Puts the service together: guard, errors, REST, pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer

from dashboard.api import cluster, controls, events, history, jobs, jobs_stream, metrics, output, plans, runs
from dashboard.api.models import StrictModel
from dashboard.api.streams import MOST_STREAMS, MOST_STREAMS_EACH
from dashboard.jobs.live_jobs import LiveJobs
from dashboard.jobs.past_runs import PastRuns
from dashboard.jobs.submission import Submissions
from dashboard.pages.routes import mount_pages
from dashboard.service import problems
from dashboard.service.access import Access, open_tokens
from dashboard.service.audit import Audit
from dashboard.service.guard import Guard, hosts_of
from dashboard.service.guarded import Guarded
from dashboard.service.limits import AtOnce
from dashboard.service.services import Services
from dashboard.service.settings import MOST_BODY_BYTES, ServiceSettings
from dashboard.service.threads import Threads
from orchestrator.client.job_client import JobClient

API = "/api/v1"
DESCRIPTION = (
    "Shows and controls the jobs of a cluster. Every answer that is an error is a problem+json with what to do. Send"
    " the token of ~/.freshet/tokens.json as a bearer token."
)


def create_app(settings: ServiceSettings) -> FastAPI:
    """The service. The process is a driver of the cluster already, if there is one.

    Raises:
        JobError: the token file cannot be made or read.
    """
    client = JobClient(settings.address) if settings.address is not None else None
    services = Services(
        settings=settings,
        access=Access(open_tokens(settings.tokens)),
        live=LiveJobs(client),
        past=PastRuns(settings.runs),
        submissions=Submissions(settings.address) if settings.address is not None else None,
        threads=Threads(),
        streams=AtOnce(MOST_STREAMS, MOST_STREAMS_EACH),
        closing=asyncio.Event(),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services.live.start()
        yield
        services.closing.set()
        await services.live.close()
        if services.submissions is not None:
            await services.submissions.close()
        services.threads.close()

    app = FastAPI(
        title="Freshet",
        version=_version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    problems.install(app)
    bearer = HTTPBearer(auto_error=False, description="A token of ~/.freshet/tokens.json.")
    api = APIRouter(prefix=API, dependencies=[Depends(bearer)])
    for module in (jobs, jobs_stream, controls, plans, events, history, output, cluster, runs):
        api.include_router(module.router)
    app.include_router(api)
    app.include_router(metrics.router, dependencies=[Depends(bearer)])
    mount_pages(app)

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    guard = Guard(services.access, hosts_of(settings.host, settings.hosts), MOST_BODY_BYTES)
    app.add_middleware(Guarded, guard=guard, audit=Audit(settings.audit), most_bytes=MOST_BODY_BYTES)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _document(app: FastAPI) -> dict[str, object]:
    """The OpenAPI document, with our error in place of the framework's."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for model in StrictModel.__subclasses__():
            if model.__name__ in schemas and "json_schema_extra" in model.model_config:
                # The framework has left out what is null in examples.
                schemas[model.__name__] |= model.model_config["json_schema_extra"]
        app.openapi_schema = document
    return app.openapi_schema


def _version() -> str:
    try:
        return version("freshet")
    except PackageNotFoundError:  # run from its source folder
        return "0"
