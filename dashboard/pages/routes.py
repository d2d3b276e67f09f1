"""All pages, and the files that they load."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Response

from dashboard.pages import jobs_page, login
from dashboard.pages.templating import BUNDLES, KINDS, bundle
from dashboard.service.problems import Problem

router = APIRouter(include_in_schema=False)


@router.get("/static/{name}")
async def file(name: str) -> Response:
    """A style sheet or script. Its address has its hash, so that a browser may keep it."""
    if name not in BUNDLES:
        raise Problem(404, f"there is no file {name}")
    kind = KINDS[name.rpartition(".")[2]]
    return Response(
        bundle(name), media_type=kind, headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )


def mount_pages(app: FastAPI) -> None:
    """Add the pages to `app`."""
    for part in (router, login.router, jobs_page.router):
        app.include_router(part)
