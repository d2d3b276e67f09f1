"""The crank: what it was told is logged before who told it hears that it was heard."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from lifecycle_jobs import ORDER

from orchestrator.controller.event_loop import EventLoop, Work
from orchestrator.events.types import Event, Requested
from orchestrator.lifecycle.commands import Command
from orchestrator.lifecycle.stimuli import Aborted, Asked
from workers.protocol import Request


class Idle:
    """Effects of a job that never gets its ranks."""

    def carry_out(self, command: Command) -> Work | None:
        return None

    async def release(self) -> None:
        return


def test_what_is_heeded_is_logged() -> None:
    async def live() -> None:
        log: list[Event] = []
        loop = EventLoop(ORDER, log.append)
        asked = Asked(Request.CHECKPOINT)
        early = asyncio.ensure_future(loop.post_and_wait(asked))
        await asyncio.sleep(0)
        # Nobody turns the crank yet: a controller that dies now has heard of nothing.
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(early), 0.05)
        assert not early.done()
        assert log == []
        loop.post(Aborted())
        running = asyncio.ensure_future(loop.run(Idle()))
        await early
        assert log[:1] == [Requested(request="checkpoint")]
        await running
        await loop.post_and_wait(asked)
        await loop.close()

    asyncio.run(live())
