"""What a long log costs a controller: to take it over, and while the job trains on.

    python -m benchmarks.takeover [EVENTS]

The log has this many events (100,000 by default), with a snapshot some seconds before its end. The benchmark reads it
as a controller that takes over does, with the snapshot and without, and prints the size of the view and the time to
serialize it. Then a controller with that view goes on: four ranks report steps, freezing and timelines while its disk
takes 0.2 s for each line, at first undisturbed, then with clients that read the job from its controller. A task beside
it measures how long its event loop stalls.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from ray import cloudpickle

from benchmarks.parts.controller_without_ray import controller_of
from benchmarks.parts.event_loop_stalls import Stall, Stalls
from benchmarks.parts.long_job import MONITORING_SPEC, job, reports_of
from benchmarks.parts.targets import percentile, under
from orchestrator.controller.actor import KEPT_RECORDS, Controller
from orchestrator.events.log import EventLog
from orchestrator.events.types import Record
from orchestrator.history.job_view import JobView
from orchestrator.history.snapshot import SNAPSHOT, load, position, write_snapshot
from orchestrator.history.thinning import EVERY

TAIL = 1_000
"""Events after the snapshot: some seconds of a job with fast steps."""
STEP_S = 0.05
STEPS = EVERY
"""Steps of a measurement: the view is thinned once in so many."""
LINE_S = 0.2
"""What the disk takes for a line."""
PATIENCE_S = 60.0
"""How long a controller on a busy machine may lag behind the ranks."""
CLIENTS, CLIENTS_S = 3, 5.0
"""Clients that begin to follow the job at once, and the time until they do so again."""


class SlowLog(EventLog):
    """A log on a disk that takes `line_s` for each line."""

    line_s = LINE_S

    def append(self, record: Record) -> None:
        time.sleep(self.line_s)
        super().append(record)


async def train(controller: Controller) -> None:
    """Have the ranks report `STEPS` steps, until all are handled. As with Ray, no report waits for the one before."""
    arriving: set[asyncio.Task[None]] = set()
    begun_s = time.perf_counter()
    first = controller._view.step + 1
    for number in range(STEPS):
        for report in reports_of(first + number, timelines=True):
            arriving.add(asyncio.create_task(controller.report(report)))
        await asyncio.sleep(max(0.0, begun_s + (number + 1) * STEP_S - time.perf_counter()))
    async with asyncio.timeout(PATIENCE_S):
        while controller._view.step < first + STEPS - 1:
            await asyncio.sleep(STEP_S)
    for task in arriving:  # they wait for the disk
        task.cancel()


async def ask(controller: Controller) -> None:
    """A few clients at once begin to follow the job, again and again: each gets the view and all events that are kept.
    As with Ray, what they get is pickled in a thread."""
    while True:
        await asyncio.gather(*(follow(controller) for _ in range(CLIENTS)))
        await asyncio.sleep(CLIENTS_S)


async def follow(controller: Controller) -> None:
    """Begin to follow the job."""
    await asyncio.to_thread(cloudpickle.dumps, await controller.view(), protocol=5)
    after, newest = 0, controller._view.events
    while after < newest:
        page = await controller.read(after, 0.0)
        await asyncio.to_thread(cloudpickle.dumps, page, protocol=5)
        after = page.next


async def stalls_of(
    folder: Path, view: JobView, recent: Iterable[Record], *, clients: bool
) -> Sequence[Stall]:
    """Train on for `STEPS` steps with a slow disk; return how long the event loop stalled. `view` changes."""
    log = SlowLog(folder / "slow.jsonl")
    async with controller_of(folder, view, recent, log) as controller:
        try:
            async with Stalls() as stalls:
                asking = asyncio.create_task(ask(controller)) if clients else None
                await train(controller)
            if asking is not None:
                assert not asking.done(), "the clients ask to the end"
                asking.cancel()
        finally:
            log.line_s = 0.0  # what still waits for the disk is not measured
    return stalls.seen


def show_stalls(folder: Path, view: JobView, recent: Iterable[Record]) -> None:
    """Print how long the event loop of a controller with this view stalls."""
    print(f"event loop, {1 / STEP_S:g} steps/s of four ranks, disk of {LINE_S:g} s per line:")
    for what, clients in (("no clients", False), (f"{CLIENTS} clients begin to follow at once", True)):
        stalls = asyncio.run(stalls_of(folder, view, recent, clients=clients))
        longest = max(stalls)
        print(under(f"  {what}: longest stall {1e3 * longest.seconds:.1f} ms", 1e3 * longest.seconds, 50))
        print(
            f"    of which the garbage collector took {1e3 * longest.collecting_s:.1f} ms; the longest without it"
            f" {1e3 * max(stall.working_s for stall in stalls):.1f} ms; p99"
            f" {1e3 * percentile([stall.seconds for stall in stalls], 0.99):.1f} ms; most processor time that the"
            f" loop itself spent at a time {1e3 * max(stall.own_s for stall in stalls):.1f} ms",
            flush=True,
        )


def show_takeovers(path: Path, snapshot: Path, view: JobView) -> None:
    """Print how long reading the log at `path` takes, whose view is `view`. The snapshot is deleted."""
    for name in ("snapshot and tail", "whole log"):
        began_s = time.perf_counter()
        found = load([path], snapshot)
        seconds = time.perf_counter() - began_s
        assert found.view == view
        told = f"takeover, {name}: {seconds:.2f} s, {found.folded:,} events folded"
        print(under(told, seconds, 2) if found.from_snapshot else told, flush=True)
        snapshot.unlink(missing_ok=True)


def show_view(view: JobView) -> None:
    """Print the size of the view and the time to serialize it."""
    text, taken_ms = b"", []
    for _ in range(9):
        began_s = time.process_time()
        text = view.to_json()
        taken_ms.append(1e3 * (time.process_time() - began_s))
    serialized_ms = median(taken_ms)
    print(under(f"view with {len(view.steps):,} steps: {len(text) / 1e6:.2f} MB", len(text) / 1e6, 2))
    print(under(f"serialized in {serialized_ms:.1f} ms of processor time", serialized_ms, 50), flush=True)


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        snapshot, view, log = path.with_name(SNAPSHOT), JobView(), EventLog(path)
        recent: deque[Record] = deque(maxlen=KEPT_RECORDS)
        for number, record in enumerate(job(count, MONITORING_SPEC), 1):
            log.append(record)
            view.fold(record)
            recent.append(record)
            if number == count - TAIL:
                write_snapshot(snapshot, view.to_json(), position(path, log.size))
        log.close()
        print(f"log: {count:,} events, {path.stat().st_size / 1e6:.1f} MB, {view.step:,} steps")
        show_view(view)
        show_takeovers(path, snapshot, view)
        show_stalls(Path(folder), view, recent)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
