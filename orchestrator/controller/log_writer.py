"""Writes a job's event log in its own thread, in order, so that a slow disk never blocks the event loop, and copies it
to the store of the job's folder.

Knows no lifecycle and no Ray. Once `written` returns, all earlier records are in the file.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from orchestrator.events.types import Record
from orchestrator.history.snapshot import position, write_snapshot


class RecordLog(Protocol):
    """One or more files to which records are appended."""

    @property
    def path(self) -> Path:
        """The current file."""
        ...

    @property
    def size(self) -> int:
        """Its bytes."""
        ...

    @property
    def head(self) -> str:
        """Hash of its newest line."""
        ...

    def append(self, record: Record) -> None:
        """Write `record` through. Raises OSError."""
        ...

    def close(self) -> None: ...


class LogWriter:
    """The writer of one log. Create and use it on an event loop.

    Args:
        snapshot: the file for the view.
    """

    def __init__(self, log: RecordLog, snapshot: Path) -> None:
        self._log = log
        self._snapshot = snapshot
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Record | bytes | asyncio.Future[str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="event log", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> None:
        """Write `record` after all earlier ones."""
        self._work.put(record)

    def keep(self, view: bytes) -> None:
        """Write `view`, of all that was appended so far, beside the log."""
        self._work.put(view)

    async def written(self) -> str:
        """Return once all that was appended so far is in the file, or writing it has failed; the hash of the newest
        line."""
        done: asyncio.Future[str] = self._loop.create_future()
        self._work.put(done)
        return await done

    async def close(self) -> None:
        """Write the rest and close the log."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, asyncio.Future):
                with suppress(RuntimeError):  # the loop is closed: there is no waiter any more
                    self._loop.call_soon_threadsafe(_resolve, item, self._log.head)
                continue
            # A full disk costs a line of the log, not the training; the checkpoint reports the error.
            with suppress(OSError):
                if isinstance(item, Record):
                    self._log.append(item)
                else:
                    write_snapshot(self._snapshot, item, position(self._log.path, self._log.size))
        self._log.close()


def _resolve(done: asyncio.Future[str], head: str) -> None:
    if not done.done():  # the waiter may be gone
        done.set_result(head)


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
