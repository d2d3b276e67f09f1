"""The guard before every route: Host and Origin, size, rate, who asks and whether they may.

No route can forget it. It also sets the security headers and writes the audit log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard.service.access import COOKIE, Access, Caller, Role
from dashboard.service.audit import Audit
from dashboard.service.limits import RateLimit
from dashboard.service.problems import Problem

log = logging.getLogger(__name__)

SAFE = ("GET", "HEAD", "OPTIONS")
OPEN = ("/login", "/healthz")
"""Paths that need no login."""
OPEN_FOLDER = "/static/"
READERS_MAY_POST = ("/logout", "/plan/proposal")
"""Ends of paths whose POST changes no job."""
SIMULATIONS = {
    "GET": ("/what-if", *(f"/controls/{name}" for name in ("move", "scale", "freeze", "drain", "plan"))),
    "POST": ("/plan/proposal",),
}
"""Method -> ends of paths behind which a planner computes."""
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
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Guard:
    """ASGI middleware.

    Args:
        hosts: host names (without port) under which the service may be reached, besides loopback.
        most_bytes: largest body.
    """

    def __init__(
        self, app: ASGIApp, *, access: Access, audit: Audit, hosts: Collection[str], most_bytes: int
    ) -> None:
        self._app = app
        self._access = access
        self._audit = audit
        self._hosts = {*LOOPBACK, *(host.lower() for host in hosts)}
        self._most_bytes = most_bytes
        self._logins = RateLimit(per_s=0.2, burst=10)
        self._controls = RateLimit(per_s=5.0, burst=30)
        self._simulations = RateLimit(per_s=1.0, burst=10)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = scope["client"][0] if scope.get("client") else "unknown"
        caller = self._caller(headers, host)
        audited = scope["method"] not in SAFE
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    out[name] = value
                if not scope["path"].startswith(OPEN_FOLDER):
                    out["Cache-Control"] = "no-store"
            await send(message)

        why = ""
        state = scope.setdefault("state", {})
        try:
            self._check(scope, headers, caller, host)
            if scope["method"] not in SAFE:
                receive = await self._body(receive)
            state["caller"] = caller
            await self._app(scope, receive, answer)
        except Problem as problem:
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
                self._audit.write(
                    time_s=time.time(),
                    caller=name,
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    about=state.get("about", ""),
                    why=why,
                    refused=caller is None and "who" not in state,
                )

    def _caller(self, headers: Headers, host: str) -> Caller | None:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            role = self._access.role_of_token(token.strip())
            return Caller(role, host) if role is not None else None
        value = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        role = self._access.role_of_cookie(value, time.time()) if value else None
        return Caller(role, host, cookie=True) if role is not None else None

    def _check(self, scope: Scope, headers: Headers, caller: Caller | None, host: str) -> None:
        """Raises:
        Problem: the request is refused.
        """
        path, method = scope["path"], scope["method"]
        if _name_of(headers.get("host", "")) not in self._hosts:
            raise Problem(
                403,
                f"this service is not {headers.get('host', '')!r}",
                action="Use its own address, or start it with --host-name for a proxy's name.",
            )
        safe = method in SAFE
        if not safe and not _same_origin(headers, scope):
            raise Problem(403, "the request comes from another site", action="Use the service's own pages.")
        if not safe and path == "/login":
            self._limit(self._logins, host)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._most_bytes:
            raise Problem(413, f"the body is larger than {self._most_bytes:,} bytes")
        if path in OPEN or path.startswith(OPEN_FOLDER):
            return
        if caller is None:
            raise Problem(401, "no valid token or session", WWW_Authenticate="Bearer")
        if path.endswith(SIMULATIONS.get(method, ())):
            self._limit(self._simulations, host)
        if not safe and not path.endswith(READERS_MAY_POST):
            if caller.role != Role.CONTROL:
                raise Problem(403, "the read token changes nothing")
            self._limit(self._controls, host)

    def _limit(self, limit: RateLimit, host: str) -> None:
        wait_s = limit.wait_s(host, time.monotonic())
        if wait_s:
            raise Problem(429, f"too many requests from {host}", Retry_After=f"{wait_s:.0f}")

    async def _body(self, receive: Receive) -> Receive:
        """Read a body, however it is sent, and return a `receive` that gives it again.

        Raises:
            Problem: it is larger than the limit, or does not arrive.
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
                        raise Problem(413, f"the body is larger than {self._most_bytes:,} bytes")
        except TimeoutError:
            raise Problem(408, f"the body has not arrived within {BODY_S:g} s") from None
        body: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def again() -> Message:
            return body.pop() if body else await receive()

        return again


def _failed(error: Exception) -> Problem:
    """The answer to a request that a route could not serve."""
    if type(error).__module__.startswith("ray"):
        return Problem(503, "the cluster does not answer", Retry_After="5")
    return Problem(500, "the service made a mistake; its log says which")


def _name_of(host: str) -> str:
    """`host` in lower case, without its port."""
    name, _, port = host.lower().rpartition(":")
    return name if name and port.isdecimal() else host.lower()


def _same_origin(headers: Headers, scope: Scope) -> bool:
    """Whether the request comes from one of our pages, or from no page at all."""
    site = headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


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


def hosts_of(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """The names of a service that listens on `host`."""
    own = () if host in ("0.0.0.0", "::", "") else ((f"[{host}]" if ":" in host else host),)
    return (*own, *more)
