"""Log in with a token, log out."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from dashboard.pages.templating import page
from dashboard.service.access import COOKIE, SESSION_S
from dashboard.service.services import Parts

router = APIRouter(include_in_schema=False)


@router.get("/login")
async def show_login(next: Annotated[str, Query()] = "/") -> Response:
    """The form."""
    return page("login.html.j2", next=_local(next), wrong=False, caller=None)


@router.post("/login")
async def log_in(
    request: Request,
    parts: Parts,
    token: Annotated[str, Form(max_length=500)] = "",
    next: Annotated[str, Form(max_length=2000)] = "/",
) -> Response:
    """Give the browser a session for a token."""
    role = parts.access.role_of_token(token.strip())
    if role is None:
        answer = page("login.html.j2", next=_local(next), wrong=True, caller=None)
        answer.status_code = 401
        request.state.why = "there is no such token"
        return answer
    request.state.who = f"{role} from {request.client.host if request.client else 'unknown'}"
    answer = RedirectResponse(_local(next), 303)
    answer.set_cookie(
        COOKIE,
        parts.access.make_cookie(role, time.time()),
        max_age=int(SESSION_S),
        httponly=True,
        samesite="strict",
        # The browser's own word where a proxy ends TLS.
        secure=request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:"),
    )
    return answer


@router.post("/logout")
async def log_out() -> Response:
    """Forget the session in this browser."""
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _local(path: str) -> str:
    """`path` if it is a page of this service, or the start page."""
    safe = path.startswith("/") and not path.startswith(("//", "/\\")) and "\\" not in path
    return path if safe and path.isprintable() else "/"
