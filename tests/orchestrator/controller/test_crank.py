"""The crank: what it was told is logged before who told it hears that it was heard."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from lifecycle_jobs import ORDER

from orchestrator.controller.event_loop import Crank, Work
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
        crank = Crank(ORDER, log.append)
        asked = Asked(Request.CHECKPOINT)
        early = asyncio.ensure_future(crank.heed(asked))
        await asyncio.sleep(0)
        # Nobody turns the crank yet: a controller that dies now has heard of nothing.
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(early), 0.05)
        assert not early.done()
        assert log == []
        crank.tell(Aborted())
        running = asyncio.ensure_future(crank.run(Idle()))
        await early
        assert log[:1] == [Requested(request="checkpoint")]
        await running
        await crank.heed(asked)
        await crank.close()

    asyncio.run(live())
