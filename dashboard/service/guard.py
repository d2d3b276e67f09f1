"""Who may do what: checks each request's Host, Origin, size, sender and rate before any route sees it.

Not here: Bodies, answers and the audit log, see `guarded.py`.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope

from dashboard.service.access import COOKIE, Access, Caller, Role
from dashboard.service.limits import RateLimit
from dashboard.service.problems import ProblemAnswer
from orchestrator.commands.table import COMMANDS

SAFE = ("GET", "HEAD", "OPTIONS")
OPEN = ("/login", "/healthz")
"""Paths that need no login."""
OPEN_FOLDER = "/static/"
READERS_MAY_POST = ("/logout", "/plan/proposal")
"""Ends of paths whose POST changes no job."""
SIMULATIONS = {
    "GET": (
        "/what-if",
        *(f"/controls/{form.name}" for kind in COMMANDS if kind.simulates() for form in kind.forms),
    ),
    "POST": ("/plan/proposal",),
}
"""Method -> ends of paths behind which a planner computes."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Guard:
    """Tells who sends a request, and refuses those who may not.

    Args:
        hosts: host names (without port) under which the service may be reached, besides loopback.
        most_bytes: largest body.
    """

    def __init__(self, access: Access, hosts: Collection[str], most_bytes: int) -> None:
        self._access = access
        self._hosts = {*LOOPBACK, *(host.lower() for host in hosts)}
        self._most_bytes = most_bytes
        self._logins = RateLimit(per_s=0.2, burst=10)
        self._controls = RateLimit(per_s=5.0, burst=30)
        self._simulations = RateLimit(per_s=1.0, burst=10)

    def caller(self, headers: Headers, host: str) -> Caller | None:
        """Who sends a request with these headers; None: there is no valid token or session."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            role = self._access.role_of_token(token.strip())
            return Caller(role, host) if role is not None else None
        value = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        role = self._access.role_of_cookie(value, time.time()) if value else None
        return Caller(role, host, cookie=True) if role is not None else None

    def check(self, scope: Scope, headers: Headers, caller: Caller | None, host: str) -> bool:
        """Whether the request is a control: one that may change a job.

        Raises:
            ProblemAnswer: it is refused.
        """
        path, method = scope["path"], scope["method"]
        if _name_of(headers.get("host", "")) not in self._hosts:
            raise ProblemAnswer(
                403,
                f"this service is not {headers.get('host', '')!r}",
                action="Use its own address, or start it with --host-name for another name of it.",
            )
        safe = method in SAFE
        if not safe and not _same_origin(headers):
            raise ProblemAnswer(
                403, "the request comes from another site", action="Use the service's own pages."
            )
        if not safe and path == "/login":
            self._limit(self._logins, host, host)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._most_bytes:
            raise ProblemAnswer(413, f"the body is larger than {self._most_bytes:,} bytes")
        if path in OPEN or path.startswith(OPEN_FOLDER):
            return False
        if caller is None:
            raise ProblemAnswer(401, "no valid token or session", WWW_Authenticate="Bearer")
        if path.endswith(SIMULATIONS.get(method, ())):
            self._limit(self._simulations, host, host)
        if safe or path.endswith(READERS_MAY_POST):
            return False
        # By role too: a reader behind the same proxy takes no control away.
        self._limit(self._controls, caller.name, host)
        if caller.role != Role.CONTROL:
            raise ProblemAnswer(403, "the read token changes nothing")
        return True

    def _limit(self, limit: RateLimit, client: str, host: str) -> None:
        wait_s = limit.wait_s(client, time.monotonic())
        if wait_s:
            raise ProblemAnswer(429, f"too many requests from {host}", Retry_After=f"{math.ceil(wait_s)}")


def _name_of(host: str) -> str:
    """`host` in lower case, without its port."""
    name, _, port = host.lower().rpartition(":")
    return name if name and port.isdecimal() else host.lower()


def _same_origin(headers: Headers) -> bool:
    """Whether the request comes from one of our pages, or from no page at all."""
    site = headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


def hosts_of(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """The names of a service that listens on `host`."""
    own = () if is_wildcard(host) else (host,)
    return tuple(map(in_url, (*own, *more)))


def is_wildcard(host: str) -> bool:
    """Whether a service that listens on `host` listens on every address, and so has none that it could answer to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def in_url(host: str) -> str:
    """`host` as URLs and Host headers have it."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
