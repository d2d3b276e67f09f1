"""Retries an operation for a bounded time. Knows no Ray."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable


async def persist(
    attempt: Callable[[], Awaitable[None]],
    trouble: Callable[[str], None],
    *,
    for_s: float,
    every_s: float,
    hopeless: type[Exception],
) -> str | None:
    """Make attempts until one succeeds; return why the last one failed, if none succeeds within `for_s`.

    Args:
        trouble: takes the reason of each failed attempt, and an empty string after a success.
        hopeless: an error after which it does not try again.
    """
    deadline_s = time.monotonic() + for_s
    while True:
        try:
            await attempt()
        except Exception as error:
            traceback.print_exc()
            last = isinstance(error, hopeless)
            why = str(error) if last else f"{type(error).__name__}: {error}"
            trouble(why)
            if last or time.monotonic() > deadline_s:
                return why
            await asyncio.sleep(every_s)
        else:
            trouble("")
            return None
