"""Calls that never return are bounded in time and number, and hold nothing that others need."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest
from pace import patient

from orchestrator.client.errors import ClusterSilent, ControllerSilent
from orchestrator.client.ray_calls import RayCalls


def test_a_call_that_does_not_return_is_an_error_in_time_and_holds_no_thread_of_the_pool() -> None:
    go = threading.Event()

    async def run() -> None:
        calls = RayCalls(most=2)
        began_s = time.monotonic()
        for _ in range(2):
            with pytest.raises(ClusterSilent, match=r"has not answered for 0\.05 s"):
                await calls.run(go.wait, limit_s=0.05)
        with pytest.raises(ControllerSilent, match=r"2 earlier calls still wait after 0\.05 s"):
            await calls.run(go.wait, limit_s=0.05)
        assert await asyncio.to_thread(lambda: 7) == 7
        assert time.monotonic() - began_s < patient(2)
        go.set()
        assert await calls.run(int, "7") == 7, "a call that ends makes room"
        with pytest.raises(ValueError, match="invalid literal"):
            await calls.run(int, "x")

    asyncio.run(run())


def test_an_error_that_nobody_waits_for_any_more_is_not_reported_as_missed() -> None:
    go, reported = threading.Event(), []

    def fails() -> None:
        go.wait()
        raise ConnectionError("the head is back")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context["message"])
        )
        calls = RayCalls(most=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await calls.run(fails)
        go.set()
        assert await calls.run(int, "7") == 7, "the call has ended"
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert reported == []


def test_more_calls_than_may_run_take_turns() -> None:
    async def run() -> list[None]:
        calls = RayCalls(most=2)
        return await asyncio.gather(*(calls.run(time.sleep, 0.01, limit_s=5) for _ in range(20)))

    assert asyncio.run(run()) == [None] * 20


def test_a_process_ends_though_a_call_does_not_return() -> None:
    program = (
        "import asyncio, threading\n"
        "from orchestrator.client.ray_calls import RayCalls\n"
        "try: asyncio.run(RayCalls().run(threading.Event().wait, limit_s=0.05))\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60)
    )
    assert (done.stdout, done.returncode) == ("ClusterSilent\n", 0), done.stderr
