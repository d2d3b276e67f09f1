"""Ranks that outlive their generations, as processes without Ray, with a small stand-in controller."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from jobs import DEVICE
from pace import patient

from benchmarks.parts.rank_threads import run_threads
from planner.plan import Plan
from planner.rank_program import place_programs
from workers.activation_cache import cache_folders
from workers.config import ElasticConfig, WorkerConfig
from workers.control.records_digest import vector_sha256
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.launch.processes import Died, LaunchedProcesses
from workers.launch.ranks import LaunchedJob
from workers.protocol.carried import Carried
from workers.protocol.errors import ChannelError
from workers.protocol.orders import Assignment, CommitOutcome, Generation, Request, StateSource
from workers.protocol.reports import (
    FaultReport,
    Outcome,
    Parted,
    RankPosition,
    Report,
    StandbyReport,
    StepReport,
)
from workers.rank import Rank
from workers.state.layer_state import state_digest
from workers.transport.process_group import ProcessGroupChannel

SECRET = b"a secret of the tests"
AT_ONCE = ("leave", "request", "prepare", "prepare_plan", "copy_ahead", "inject", "die")
"""Calls that do not queue behind training."""


class Assured(ProcessGroupChannel):
    """A gather from which no rank returns before all have its result: faults in commits have one outcome."""

    def all_gather(self, record: bytes) -> list[bytes]:
        records = super().all_gather(record)
        with suppress(ChannelError):
            super().all_gather(b"")
        return records


@dataclass(frozen=True)
class Raised:
    """The error that a call raised."""

    error: str


def drilled(config: WorkerConfig) -> WorkerConfig:
    return config.model_copy(update={"elastic": ElasticConfig(allow_faults=True)})


def with_standbys(job: LaunchedJob, shift: int = 1) -> Plan:
    """The plan of `job` with a copy of each layer `shift` places further."""
    plan = job.plan
    places = [
        (plan.stage_ranks[plan.stage_of_layer(layer)] + shift) % plan.pipeline_ranks
        for layer in range(plan.layers[-1][1])
    ]
    return replace(plan, standbys=tuple((place,) for place in places))


class RankGroup:
    """A context with processes 0, 1, ... that host one rank each.

    Args:
        apart: folders that are the shared memory of ranks of another node, with an address of its own.

    """

    def __init__(self, config: WorkerConfig, ranks: int, apart: Mapping[int, Path] | None = None) -> None:
        self._processes = LaunchedProcesses(ranks, partial(_serve, apart=apart or {}), config)
        self._pipes = self._processes._pipes
        self.alive = list(range(ranks))
        self.reports: list[tuple[int, Report]] = []
        self.logged: list[tuple[int, str]] = []
        """(rank, what it logged)."""
        self._answers: dict[int, Any] = {}
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self.generation = 0

    def __enter__(self) -> RankGroup:
        self._processes.__enter__()
        self._thread.start()
        self.each("setup")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.__exit__(kind, error, trace)
        self._thread.join(5)

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call `name` on each of these ranks; an answer is what the call returned, `Raised`, or `Died`."""
        self.start(name, arguments)
        return self.answers(arguments)

    def start(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> None:
        with self._heard:
            for number in arguments:
                self._answers.pop(number, None)
        for number, given in arguments.items():
            with suppress(OSError):
                self._pipes[number].send((name, given))

    def answers(self, numbers: Any, timeout_s: float = 180.0) -> dict[int, Any]:
        def there() -> bool:
            return all(n in self._answers or n not in self.alive for n in numbers)

        with self._heard:
            assert self._heard.wait_for(there, patient(timeout_s)), f"no answer: {self._answers}"
            return {n: self._answers.get(n, Died(exit_code=None)) for n in numbers}

    def each(self, name: str, *arguments: Any) -> dict[int, Any]:
        answers = self.call(name, dict.fromkeys(self.alive, arguments))
        for number, answer in answers.items():
            assert not isinstance(answer, Raised), f"rank {number}, {name}: {answer.error}"
        return answers

    def arm(self, number: int, fault: Fault) -> None:
        self.call("arm", {number: (fault,)})

    def wait_for(self, seen: Callable[[list[Report]], bool], timeout_s: float = 120.0) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: seen([r for _, r in self.reports]), patient(timeout_s))

    def wait_for_log(self, seen: Callable[[list[tuple[int, str]]], bool], timeout_s: float = 60.0) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: seen(self.logged), patient(timeout_s)), self.logged

    def of(self, kind: type[Any]) -> list[Any]:
        return [report for _, report in self.reports if isinstance(report, kind)]

    @property
    def fired(self) -> list[tuple[int, str, int, str]]:
        return [(r.rank, r.fault, r.step, r.phase) for r in self.of(FaultReport)]

    def train(
        self,
        job: LaunchedJob,
        members: Sequence[int],
        *,
        plan: Plan | None = None,
        step: int = 0,
        sources: Sequence[StateSource] = (),
        start: Any = None,
        regroup_by: int | None = None,
        carried: Carried | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Train one generation.

        Args:
            regroup_by: the rank that requests another generation in the first commit.
            meanwhile: called while the ranks train.
        """
        self.generation += 1
        plan = plan or job.plan
        programs = place_programs(plan, job.shared or (job.schedule,))
        told = {
            number: (
                Assignment(
                    place=place,
                    plan=plan,
                    program=programs[place],
                    step=step,
                    start=start,
                    sources=tuple(sources),
                    freeze=job.freeze_plans,
                    carried=carried,
                ),
            )
            for place, number in enumerate(members)
        }
        self._check(self.call("follow", told))
        port = self.call("host_store", {members[0]: ()})[members[0]]
        generation = Generation(
            number=self.generation,
            epoch=1,
            members=tuple(members),
            store_host="127.0.0.1",
            store_port=port,
            timeout_s=patient(60.0),
        )
        self._check(self.call("join", dict.fromkeys(members, (generation,))))
        if regroup_by is not None:
            self.tell(regroup_by, "request", Request.REGROUP)
        self.start("train", dict.fromkeys(members, ()))
        if meanwhile is not None:
            meanwhile()
        return self.answers(members)

    def train_with_loss(self, work: LaunchedJob, step: int, phase: FaultPhase) -> dict[int, Any]:
        """Train `work` on ranks 0 to 2 with copies until rank 1 is killed in `phase` of `step`, then to the end on
        others: rank 3 comes in, and all but the last are in other places."""
        plan = with_standbys(work)
        self.arm(1, Fault(kind=FaultKind.KILL, step=step, phase=phase))
        ended = self.train(work, range(3), plan=plan)
        assert isinstance(ended[1], Died)
        assert all(isinstance(ended[number], Raised) for number in (0, 2)), ended
        assert (1, "kill", step, phase) in self.fired
        reached, _, sources = self.finish_commit()
        return self.train(work, (3, 0, 2), plan=plan, step=reached, sources=sources)

    def tell(self, number: int, name: str, *arguments: Any) -> None:
        """Make a call that the rank carries out at once and does not answer."""
        assert name in AT_ONCE
        self._pipes[number].send((name, arguments))

    def stop(self) -> None:
        """Have the ranks that train stop at a commit."""
        self.tell(self.alive[0], "request", Request.STOP)

    def _check(self, answers: dict[int, Any]) -> None:
        for number, answer in answers.items():
            assert answer is None, f"rank {number}: {answer}"

    def finish_commit(self) -> tuple[int, dict[int, RankPosition], list[StateSource]]:
        """Finish the commit; returns the step, the survivors' positions, and the sources of the layers."""
        answers = self.each("position")
        positions = {n: p for n, p in answers.items() if isinstance(p, RankPosition)}
        newest = max(p.step for p in positions.values())
        undecided = [n for n, p in positions.items() if p.undecided == newest]
        vector = None
        if undecided:
            holder = next(n for n, p in positions.items() if p.step == newest and p.vector_sha256 is not None)
            vector = self.call("records", {holder: ()})[holder]
            assert vector_sha256(vector) == positions[holder].vector_sha256
        told = {
            n: (CommitOutcome(step=newest, vector=vector if n in undecided else None, reported=0),)
            for n in positions
        }
        self._check(self.call("finish_commit", told))
        positions = self.each("position")
        sources = [
            StateSource(layer=piece.layer, shard=piece.shard, rank=number, host=p.host, port=p.port)
            for number, p in positions.items()
            if p.step == newest
            for piece in p.holds
        ]
        return newest, positions, sources

    def steps(self) -> dict[int, StepReport]:
        """For each step, the report that counts."""
        told: dict[int, StepReport] = {}
        for report in self.of(StepReport):
            told.setdefault(report.step, report)
        return told

    def protected(self, ranks: int) -> Callable[[], None]:
        """A function that waits until `ranks` more reports say that a rank's copies are current."""
        before = len(self.of(StandbyReport))
        return lambda: self.wait_for(
            lambda reports: sum(isinstance(r, StandbyReport) for r in reports) >= before + ranks
        )

    def _hear(self) -> None:
        for number, message in self._processes.receive():
            with self._heard:
                match message:
                    case ("answer", value):
                        self._answers[number] = value
                    case ("log", text):
                        self.logged.append((number, text))
                    case Died():
                        self.alive.remove(number)
                        self._processes.done(number)
                    case report:
                        self.reports.append((number, report))
                self._heard.notify_all()


def state_sha256(outcomes: Mapping[int, Any]) -> str:
    """The digest of the entire model; all outcomes must be good."""
    layers: dict[int, str] = {}
    for number, outcome in outcomes.items():
        assert isinstance(outcome, Outcome), f"rank {number}: {outcome}"
        for layer, text in outcome.layer_digests:
            assert layers.setdefault(layer, text) == text
    return state_digest([layers[layer] for layer in sorted(layers)])


def quiet_sha256(job: LaunchedJob, ended: Mapping[int, Any]) -> str:
    """The state of an undisturbed run of `job` that stops at the step at which `ended` did."""
    (step,) = {outcome.step for outcome in ended.values()}
    return run_threads(replace(job, stop_at=step)).state_sha256


def parted(outcomes: Mapping[int, Any]) -> set[int]:
    """The steps at which the ranks left their generation."""
    assert all(isinstance(outcome, Parted) for outcome in outcomes.values()), outcomes
    return {outcome.step for outcome in outcomes.values()}


class _Sending(logging.Handler):
    """Passes what a rank logs on to the group."""

    def __init__(self, send: Callable[[object], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(("log", record.getMessage()))


def _serve(config: WorkerConfig, number: int, pipe: Connection, apart: Mapping[int, Path]) -> None:
    host = "127.0.0.1"
    if number in apart:
        host, cache_folders.MEMORY = "127.0.0.2", apart[number]
    turn = threading.Lock()

    def send(message: object) -> None:
        # Faults report from the thread in which they fire.
        with turn:
            pipe.send(message)

    logging.getLogger("workers").addHandler(_Sending(send))
    rank = Rank(config, number, send, secret=SECRET, host=host)
    calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue()
    threading.Thread(target=_take, args=(pipe, rank, calls, send), daemon=True).start()
    while (call := calls.get()) is not None:
        send(("answer", _answer(rank, *call)))
    rank.close()


def _take(pipe: Connection, rank: Rank, calls: queue.Queue[Any], send: Callable[[object], None]) -> None:
    while (message := pipe.recv()) != "close":
        name, given = message
        if name == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "inject":
            rank.faults.arm(*given)
        elif name in AT_ONCE:
            getattr(rank, name)(*given)
        else:
            calls.put((name, given))
    calls.put(None)


def _answer(rank: Rank, name: str, given: tuple[Any, ...]) -> Any:
    try:
        if name == "arm":
            return rank.faults.arm(*given)
        if name == "join":
            (generation,) = given
            return rank.join(generation, Assured(generation, rank.position().rank, DEVICE))
        return getattr(rank, name)(*given)
    except Exception as error:
        return Raised(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
