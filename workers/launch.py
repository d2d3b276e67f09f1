"""Runs all ranks of a job without Ray: as threads of this process, or as processes of a forkserver.

For tests, GPU checks and benchmarks. Where a rank fails the others are ended, and its error is raised here.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from planner.ir import Schedule
from planner.plan import Plan
from workers.config import WorkerConfig
from workers.host_memory import settle_objects
from workers.layer_state import state_digest
from workers.protocol import CheckpointRef, Generation, Outcome, Report, Request, StepReport
from workers.rank import Rank
from workers.transport.channel import Channel
from workers.transport.local import Hub, LocalChannel

GRACE_S = 5.0
"""How long ranks may go on after one of them has failed."""


@dataclass
class Run:
    """How a job ended: per rank its outcome, and all reports in order of arrival."""

    outcomes: list[Outcome]
    reports: list[Report] = field(default_factory=list)

    @property
    def state_sha256(self) -> str:
        """Digest of the whole model, from the first replica's layers."""
        layers = {i: text for outcome in reversed(self.outcomes) for i, text in outcome.layer_digests}
        return state_digest([layers[i] for i in sorted(layers)])


@dataclass(frozen=True)
class Job:
    """What every rank is told."""

    config: WorkerConfig
    plan: Plan
    schedule: Schedule
    start: CheckpointRef | None = None
    stop_at: int | None = None
    """The step whose commit is to carry a STOP."""
    generation: int = 1
    open_channel: Callable[[Generation, int], Channel] | None = None
    """How a process opens its rank's channel, where that is not for `Rank.join` to choose."""


def _host(job: Job, rank: Rank, join: Callable[[Rank], None]) -> Outcome:
    if job.stop_at == 1:
        rank.request(Request.STOP)
    rank.setup()
    damage = rank.follow(job.plan, job.schedule, job.start)
    if damage is not None:
        raise RuntimeError(f"{damage.path}: {damage.file} {damage.problem}")
    join(rank)
    return rank.train()


def _before_stop(job: Job, report: Report) -> bool:
    return isinstance(report, StepReport) and job.stop_at is not None and report.step == job.stop_at - 1


def _generation(job: Job, port: int) -> Generation:
    members = tuple(range(job.plan.world_size))
    return Generation(
        number=job.generation,
        epoch=1,
        members=members,
        store_host="127.0.0.1",
        store_port=port,
        timeout_s=120.0,
    )


def run_threads(job: Job) -> Run:
    """Every rank a thread of this process."""
    world = job.plan.world_size
    hub = Hub(world, timeout_s=120.0)
    reports: list[Report] = []
    results: list[Outcome | BaseException | None] = [None] * world
    ranks: list[Rank] = []

    def take(report: Report) -> None:
        reports.append(report)
        if _before_stop(job, report):
            ranks[0].request(Request.STOP)

    def host(number: int) -> None:
        try:
            results[number] = _host(
                job, ranks[number], lambda r: r.join(_generation(job, 0), LocalChannel(hub, number))
            )
        except BaseException as error:
            results[number] = error
            hub.close()

    ranks.extend(Rank(job.config, number, take) for number in range(world))
    threads = [threading.Thread(target=host, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.close()
    _raise_first(results)
    return Run([r for r in results if isinstance(r, Outcome)], reports)


def _raise_first(results: list[Outcome | BaseException | None]) -> None:
    errors = [r for r in results if isinstance(r, BaseException)]
    # A rank that lost its channel only tells that another one failed first.
    for error in sorted(errors, key=lambda e: type(e).__name__ == "ChannelError"):
        raise error


def _process(job: Job, number: int, pipe: Connection) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rank: Rank

    def take(report: Report) -> None:
        pipe.send(report)
        if _before_stop(job, report):
            rank.request(Request.STOP)

    rank = Rank(job.config, number, take)

    def join(rank: Rank) -> None:
        if number == 0:
            pipe.send(("port", rank.host_store()))
        generation = _generation(job, pipe.recv())
        rank.join(generation, job.open_channel(generation, number) if job.open_channel else None)
        settle_objects()

    try:
        pipe.send(("outcome", _host(job, rank, join)))
        # A collective that is over here may still be under way at a neighbour: all close together.
        pipe.recv()
        rank.close()
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run_processes(job: Job) -> Run:
    """Every rank a process of its own, over Gloo on the loopback interface."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "workers.rank"])
    pipes: list[Connection] = []
    processes = []
    for number in range(job.plan.world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_process, args=(job, number, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        run = _listen(pipes)
        for pipe in pipes:
            pipe.send("close")
        return run
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()


def _listen(pipes: list[Connection]) -> Run:
    outcomes: dict[int, Outcome] = {}
    reports: list[Report] = []
    errors: list[str] = []
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes:
        # Once a rank has failed, the others have this long to tell why they did.
        ready = wait(list(open_pipes), GRACE_S if errors else None)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            number = open_pipes[pipe]
            try:
                message = pipe.recv()
            except EOFError:
                message = ("error", f"rank {number} died")
            match message:
                case ("port", port):
                    for other in pipes:
                        # A rank that has failed meanwhile tells so itself.
                        with suppress(OSError):
                            other.send(port)
                case ("outcome", outcome):
                    outcomes[number] = outcome
                    del open_pipes[pipe]
                case ("error", text):
                    errors.append(f"rank {number}: {text}")
                    del open_pipes[pipe]
                case report:
                    reports.append(report)
    if errors:
        raise RuntimeError("\n".join(sorted(errors, key=lambda e: "ChannelError" in e)))
    return Run([outcomes[number] for number in sorted(outcomes)], reports)
