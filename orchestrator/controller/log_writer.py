"""Writes a job's event log in a thread of its own, in order, so that a slow disk never holds up the event loop.

Knows no lifecycle. What was appended before is on the file once `written` returns.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from orchestrator.events.types import Record
from orchestrator.history.snapshot import position, write_snapshot


class Log(Protocol):
    """A file that records are appended to, or several."""

    @property
    def path(self) -> Path:
        """The file that is being written."""
        ...

    @property
    def size(self) -> int:
        """Its bytes."""
        ...

    def append(self, record: Record) -> None:
        """Write `record` through. Raises OSError."""
        ...

    def close(self) -> None: ...


class LogWriter:
    """The writer of one log. To be made and used on an event loop.

    Args:
        snapshot: the file that keeps the view.
    """

    def __init__(self, log: Log, snapshot: Path) -> None:
        self._log = log
        self._snapshot = snapshot
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Record | bytes | asyncio.Future[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="event log", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> None:
        """Write `record` after all that came before it."""
        self._work.put(record)

    def keep(self, view: bytes) -> None:
        """Write `view`, of all that was appended so far, beside the log."""
        self._work.put(view)

    async def written(self) -> None:
        """Return once all that was appended so far is on the file, or the disk has refused it."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._work.put(done)
        await done

    async def close(self) -> None:
        """Write the rest and close the log."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, asyncio.Future):
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(_resolve, item)
                continue
            # A full disk costs the log a line, not the job its training; the checkpoint says what it costs.
            with suppress(OSError):
                if isinstance(item, Record):
                    self._log.append(item)
                else:
                    write_snapshot(self._snapshot, item, position(self._log.path, self._log.size))
        self._log.close()


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():  # whoever waited may be gone
        done.set_result(None)
