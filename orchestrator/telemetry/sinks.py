"""Where a job's events go besides its log: each sink in a thread of its own, which never blocks nor fails the job."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from orchestrator.events.types import Record

WAITING_RECORDS = 10_000
"""Most events that wait for a sink; one that falls further behind is given up."""

BATCH = 1_000
"""Most events that a sink gets at a time."""


class Sink(Protocol):
    """Takes a job's events in order. All its methods run in one thread; whatever they raise ends it."""

    def accept(self, records: Sequence[Record]) -> None:
        """Take the events since the last call."""
        ...

    def close(self) -> None:
        """Pass on whatever waits; the job has ended."""
        ...


class SinkThread:
    """The thread of one sink.

    Args:
        name: of the sink, for people.
        open: makes the sink, in the thread.
        warn: takes the one warning if the sink fails. Called in the thread.
    """

    def __init__(self, name: str, open: Callable[[], Sink], warn: Callable[[str], None]) -> None:
        self._name = name
        self._open = open
        self._warn = warn
        self._records: queue.Queue[Record | None] = queue.Queue(maxsize=WAITING_RECORDS)
        self._over = threading.Event()
        """Set once the sink takes nothing any more."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def accept(self, record: Record) -> None:
        """Pass `record` on; returns at once."""
        if self._over.is_set():
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._give_up(f"it is {WAITING_RECORDS:,} events behind")

    def close(self, timeout_s: float) -> None:
        """Let the sink take what waits, for at most `timeout_s`."""
        with suppress(queue.Full):
            self._records.put_nowait(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up(f"it has not ended within {timeout_s:g} s")

    def _give_up(self, why: str) -> None:
        if not self._over.is_set():
            self._over.set()
            self._warn(f"{self._name} gets no more of this job's numbers: {why}")

    def _run(self) -> None:
        try:
            sink = self._open()
            while (records := self._next()) is not None:
                sink.accept(records)
            sink.close()
        except Exception as error:
            text = str(error).strip().splitlines()
            self._give_up(f"{type(error).__name__}{': ' + text[0] if text else ''}")
        self._over.set()

    def _next(self) -> list[Record] | None:
        """Wait for events and return those that are there; None at the end."""
        records: list[Record] = []
        while not records or (len(records) < BATCH and not self._records.empty()):
            if (record := self._records.get()) is None:
                if not records:
                    return None
                self._records.put(None)
                break
            records.append(record)
        return None if self._over.is_set() else records
