"""The crank: what it was told is logged before who told it hears that it was heard."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from lifecycle_jobs import ORDER, TO_TRAINING

from orchestrator.controller.event_loop import EventLoop, Work
from orchestrator.events.types import Event, RankStarted, Requested
from orchestrator.lifecycle.commands import Command, Train
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


def test_nothing_is_carried_out_before_what_it_rests_on_is_written() -> None:
    async def live() -> None:
        log: list[Event] = []
        disk = asyncio.Event()
        carried_out: list[Command] = []

        class Watched(Idle):
            def carry_out(self, command: Command) -> Work | None:
                carried_out.append(command)
                return None

        async def written() -> None:
            await disk.wait()

        loop = EventLoop(ORDER, log.append, written)
        running = asyncio.ensure_future(loop.run(Watched()))
        for stimulus in TO_TRAINING[1:]:
            loop.post(stimulus)
        await asyncio.sleep(0.05)
        # Both ranks are up; before they are told anything, the log must have it.
        assert [type(event) for event in log] == [RankStarted, RankStarted]
        disk.set()
        await asyncio.sleep(0.05)
        assert isinstance(carried_out[-1], Train)
        loop.post(Aborted())
        await running
        await loop.close()

    asyncio.run(live())
