"""Runs all ranks of a job without Ray, as processes of a forkserver.

For tests, GPU checks and benchmarks, and to compute steps of a run again. Where a rank fails the others are ended, and
its error is raised here.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from planner.freezing import FreezePlan
from planner.ir import Schedule
from planner.plan import Plan
from planner.rank_program import place_programs
from workers.config import WorkerConfig
from workers.launch.processes import Died, LaunchedProcesses
from workers.process.host_memory import exclude_from_collections
from workers.profiling.counted_memory import CountedMemory, LiveStorages
from workers.protocol.orders import Assignment, CheckpointRef, Generation, Request
from workers.protocol.reports import Outcome, Report, StepReport, TimelineReport
from workers.rank import Rank
from workers.state.layer_state import state_digest
from workers.transport.channel import Channel

Observer = Callable[[Report], FreezePlan | None]


@dataclass
class LaunchedRun:
    """Result of a job: the outcome of each rank, and all reports in order of arrival."""

    outcomes: list[Outcome]
    reports: list[Report] = field(default_factory=list)
    memory: list[CountedMemory] = field(default_factory=list)
    """Where the job counts memory: of every rank and step with a timeline."""

    @property
    def state_sha256(self) -> str:
        """Digest of the whole model, from the first replica's layers."""
        layers = {i: text for outcome in reversed(self.outcomes) for i, text in outcome.layer_digests}
        return state_digest([layers[i] for i in sorted(layers)])


@dataclass(frozen=True)
class LaunchedJob:
    """Data that every rank receives at startup."""

    config: WorkerConfig
    plan: Plan
    schedule: Schedule
    """The plan's for one replica."""
    shared: tuple[Schedule, ...] = ()
    """With uneven shares, the schedule of each pipeline."""
    start: CheckpointRef | None = None
    stop_at: int | None = None
    """The step whose commit carries a STOP."""
    generation: int = 1
    freeze_plans: tuple[FreezePlan, ...] = ()
    """With known start; see `Assignment.freeze`."""
    prepare: tuple[tuple[int, FreezePlan], ...] = ()
    """(step, plan): a rank prepares the plan when it reports its timeline of that step; before it trains, for 0."""
    open_channel: Callable[[Generation, int], Channel] | None = None
    """Opens a rank's channel in its process; None: `Rank.join` chooses the channel."""
    count_memory: bool = False
    """Whether each process counts the storages that live while it trains, which slows it down."""
    secret: bytes = b""
    """Secret with which ranks fetch layers from each other; without one they serve none."""


def assignment(job: LaunchedJob, place: int) -> Assignment:
    """Return the assignment of the rank at `place` of the job's first generation."""
    return Assignment(
        place=place,
        plan=job.plan,
        program=place_programs(job.plan, job.shared or (job.schedule,))[place],
        step=job.start.step if job.start is not None else 0,
        start=job.start,
        freeze=job.freeze_plans,
    )


def host_rank(
    job: LaunchedJob,
    number: int,
    rank: Rank,
    join: Callable[[Rank], None],
    counting: AbstractContextManager[object] | None = None,
) -> Outcome:
    """Train as the rank `number` of `job`, in this thread; `join` has it join its generation."""
    begun = job.start.step if job.start is not None else 0
    if job.stop_at == begun + 1:
        rank.request(Request.STOP)
    rank.setup()
    with counting or nullcontext():
        damage = rank.follow(assignment(job, number))
        if damage is not None:
            raise RuntimeError(f"{damage.path}: {damage.file} {damage.problem}")
        join(rank)
        _prepare(job, rank, 0)
        outcome = rank.train()
        assert isinstance(outcome, Outcome), "nobody asks for another generation here"
        return outcome


def react(job: LaunchedJob, rank: Rank, report: Report) -> None:
    """Pass on the requests of `job` to a rank that has just sent `report`."""
    if isinstance(report, StepReport) and job.stop_at is not None and report.step == job.stop_at - 1:
        rank.request(Request.STOP)
    if isinstance(report, TimelineReport):
        _prepare(job, rank, report.step)


def _prepare(job: LaunchedJob, rank: Rank, step: int) -> None:
    for due, plan in job.prepare:
        if due == step:
            rank.prepare(plan)


def generation_of(job: LaunchedJob, port: int) -> Generation:
    """The only generation of a job, which meets at `port`."""
    members = tuple(range(job.plan.world_size))
    return Generation(
        number=job.generation,
        epoch=1,
        members=members,
        store_host="127.0.0.1",
        store_port=port,
        timeout_s=120.0,
    )


def _process(job: LaunchedJob, number: int, pipe: Connection) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rank: Rank
    counting = LiveStorages() if job.count_memory else None

    def accept(report: Report) -> None:
        pipe.send(report)
        if counting is not None and isinstance(report, TimelineReport):
            pipe.send(CountedMemory(rank=number, step=report.step, peak_bytes=counting.restart()))
        react(job, rank, report)

    rank = Rank(job.config, number, accept, secret=job.secret)
    closing = threading.Event()

    def join(rank: Rank) -> None:
        if number == 0:
            pipe.send(("port", rank.host_store()))
        generation = generation_of(job, pipe.recv())
        rank.join(generation, job.open_channel(generation, number) if job.open_channel else None)
        threading.Thread(target=_obey, args=(pipe, rank, closing), daemon=True).start()
        exclude_from_collections()

    try:
        pipe.send(("outcome", host_rank(job, number, rank, join, counting)))
        # A collective that is over here may still be under way at a neighbour: all close together.
        closing.wait()
        rank.close()
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _obey(pipe: Connection, rank: Rank, closing: threading.Event) -> None:
    """Prepare every freeze plan that comes, until told to close."""
    try:
        while isinstance(message := pipe.recv(), FreezePlan):
            rank.prepare(message)
    finally:
        closing.set()


def run_processes(job: LaunchedJob, observe: Observer | None = None) -> LaunchedRun:
    """Every rank a process of its own, over Gloo on the loopback interface.

    Args:
        observe: sees every report as it comes; a plan that it returns is prepared by all ranks.
    """
    outcomes: dict[int, Outcome] = {}
    reports: list[Report] = []
    memory: list[CountedMemory] = []
    errors: list[str] = []
    with LaunchedProcesses(job.plan.world_size, _process, job, job.config.model.slow_imports) as ranks:
        for number, message in ranks.receive():
            match message:
                case ("port", port):
                    ranks.tell(port)
                case ("outcome", outcome):
                    outcomes[number] = outcome
                    ranks.done(number)
                case ("error", text):
                    errors.append(f"rank {number}: {text}")
                    ranks.done(number, failed=True)
                case Died():
                    errors.append(f"rank {number}: its process died")
                    ranks.done(number, failed=True)
                case CountedMemory():
                    memory.append(message)
                case report:
                    reports.append(report)
                    plan = observe(report) if observe is not None else None
                    if plan is not None:
                        ranks.tell(plan)
        if errors:
            raise RuntimeError("\n".join(sorted(errors, key=lambda e: "ChannelError" in e)))
    return LaunchedRun([outcomes[number] for number in sorted(outcomes)], reports, memory)
