"""Streams of server-sent events: how many there may be, how long they last, and how long a client may take nothing.
Knows nothing of what they send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from dashboard.service.access import Caller
from dashboard.service.limits import AtOnce
from dashboard.service.problems import ProblemAnswer

BEGIN = "retry: 1000\n\n"
"""First message of a stream: the client's reconnection delay, in ms."""
BEAT = ": \n\n"
"""Heartbeat of a stream: an empty comment."""
BEAT_S = 15.0
"""A stream says that it lives at least this often."""
MOST_STREAMS = 500
MOST_STREAMS_EACH = 250
"""Most streams of one caller: nobody holds them all."""
LONGEST_S = 3600.0
"""A stream ends after this long; its client opens another one, for which it needs a valid session."""
SLOW_S = 10.0
"""A client that takes nothing for this long is dropped."""


class BoundedStream(StreamingResponse):
    """A stream whose client must take what it is sent: nothing is kept for a slow one, and one that takes nothing for
    `SLOW_S` is dropped. It may come back.

    Args:
        streams: counts the open ones.
        caller: who reads it.
    """

    def __init__(self, lines: AsyncIterator[str], streams: AtOnce, caller: Caller) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._streams = streams
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises:
        ProblemAnswer: too many are open.
        """

        async def bounded(message: Message) -> None:
            async with asyncio.timeout(SLOW_S):
                await send(message)

        client = self._caller.name
        reached = self._streams.admit(client)
        if reached == self._streams.most_each:
            raise ProblemAnswer(429, f"{reached} streams of {client} are open", Retry_After="10")
        if reached:
            raise ProblemAnswer(503, f"{reached} streams are open", Retry_After="10")
        try:
            with suppress(TimeoutError):
                await super().__call__(scope, receive, bounded)
        finally:
            self._streams.give_back(client)
