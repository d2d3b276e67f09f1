"""The log's thread: acknowledged events are on disk, in order, and a slow disk delays nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from orchestrator.controller.log_writer import LogWriter
from orchestrator.events.log import EventLog, read_log
from orchestrator.events.types import Record, Warned
from orchestrator.history.job_view import JobView, fold
from orchestrator.history.snapshot import SNAPSHOT, load


class SlowLog(EventLog):
    """A log on a slow or full disk."""

    def __init__(self, path: Path, takes_s: float = 0.0, full: frozenset[str] = frozenset()) -> None:
        super().__init__(path)
        self._takes_s = takes_s
        self._full = full
        self.written: list[str] = []

    def append(self, record: Record) -> None:
        time.sleep(self._takes_s)
        assert isinstance(record.event, Warned)
        if record.event.text in self._full:
            raise OSError(28, "No space left on device")
        super().append(record)
        self.written.append(record.event.text)


def record(text: str) -> Record:
    return Record(time_s=1.0, event=Warned(text=text))


class StuckLog(EventLog):
    """A log on a disk that writes nothing until it is released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stuck, self.released = threading.Event(), threading.Event()

    def append(self, record: Record) -> None:
        self.stuck.set()
        assert self.released.wait(30)
        super().append(record)


def test_a_stuck_disk_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    async def live() -> None:
        log = StuckLog(tmp_path / "events.jsonl")
        writer = LogWriter(log, tmp_path / SNAPSHOT)
        for number in range(5):
            writer.append(record(str(number)))
            writer.keep(JobView().to_json())
        waiting = asyncio.ensure_future(writer.written())
        while not log.stuck.is_set():
            await asyncio.sleep(0)
        for _ in range(50):  # the event loop runs while the disk is stuck
            await asyncio.sleep(0)
        assert not waiting.done()
        log.released.set()
        await waiting
        await writer.close()

    asyncio.run(live())
    assert [line.event for line in read_log(tmp_path / "events.jsonl")] == [
        Warned(text=str(n)) for n in range(5)
    ]


def test_what_is_acknowledged_is_on_the_disk(tmp_path: Path) -> None:
    async def live() -> None:
        log = SlowLog(tmp_path / "events.jsonl", takes_s=0.02)
        writer = LogWriter(log, tmp_path / SNAPSHOT)

        async def put(text: str) -> None:
            writer.append(record(text))
            await writer.written()
            assert text in log.written

        await asyncio.gather(*(put(str(number)) for number in range(10)))
        await writer.close()

    asyncio.run(live())
    assert len(list(read_log(tmp_path / "events.jsonl"))) == 10
    assert not [thread for thread in threading.enumerate() if thread.name == "event log"]


def test_a_full_disk_costs_a_line(tmp_path: Path) -> None:
    async def live() -> None:
        writer = LogWriter(SlowLog(tmp_path / "events.jsonl", full=frozenset({"b"})), tmp_path / SNAPSHOT)
        for text in "abc":
            writer.append(record(text))
        await writer.written()
        await writer.close()

    asyncio.run(live())
    assert [line.event for line in read_log(tmp_path / "events.jsonl")] == [
        Warned(text="a"),
        Warned(text="c"),
    ]


def test_a_snapshot_goes_up_to_where_it_was_taken(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = [record(text) for text in "abcde"]

    async def live() -> None:
        writer = LogWriter(SlowLog(path, takes_s=0.01), tmp_path / SNAPSHOT)
        for event in events[:3]:
            writer.append(event)
        writer.keep(fold(events[:3]).to_json())
        for event in events[3:]:
            writer.append(event)
        await writer.close()

    asyncio.run(live())
    found = load([path], tmp_path / SNAPSHOT)
    assert (found.from_snapshot, found.folded, found.view) == (True, 2, fold(events))
