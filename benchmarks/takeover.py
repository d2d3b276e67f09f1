"""What a takeover costs: how long a new controller takes to read a job's log, with and without a snapshot.

`python -m benchmarks.takeover [EVENTS]` writes a log of this many events (100,000 by default) with a snapshot
some seconds before its end, and reads it as a controller that takes over does. It also prints the size of the
view, the time to serialize it, and the longest stall of an event loop whose log is on a disk that takes 0.2 s
for each line.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.parts.targets import under
from orchestrator.controller.log_writer import LogWriter
from orchestrator.events import types as events
from orchestrator.events.log import EventLog
from orchestrator.events.types import Record
from orchestrator.history.job_view import JobView
from orchestrator.history.snapshot import SNAPSHOT, load, position, write_snapshot
from planner.plan import Plan
from workers.protocol import FreezeReport, FrozenAction, Generation, StepReport

RANKS = 4
MICROBATCHES = 8
LAYERS = 6
"""Layers per rank."""
PARAMETERS = 12
"""Parameters per layer."""
TAIL = 1_000
"""Events after the snapshot: some seconds of a job with fast steps."""


def job(count: int) -> Iterator[Record]:
    """The first `count` events of a job that freezes."""
    plan = Plan(
        epoch=1,
        version=1,
        reason="benchmark",
        layers=tuple((rank * LAYERS, (rank + 1) * LAYERS) for rank in range(RANKS)),
        stage_ranks=tuple(range(RANKS)),
        schedule="1f1b",
        chunks=1,
        microbatches=MICROBATCHES,
        replicas=1,
    )
    members = tuple(range(RANKS))
    generation = Generation(number=1, epoch=1, members=members, store_host="h", store_port=1, timeout_s=1.0)
    yield Record(time_s=0.0, event=events.Submitted(job="takeover", epoch=1, spec={}, resume=False))
    for rank in members:
        started = events.RankStarted(rank=rank, node=f"node-{rank}", host="10.0.0.1", pid=rank)
        yield Record(time_s=0.0, event=started)
    yield Record(time_s=0.0, event=events.Issued(plan=plan))
    yield Record(time_s=0.0, event=events.Formed(generation=generation, start=None, step=0))
    for index in range(count - RANKS - 3):
        step, of_step = divmod(index, RANKS + 1)
        event = step_report(step + 1) if of_step == 0 else freeze_report(step + 1, of_step - 1)
        yield Record(time_s=0.1 * step, event=event)


def step_report(step: int) -> StepReport:
    return StepReport(
        generation=1,
        step=step,
        loss=3.14159265358979 + 1 / step,
        grad_norm=1.23456789012345 + 1 / step,
        lr=1.2345678e-4,
        samples=32,
        tokens=32_768,
        step_s=0.123456789,
        bubble=0.123456789,
        skipped=False,
        gradient_energy=1.23456789,
        effective_update=0.912345678,
        committed_s=1.7e9 + step,
        samples_digest="0123456789abcdef",
    )


def freeze_report(step: int, rank: int) -> FreezeReport:
    return FreezeReport(
        step=step,
        rank=rank,
        actions=tuple(
            FrozenAction(stage=rank, microbatch=microbatch, planned=0.5, actual=0.4, parameters=0.3)
            for microbatch in range(MICROBATCHES)
        ),
        passes=MICROBATCHES,
        counts=tuple((rank * LAYERS + layer, (step % 3,) * PARAMETERS) for layer in range(LAYERS)),
    )


class SlowLog(EventLog):
    """A log on a disk that takes 0.2 s for each line."""

    def append(self, record: Record) -> None:
        time.sleep(0.2)
        super().append(record)


async def longest_stall_s(folder: Path, view: bytes) -> float:
    """The longest stall of an event loop that logs 20 events with a snapshot after each."""
    log = SlowLog(folder / "slow.jsonl")
    writer = LogWriter(log, folder / SNAPSHOT)
    for record in job(20):
        writer.append(record)
        writer.keep(view)
    writing = asyncio.ensure_future(writer.written())
    longest_s, last_s = 0.0, time.perf_counter()
    while not writing.done():
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    await writer.close()
    return longest_s


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        snapshot, view, log = path.with_name(SNAPSHOT), JobView(), EventLog(path)
        for number, record in enumerate(job(count), 1):
            log.append(record)
            view.take(record)
            if number == count - TAIL:
                write_snapshot(snapshot, view.to_json(), position(path, log.size))
        log.close()
        print(f"log: {count:,} events, {path.stat().st_size / 1e6:.1f} MB, {view.step:,} steps")
        text, taken_ms = b"", []
        for _ in range(9):
            began_s = time.process_time()
            text = view.to_json()
            taken_ms.append(1e3 * (time.process_time() - began_s))
        serialized_ms = median(taken_ms)
        print(under(f"view with {len(view.steps):,} steps: {len(text) / 1e6:.2f} MB", len(text) / 1e6, 2))
        print(under(f"serialized in {serialized_ms:.1f} ms of processor time", serialized_ms, 50))
        for name in ("snapshot and tail", "whole log"):
            began_s = time.perf_counter()
            found = load([path], snapshot)
            seconds = time.perf_counter() - began_s
            assert found.view == view
            told = f"takeover, {name}: {seconds:.2f} s, {found.folded:,} events folded"
            print(under(told, seconds, 2) if found.from_snapshot else told)
            snapshot.unlink(missing_ok=True)
        stall_s = asyncio.run(longest_stall_s(path.parent, text))
        told = f"event loop, disk of 0.2 s per line: longest stall {1e3 * stall_s:.1f} ms"
        print(under(told, 1e3 * stall_s, 50))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
