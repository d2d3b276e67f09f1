"""Calls into Ray that may never return, as with a cluster that is gone: each on a thread of its own, bounded in number
and in time.

Such a call cannot be ended: it holds its thread until Ray gives up. It must not hold one of a pool from which others
are served, nor keep the process from ending. Not here: what is called.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from orchestrator.client.errors import ClusterSilent

MOST = 16
"""Calls at a time, those included that nobody waits for any more."""
LIMIT_S = 10.0
"""Limit for an answer, which takes milliseconds where the cluster is well."""
LOOK_S = 0.02

T = TypeVar("T")


class RayCalls:
    """Blocking calls of one driver, from any event loop.

    Args:
        most: calls at a time.
        limit_s: limit for an answer.
    """

    def __init__(self, most: int = MOST, limit_s: float = LIMIT_S) -> None:
        self._most = most
        self._limit_s = limit_s
        self._free = threading.Semaphore(most)

    async def run(self, work: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
        """Return or raise what `work` does.

        Args:
            limit_s: limit for its answer, including the wait until one of the earlier calls has ended if too many run;
                None: that of all calls.

        Raises:
            ClusterSilent: no answer in time.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        deadline_s = time.monotonic() + limit_s
        while not self._free.acquire(blocking=False):
            if time.monotonic() >= deadline_s:
                raise ClusterSilent(
                    f"the cluster does not answer: {self._most} earlier calls still wait after {limit_s:g} s; see that"
                    " its head runs (`ray status`), and ask again"
                )
            await asyncio.sleep(LOOK_S)
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()  # a waiter that gives up must not cancel it
        thread = threading.Thread(
            target=self._run, args=(outcome, work, arguments), name="call into Ray", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            self._free.release()
            raise
        waiting = asyncio.wrap_future(outcome)
        try:
            done, _ = await asyncio.wait([waiting], timeout=max(0.0, deadline_s - time.monotonic()))
        finally:
            # Without effect once there is an answer. A later error has no reader, and must not be reported as missed.
            waiting.cancel()
        if not done:
            raise ClusterSilent(
                f"the cluster has not answered for {limit_s:g} s; see that its head runs (`ray status`), and ask again"
            )
        return waiting.result()

    def _run(self, outcome: Future[T], work: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        try:
            result = work(*arguments)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
        finally:
            self._free.release()
