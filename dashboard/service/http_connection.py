"""One HTTP/1.1 connection: uvicorn's protocol, with limits to what a sender may hold or send before there is a request.

Not here: How many connections there are, see `connections.py`; what a request may do, see `guard.py`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from dashboard.service.door import Visit
from dashboard.service.guarded import HEADERS
from dashboard.service.problems import ProblemAnswer

log = logging.getLogger(__name__)

HEAD_S = 10.0
"""Limit for a request's head to arrive, and for the rest of a request that has been answered."""
LINGER_S = 1.0
"""Time for which a refused sender may go on sending, so that it gets the answer."""
MOST_IGNORED_BYTES = 2**20
MOST_TARGET_BYTES = 8_192
"""Longest path with query."""
MOST_HEAD_BYTES = 32_768
MOST_HEADERS = 100
_END = re.compile(rb"\n\r?\n")


def refused_head(received: bytes) -> ProblemAnswer | None:
    """Why a request whose first bytes these are is refused; None if it is not, or not yet."""
    end = _END.search(received)
    head = received[: end.start()] if end is not None else received
    line = head.partition(b"\n")[0]
    if len(line) > MOST_TARGET_BYTES + len("OPTIONS  HTTP/1.1\r"):
        return ProblemAnswer(414, f"the path and query have more than {MOST_TARGET_BYTES:,} bytes")
    if (count := head.count(b"\n")) > MOST_HEADERS:
        return ProblemAnswer(
            431, f"the request has {count:,} headers or more, and {MOST_HEADERS} are the most"
        )
    if len(head) > MOST_HEAD_BYTES:
        return ProblemAnswer(431, f"the headers have more than {MOST_HEAD_BYTES:,} bytes")
    names = {each.partition(b":")[0].lower() for each in head.split(b"\n")[1:]}
    if {b"content-length", b"transfer-encoding"} <= names:
        return ProblemAnswer(
            400, "the request has both Content-Length and Transfer-Encoding", action="Send one."
        )
    return None


class HttpConnection(H11Protocol):
    """A connection that must send a whole head in time.

    Args:
        visit: what it tells of itself.
    """

    def __init__(
        self, *, config: Config, server_state: ServerState, app_state: dict[str, Any], visit: Visit
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._visit = visit
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False
        self._ignored = 0
        """Bytes that arrived since it was refused."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._visit.transport = transport
        self._watch(known=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._visit.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._ignored += len(data)
            if self._ignored > MOST_IGNORED_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        self._watch(known=False)

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE and (problem := refused_head(self.conn.trailing_data[0])):
            self._refuse(problem)
            return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ProblemAnswer(400, msg))

    def on_response_complete(self) -> None:
        known = self.cycle.scope.get("state", {}).get("caller") is not None
        super().on_response_complete()
        self._watch(known=known)

    def shutdown(self) -> None:
        if self._refused:
            self.transport.abort()
        else:
            super().shutdown()

    @property
    def _serves(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self, *, known: bool) -> None:
        """Begin or end the time in which the next head must arrive.

        Args:
            known: whether the last request had a valid token.
        """
        if self._refused or self.transport.is_closing():
            self._stop_watching()
        elif self._serves:
            self._stop_watching()
            self._visit.serve()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self._too_slow)
            self._visit.wait(known=known)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self.conn.trailing_data[0] and self.conn.their_state is h11.IDLE:
            self._refuse(ProblemAnswer(408, f"the headers have not arrived within {HEAD_S:g} s"))
        else:
            self.transport.abort()

    def _refuse(self, problem: ProblemAnswer) -> None:
        """Answer `problem` and close the connection. A sender that is still sending has `LINGER_S` to read it: if it
        was closed at once, what arrives would throw the answer away."""
        log.warning("a request of %s is refused: %s", self.client and self.client[0], problem.detail)
        self._refused = True
        self._stop_watching()
        self._unset_keepalive_if_required()
        if self._serves:  # the rest of a body is no body, and the answer may have begun
            self.transport.abort()
            return
        answer = problem.response()
        answer.headers.update({**HEADERS, "Connection": "close"})
        status = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n".encode()
        headers = b"".join(b"%s: %s\r\n" % each for each in answer.raw_headers)
        self.transport.write(status + headers + b"\r\n" + bytes(answer.body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()
