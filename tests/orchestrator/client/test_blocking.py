"""Any thread can wait for a coroutine, even beside a running event loop, and does not block that loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from orchestrator.client.blocking import Call, finish


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_it_returns_and_raises_what_the_coroutine_does() -> None:
    async def fail() -> None:
        raise KeyError("x")

    assert finish(answer(3)) == 3
    with pytest.raises(KeyError):
        finish(fail())


def test_it_works_where_an_event_loop_runs_already() -> None:
    async def inside() -> int:
        return finish(answer(4))

    assert asyncio.run(inside()) == 4


def test_a_call_that_takes_longer_goes_on_until_it_is_cancelled() -> None:
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    call = Call(wait())
    with pytest.raises(TimeoutError):
        call.result(0.01)
    assert not call.done()
    call.cancel()
    assert ended.wait(10)
    with pytest.raises(asyncio.CancelledError):
        call.result(10)
    call.cancel()  # it has already ended
