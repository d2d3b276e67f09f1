"""The event loop: a stimulus is logged before its sender learns that it was handled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

from lifecycle_jobs import ORDER, TO_TRAINING

from orchestrator.controller.event_loop import EventLoop, Work
from orchestrator.events.types import Event, Placing, Requested
from orchestrator.lifecycle.effects import Dismiss, Effect, Train
from orchestrator.lifecycle.states import Assessing, Training
from orchestrator.lifecycle.stimuli import Aborted, RankLost, Room, SaveOrStop
from workers.config import ElasticConfig
from workers.protocol.orders import Request


class Idle:
    """Executor of a job that never gets its ranks."""

    def carry_out(self, effect: Effect) -> Work | None:
        return None

    async def release(self) -> None:
        return


def test_post_and_wait_returns_once_the_stimulus_is_logged() -> None:
    async def live() -> None:
        log: list[Event] = []
        loop = EventLoop(ORDER, log.append)
        asked = SaveOrStop(Request.CHECKPOINT)
        early = asyncio.ensure_future(loop.post_and_wait(asked))
        await asyncio.sleep(0)
        # The loop does not run yet: a controller that dies now has accepted nothing.
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(early), 0.05)
        assert not early.done()
        assert log == []
        loop.post(Aborted())
        running = asyncio.ensure_future(loop.run(Idle()))
        await early
        assert log[:2] == [Placing(ranks=(0, 1)), Requested(request="checkpoint")]
        await running
        await loop.post_and_wait(asked)
        await loop.close()

    asyncio.run(live())


def test_nothing_is_carried_out_before_what_it_rests_on_is_written() -> None:
    async def live() -> None:
        log: list[Event] = []
        disk = asyncio.Event()
        carried_out: list[Effect] = []

        class Watched(Idle):
            def carry_out(self, effect: Effect) -> Work | None:
                carried_out.append(effect)
                return None

        async def written() -> None:
            await disk.wait()

        loop = EventLoop(ORDER, log.append, written)
        running = asyncio.ensure_future(loop.run(Watched()))
        for stimulus in TO_TRAINING[1:]:
            loop.post(stimulus)
        await asyncio.sleep(0.05)
        # No effect reaches the cluster before its events are in the log.
        assert log == [Placing(ranks=(0, 1))]
        assert carried_out == []
        disk.set()
        await asyncio.sleep(0.05)
        assert isinstance(carried_out[-1], Train)
        loop.post(Aborted())
        await running
        await loop.close()

    asyncio.run(live())


def test_ranks_are_dismissed_though_another_is_lost_meanwhile() -> None:
    """A rank that leaves releases its resources, whatever happens to the generation."""

    async def live() -> None:
        cut_short: list[Effect] = []
        gate = asyncio.Event()

        class Slow(Idle):
            def carry_out(self, effect: Effect) -> Work | None:
                return self._wait(effect) if isinstance(effect, Dismiss | Train) else None

            async def _wait(self, effect: Effect) -> None:
                try:
                    await gate.wait()
                except asyncio.CancelledError:
                    cut_short.append(effect)
                    raise

        order, log = replace(ORDER, elastic=ElasticConfig(spares=1)), list[Event]()
        loop = EventLoop(order, log.append)
        running = asyncio.ensure_future(loop.run(Slow()))
        for stimulus in (*TO_TRAINING[1:], Room(1)):
            loop.post(stimulus)
        await asyncio.sleep(0.05)
        assert isinstance(loop.state, Training)
        loop.post(RankLost(2, "died as it started", dead=True))
        await asyncio.sleep(0.05)
        loop.post(RankLost(0, "died", dead=True))
        await asyncio.sleep(0.05)
        assert isinstance(loop.state, Assessing)
        assert [type(effect) for effect in cut_short] == [Train]
        gate.set()
        loop.post(Aborted())
        await running
        await loop.close()

    asyncio.run(live())


def test_a_controller_starts_without_torch_which_takes_longer_to_import_than_all_else() -> None:
    code = "import sys, orchestrator.controller.actor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
