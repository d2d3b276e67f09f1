"""The way of every request: the guard, the body, the route, security headers, errors, the audit log.

No route can forget it. Not here: Who may do what, see `guard.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard.service.audit import Audit, AuditEntry
from dashboard.service.guard import OPEN_FOLDER, SAFE, Guard
from dashboard.service.problems import ProblemAnswer

log = logging.getLogger(__name__)

BODY_S = 30.0
"""Limit for a body to arrive."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: browsers then send `Origin: null` with a form of our own pages.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
WAYS_OUT = ("..", "%2e", "%2f", "%5c", "\\")
"""Parts of a path, encoded or not, by which it would leave its folder."""


class Guarded:
    """ASGI middleware.

    Args:
        most_bytes: largest body.
    """

    def __init__(self, app: ASGIApp, *, guard: Guard, audit: Audit, most_bytes: int) -> None:
        self._app = app
        self._guard = guard
        self._audit = audit
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = scope["client"][0] if scope.get("client") else "unknown"
        caller = self._guard.caller(headers, host)
        audited = scope["method"] not in SAFE
        control = False
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status, audited
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 403 or (400 <= status < 500 and _leads_out(scope)):
                    audited = True
                _add_headers(message, scope["path"])
            await send(message)

        why = ""
        state = scope.setdefault("state", {})
        try:
            control = self._guard.check(scope, headers, caller, host)
            if scope["method"] not in SAFE:
                receive = await self._body(receive)
            state["caller"] = caller
            await self._app(scope, receive, answer)
        except ProblemAnswer as problem:
            why = problem.detail
            audited = True
            if problem.status == 401 and wants_page(scope, headers):
                await RedirectResponse(f"/login?next={quote(_target(scope))}", 303)(scope, receive, answer)
            else:
                await problem.response()(scope, receive, answer)
        except ClientDisconnect:
            why, status = "the sender was gone before all of it had arrived", 0
        except Exception as error:
            # A route must not fail: this is a mistake of ours, or the cluster is gone. The service stays.
            log.exception("%s %s failed", scope["method"], scope["path"])
            why, audited = f"{type(error).__name__}", True
            if status == 0:
                await _failed(error).response()(scope, receive, answer)
        finally:
            if audited:
                name = caller.name if caller is not None else state.get("who", f"nobody from {host}")
                entry = AuditEntry(
                    time_s=time.time(),
                    caller=name,
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    about=state.get("about", ""),
                    why=why or state.get("why", ""),
                    control=control,
                    known=caller is not None or "who" in state,
                )
                self._audit.write(entry)

    async def _body(self, receive: Receive) -> Receive:
        """Read a body, however it is sent, and return a `receive` that gives it again.

        Raises:
            ProblemAnswer: it is larger than the limit, or does not arrive.
            ClientDisconnect: the sender has gone before all of it had arrived.
        """
        parts: list[bytes] = []
        more = True
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientDisconnect
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    if sum(map(len, parts)) > self._most_bytes:
                        raise ProblemAnswer(413, f"the body is larger than {self._most_bytes:,} bytes")
        except TimeoutError:
            raise ProblemAnswer(408, f"the body has not arrived within {BODY_S:g} s") from None
        body: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def again() -> Message:
            return body.pop() if body else await receive()

        return again


def _add_headers(start: Message, path: str) -> None:
    """Add the security headers to the start of an answer to a request for `path`."""
    out = MutableHeaders(scope=start)
    for name, value in HEADERS.items():
        out[name] = value
    if not path.startswith(OPEN_FOLDER):
        out["Cache-Control"] = "no-store"


def _failed(error: Exception) -> ProblemAnswer:
    """The answer to a request that a route could not serve."""
    if type(error).__module__.startswith("ray"):
        return ProblemAnswer(503, "the cluster does not answer", Retry_After="5")
    return ProblemAnswer(500, "the service made a mistake; its log says which")


def _leads_out(scope: Scope) -> bool:
    """Whether the path, as it was sent or decoded, would lead out of its folder."""
    sent = scope.get("raw_path") or b""
    return any(
        way in text for text in (scope["path"].lower(), sent.decode("latin-1").lower()) for way in WAYS_OUT
    )


def _target(scope: Scope) -> str:
    """The path with its query."""
    query = scope["query_string"].decode("latin-1")
    return f"{scope['path']}?{query}" if query else scope["path"]


def wants_page(scope: Scope, headers: Headers) -> bool:
    """Whether a browser asks for a page."""
    return (
        scope["method"] == "GET" and "text/html" in headers.get("accept", "") and not _is_api(scope["path"])
    )


def _is_api(path: str) -> bool:
    return path.startswith(("/api/", "/metrics", "/openapi.json"))
