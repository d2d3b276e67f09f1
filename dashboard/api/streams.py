"""Streams of server-sent events: how many there may be, and how long a client may take nothing. Knows nothing of what
they send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from dashboard.service.problems import Problem

BEGIN = "retry: 1000\n\n"
"""What a stream begins with: how soon to reconnect."""
BEAT = ": \n\n"
"""What says that a stream lives."""
BEAT_S = 15.0
"""A stream says that it lives at least this often."""
MOST_STREAMS = 500
SLOW_S = 10.0
"""A client that takes nothing for this long is dropped."""


class Stream(StreamingResponse):
    """A stream whose client must take what it is sent: nothing is kept for a slow one, and one that takes nothing for
    `SLOW_S` is dropped. It may come back.

    Raises:
        Problem: too many are open.
    """

    open = 0
    """How many there are."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        if Stream.open >= MOST_STREAMS:
            raise Problem(503, f"{MOST_STREAMS} streams are open", Retry_After="10")
        super().__init__(lines, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def bounded(message: Message) -> None:
            async with asyncio.timeout(SLOW_S):
                await send(message)

        Stream.open += 1
        try:
            with suppress(TimeoutError):
                await super().__call__(scope, receive, bounded)
        finally:
            Stream.open -= 1
