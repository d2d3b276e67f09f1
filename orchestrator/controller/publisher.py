"""Copies a job's event log to the store of the job's folder, every few seconds. Knows no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Publisher:
    """Copies one log.

    Args:
        publish: copies what is new, in any thread; raises what the store raises.
        warn: takes the reason of a failure, once per outage.
    """

    def __init__(self, publish: Callable[[], None], warn: Callable[[str], None]) -> None:
        self._publish = publish
        self._warn = warn
        self._failing = False

    async def keep_publishing(self, every_s: float) -> None:
        """Copy every `every_s`, until cancelled."""
        while True:
            if (problem := await self.publish()) is None:
                self._failing = False
            elif not self._failing:
                self._failing = True
                self._warn(
                    f"the event log cannot be copied to the job's folder, and is tried again every {every_s:g} s; until"
                    f" then the log is lost with the controller's node: {problem}"
                )
            await asyncio.sleep(every_s)

    async def publish(self) -> str | None:
        """Copy now; return why that failed, if it did."""
        try:
            await asyncio.to_thread(self._publish)
        except Exception as error:  # whatever the store raises: the next copy includes everything
            return f"{type(error).__name__}: {error}"
        return None
