"""The Ray actor around one rank: it passes calls in and reports out, and makes errors serializable.

Training runs in the default concurrency group, on one thread; control calls have their own, so that they
reach a rank while it trains. Knows nothing of what is trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from planner.arrivals import Arrivals
from planner.freezing import FreezePlan
from planner.observed import StepTimes
from planner.plan import Plan
from planner.rank_program import RankProgram
from planner.shards import Piece
from workers.checkpoint.left_behind import leave_note, leave_reports
from workers.checkpoint.manifest import FileRecord
from workers.checkpoint.storage import open_folder
from workers.config import WorkerConfig
from workers.control.head_watch import HeadWatch, host_and_port_of
from workers.control.rank_error import RankError, travelling_errors
from workers.control.report_mail import UNANSWERED, ReportMail
from workers.control.rescues import Rescues, patience_s
from workers.control.telemetry_lane import TelemetryLane
from workers.fault_injection.fault import Fault
from workers.notices.reporting import watch_node
from workers.process.host_memory import collect_objects, exclude_from_collections, without_collections
from workers.process.name_lookups import keep_lookups_short
from workers.process.output import keep_output
from workers.process.process_times import ProcessTimes, process_times
from workers.process.stacks import stacks
from workers.profiling.measured import Measured
from workers.protocol.errors import DamagedCheckpoint, JobError
from workers.protocol.orders import Assignment, CommitOutcome, CopyAhead, Generation, Request, StateSource
from workers.protocol.reports import (
    FaultReport,
    Outcome,
    Parted,
    RankPosition,
    Report,
    Rescued,
    WarningReport,
    Working,
)

CONTROL = "control"
"""Concurrency group of calls that must not wait for training."""
DELIVERY_S = 10.0
"""Seconds, at most, that a rank waits for its last reports to arrive before its training returns."""
ZONE_LABEL = "ray.io/availability-zone"
"""Label of a Ray node with its zone: clouds' autoscalers and KubeRay set it, or `ray start --labels`."""
LAST_WORDS_S = 1.0
"""Seconds, at most, to wait for the report of a fault before it fires, and for reports after a rescue."""


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where a rank lives."""

    node: str
    host: str
    pid: int
    zone: str = ""
    """Availability zone of the node; empty if unknown."""
    port: int = 0
    """Where the rank serves layers; it refuses connections as soon as the process is dead."""
    machine: str = ""
    """Its hardware and library, as far as they decide of the last digits; empty: unknown."""


class RankActor:
    """One rank.

    Args:
        rank: its number.
        controller: receives its reports, through `report`. None: nobody does, and the rank must not report.
        marker: a file in the job's folder and its content; a node that does not see it does not share the
            folder. None: the folder is not used.
        secret: the job's secret, with which ranks authenticate each other when they fetch layers.
    """

    def __init__(
        self,
        config: WorkerConfig,
        rank: int,
        controller: ActorHandle | None,
        marker: tuple[str, bytes] | None,
        secret: bytes = b"",
    ) -> None:
        _set_environment(config)
        with without_collections():
            from workers.rank import Rank

        self._config = config
        self._number = rank
        self._marker = marker
        self._machine = ""
        self._mail = ReportMail(_to(controller), _answers)
        self._outcome: Outcome | Parted | RankError | None = None
        self._host = ray.util.get_node_ip_address()
        self._lane = TelemetryLane(_observing(controller), _over)
        self._rescued: Rescued | None = None
        """The newest rescue that this rank reported, as the first one."""
        self._head = ray.get_runtime_context().gcs_address
        self._rescues = Rescues(patience_s(), self._leave_word)
        self._rank = Rank(
            config,
            rank,
            self._send,
            secret=secret,
            host=self._host,
            observe=self._lane.offer,
            log_sha256=self._mail.log_sha256,
            rescues=self._rescues,
        )
        if controller is not None:
            node = ray.get_runtime_context().get_node_id()
            HeadWatch(
                host_and_port_of(self._head), lambda: self._rescues.lost(time.time()), self._rescues.back
            )
            run = marker[1] if marker is not None else config.job.folder.encode()
            self._watch = watch_node(config.elastic, run, node, rank, self._send)

    def setup(self) -> Home:
        """Open the model and the data.

        Raises:
            RankError: opening one fails, or this node does not see the job's folder.
        """
        with travelling_errors():
            if self._marker is not None:
                check_folder(self._config.job.folder, self._marker, self._host)
                # Training does not depend on the log: a full or read-only disk is no reason to stop.
                with suppress(OSError):
                    keep_output(self._config.job.folder, self._number)
            self._rank.setup()
        from workers.devices.machine import arithmetic

        self._machine = arithmetic(self._config.device)
        exclude_from_collections()
        return self._home()

    def _home(self) -> Home:
        context = ray.get_runtime_context()
        labels: Mapping[str, str] = context.get_node_labels()  # pyright: ignore[reportAssignmentType]
        return Home(
            node=context.get_node_id(),
            host=self._host,
            pid=os.getpid(),
            zone=labels.get(ZONE_LABEL, ""),
            port=self._rank.port,
            machine=self._machine,
        )

    def follow(self, assignment: Assignment) -> DamagedCheckpoint | None:
        """Take up the layers that `assignment` gives this rank; see `Rank.follow`."""
        with travelling_errors():
            return self._rank.follow(assignment)

    def host_store(self) -> tuple[str, int]:
        """Host the store of the next generation; returns its address and port."""
        with travelling_errors():
            return self._host, self._rank.host_store(self._host)

    def join(self, generation: Generation) -> None:
        """Form the process group. A failure here may come from another rank that failed first."""
        self._outcome = None
        with travelling_errors(cut_off=True):
            self._rank.join(generation)
        collect_objects()

    def profile(self) -> Measured:
        """Measure the job's costs; see `Rank.profile`."""
        with travelling_errors():
            return self._rank.profile()

    def train(self) -> Outcome | Parted:
        """Train. At the end of the job it returns once the controller has received this rank's reports."""
        self._outcome = None
        try:
            with travelling_errors():
                self._outcome = self._rank.train()
        except RankError as error:
            self._outcome = error
            raise
        if isinstance(self._outcome, Outcome):
            self._deliver()
        return self._outcome

    def outcome(self) -> Outcome | Parted | None:
        """Return or raise what the newest `train` did; the call waits for it.

        For a controller that did not make that `train` call. None: this rank has not trained in its newest
        generation.
        """
        if isinstance(self._outcome, RankError):
            raise self._outcome
        if isinstance(self._outcome, Outcome):
            self._deliver()
        return self._outcome

    def _deliver(self) -> None:
        """Wait for the reports to arrive, but not long: the controller may be gone."""
        if under_way := self._mail.under_way():
            ray.wait(under_way, num_returns=len(under_way), timeout=DELIVERY_S)

    def position(self) -> RankPosition:
        """The position of this rank, once it no longer trains; see `Rank.position`."""
        with travelling_errors():
            return self._rank.position()

    def records(self) -> tuple[bytes, ...]:
        """All ranks' records of the commit of its step; see `Rank.records`."""
        with travelling_errors():
            return self._rank.records()

    def finish_commit(self, commit_outcome: CommitOutcome) -> None:
        """Apply or drop the commit in which a generation ended; see `Rank.finish_commit`."""
        with travelling_errors():
            self._rank.finish_commit(commit_outcome)

    def save(
        self, folder: str, step: int, layers: Sequence[int], sources: Sequence[StateSource] = ()
    ) -> tuple[FileRecord, ...]:
        """Write layers into a checkpoint while this rank is not training; see `Rank.save`."""
        with travelling_errors():
            records = self._rank.save(folder, step, layers, sources)
        # Steps are reported before their checkpoint.
        self._deliver()
        return records

    def seal(
        self, folder: str, step: int, plan: Plan, generation: int, records: Sequence[FileRecord]
    ) -> None:
        """Complete that checkpoint; see `Rank.seal`."""
        with travelling_errors():
            self._rank.seal(folder, step, plan, generation, records)

    @ray.method(concurrency_group=CONTROL)
    def ping(self) -> Working | None:
        """Answer with what this rank computes; see `Rank.working`."""
        return self._rank.working()

    @ray.method(concurrency_group=CONTROL)
    def look(self, pid: int) -> ProcessTimes:
        """Look at another process of this machine: a rank that does not answer."""
        return process_times(pid)

    @ray.method(concurrency_group=CONTROL)
    def stacks(self) -> str:
        """See `workers.process.stacks`."""
        return stacks()

    @ray.method(concurrency_group=CONTROL)
    def attach(self, controller: ActorHandle) -> Home:
        """Report to `controller` from now on, beginning with the reports that no controller has received."""
        self._mail.send_again(_to(controller))
        self._lane.send_with(_observing(controller))
        return self._home()

    @ray.method(concurrency_group=CONTROL)
    def request(self, request: Request) -> None:
        """Put a request into the mailbox."""
        self._rank.request(request)

    @ray.method(concurrency_group=CONTROL)
    def prepare(self, plan: FreezePlan) -> None:
        """Prepare a freeze plan; see `Rank.prepare`."""
        with travelling_errors():
            self._rank.prepare(plan)

    @ray.method(concurrency_group=CONTROL)
    def prepare_plan(
        self,
        plan: Plan,
        program: RankProgram,
        generation: int,
        held: Arrivals = (),
        building: Sequence[Piece] = (),
    ) -> None:
        """Prepare another pipeline plan; see `Rank.prepare_plan`."""
        with travelling_errors():
            self._rank.prepare_plan(plan, program, generation, held, building)

    @ray.method(concurrency_group=CONTROL)
    def copy_ahead(self, order: CopyAhead) -> None:
        """Copy layers while others train; see `Rank.copy_ahead`."""
        with travelling_errors():
            self._rank.copy_ahead(order)

    @ray.method(concurrency_group=CONTROL)
    def arm(self, fault: Fault) -> None:
        """Arm a fault on this rank; see `FaultPoints.arm`."""
        with travelling_errors():
            self._rank.faults.arm(fault)

    @ray.method(concurrency_group=CONTROL)
    def leave(self, generation: int = 0) -> None:
        """Drop the process group: a blocked `train` or `join` raises; see `Rank.leave`."""
        self._rank.leave(generation)

    def _leave_word(self) -> None:
        """After a rescue, leave in the job's folder how to resume, and what the controller has not taken."""
        if under_way := self._mail.under_way():
            ray.wait(under_way, num_returns=len(under_way), timeout=LAST_WORDS_S)
        try:
            leave_reports(self._config.job.folder, self._number, self._mail.unreported())
            if self._rescued is not None:
                leave_note(self._config.job.folder, self._rescued, self._head)
        except OSError as error:
            text = f"cannot write into {self._config.job.folder} how to resume: {error.strerror or error}"
            self._send(WarningReport(rank=self._number, text=text))

    def _send(self, report: Report) -> None:
        if isinstance(report, Rescued):
            self._rescued = report
        handle = self._mail.put(report)
        if isinstance(report, FaultReport):
            # The fault may kill this process.
            ray.wait([handle], timeout=LAST_WORDS_S)


def _to(controller: Any) -> Callable[[Report], Any]:
    return lambda report: controller.report.remote(report)


def _observing(controller: Any) -> Callable[[Sequence[StepTimes]], Any]:
    return lambda batch: controller.observe.remote(batch)


def _over(handle: Any) -> bool:
    ended, _ = ray.wait([handle], timeout=0)
    return bool(ended)


def _answers(handles: Sequence[Any]) -> list[Any]:
    if not handles:
        return []
    ended, _ = ray.wait(list(handles), num_returns=len(handles), timeout=0)
    answers: dict[Any, Any] = {}
    for handle in ended:
        with suppress(RayError):
            answers[handle] = ray.get(handle)
    return [answers.get(handle, UNANSWERED) for handle in handles]


def check_folder(output: str, marker: tuple[str, bytes], host: str) -> None:
    """Check that this node, `host`, sees the job's folder.

    Raises:
        JobError: the file that `marker` names is missing, or belongs to another job or an earlier start.
    """
    name, content = marker
    try:
        seen = open_folder(output).read(name)
    except OSError:
        seen = None
    if seen != content:
        raise JobError(
            f"node {host} does not see the job's folder {output}: put job.output on a file system that all"
            " nodes share, or on a URI such as s3://bucket/folder"
        )


def _set_environment(config: WorkerConfig) -> None:
    """Set what torch and cuBLAS read when a rank's process loads them, and what the resolver reads at its
    first lookup, which may be a query for notices."""
    keep_lookups_short()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(config.job.threads)
    # Without fixed-size workspaces cuBLAS is not deterministic.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
