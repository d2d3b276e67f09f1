"""Rows of the table of faults on a real Ray cluster of four nodes, and then the loss of a node.

All run in one job, one after the other. `test_fault_table.py` runs all rows on plain processes, and in `make test`
`test_ray_recovery.py`, `test_ray_faults.py` and `test_ray_rehearsal.py` kill, stop and lose ranks and nodes of Ray:
this is for `make bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from fault_rows import Row, Running, Table, Told
from ray_jobs import Log, assert_nothing_left, driver_of, resolved
from ray_nodes import add_node, start_head
from resting import Resting
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.cluster.actor_names import NAMESPACE, rank_name
from orchestrator.events import types as events
from orchestrator.lifecycle.stimuli import SaveOrStop
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.orders import Request
from workers.protocol.reports import StepReport

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]

RANKS, SPARES = 3, 2
NODES, RANKS_PER_NODE = 3, 2
JOB = "faulted"
HANG_S = 15.0
TIMES = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 0.015)
ROWS = (
    Row(FaultPhase.BACKWARD, "middle", FaultKind.RAISE),
    Row(FaultPhase.RECOVERING, "first", FaultKind.KILL),
)
MORE_ROWS = (
    Row(FaultPhase.FORWARD, "first", FaultKind.KILL),
    Row(FaultPhase.BEFORE_COMMIT, "last", FaultKind.KILL),
    Row(FaultPhase.IN_COMMIT, "middle", FaultKind.KILL),
    Row(FaultPhase.AFTER_COMMIT, "first", FaultKind.STOP),
    Row(FaultPhase.SAVING, "last", FaultKind.RAISE),
)
"""Rows of a second job."""


class RayJob:
    """A job on the cluster, as the table's rows see it."""

    def call_in_turn(self, *calls: tuple[int, str, Any]) -> None:
        for rank, method, argument in calls:
            actor = ray.get_actor(rank_name(JOB, rank), namespace=NAMESPACE)
            ray.get(getattr(actor, method).remote(argument))

    def post(self, stimulus: SaveOrStop) -> None:
        assert stimulus.request is Request.STOP
        BlockingJobClient().stop(JOB)


class Nodes:
    """A head node without ranks, and nodes with room for two ranks each."""

    def __init__(self) -> None:
        self.cluster = start_head(0)
        self._nodes: list[Any] = [add_node(self.cluster, RANKS_PER_NODE) for _ in range(NODES)]

    def kill(self, name: str) -> None:
        """Kill all processes of a node at once, as if its machine were lost."""
        (node,) = [node for node in self._nodes if node.node_id == name]
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            process.kill()
        self.cluster.remove_node(node, allow_graceful=False)


class NodeTable(Table):
    """A table that, after its rows, kills the node of the middle rank."""

    def __init__(self, nodes: Nodes, rows: Sequence[Row]) -> None:
        super().__init__(rows, Resting(least=RANKS, standbys=True))
        self.rows = tuple(rows)
        self._nodes = nodes
        self._homes: dict[int, str] = {}
        self.gone: frozenset[int] = frozenset()
        """Members that lived on that node."""
        self.since: list[events.Event] = []
        """The events after that."""
        self._stopped = False

    def __call__(self, running: Running, event: events.Event) -> None:
        if isinstance(event, events.RankStarted):
            self._homes[event.rank] = event.node
        if self.gone:
            self.since.append(event)
        super().__call__(running, event)
        regrouped = any(isinstance(one, events.Regrouped) for one in self.since)
        if regrouped and self.job.at_rest and not self._stopped:
            self._stopped = True
            running.post(SaveOrStop(Request.STOP))

    def _ready(self) -> bool:
        """The node that is killed last may hold two members, and each of them needs a spare."""
        spares = len(self.job.up) - len(self.job.members)
        return super()._ready() and (bool(self._rows) or spares >= RANKS_PER_NODE)

    def _end(self, running: Running) -> None:
        self._now = None
        members = self.job.members
        node = self._homes[members[len(members) // 2]]
        self.gone = frozenset(rank for rank in members if self._homes[rank] == node)
        self._nodes.kill(node)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    up = Nodes()
    with driver_of(up.cluster):
        yield up
        assert_nothing_left()
    up.cluster.shutdown()


def job(folder: Path) -> Spec:
    return tiny(
        folder,
        JOB,
        job={"steps": 100_000, "sample_tokens": 0},
        pipeline={"ranks": RANKS, "microbatches": 2, "microbatch_size": 1},
        checkpoint={"every_steps": 2},
        elastic={"spares": SPARES, "grow": False, "allow_faults": True, "hang_timeout_s": HANG_S},
        cluster={"device": "emulated", "emulated": TIMES, "resources_per_rank": {"CPU": 1.0}},
    )


@dataclass(frozen=True)
class FaultedJob:
    """The job after all rows and the loss of a node."""

    log: Log
    table: NodeTable
    metrics: dict[str, Any]
    quiet_sha256: str

    @property
    def told(self) -> dict[Row, Told]:
        assert set(self.table.told) == set(self.table.rows)
        return self.table.told


@pytest.fixture(scope="module", params=[ROWS, MORE_ROWS], ids=["two-rows", "five-rows"])
def faulted(
    nodes: Nodes, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> FaultedJob:
    table, running = NodeTable(nodes, request.param), RayJob()
    log = Log(lambda record: table(running, record.event))
    result = PipelineTrainer(job(tmp_path_factory.mktemp("faulted")), observe=log).fit()
    assert result.error is None, result.error
    assert result.metrics is not None
    calm = resolved(job(tmp_path_factory.mktemp("calm")))
    quiet = run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule, stop_at=max(steps(log))))
    return FaultedJob(log, table, result.metrics, quiet.state_sha256)


def steps(log: Log) -> list[int]:
    return [report.step for report in log.of(StepReport)]


def test_each_fault_has_one_outcome(faulted: FaultedJob) -> None:
    for row, told in faulted.told.items():
        assert told.fired is not None, f"{row} never fired"
        assert (told.fired.rank, told.fired.phase) == (told.rank, row.phase)
        (regrouped,) = told.regrouped
        assert told.failed == [told.rank]
        raised = row.kind is FaultKind.RAISE
        assert (regrouped.cause, regrouped.lost) == (("retry", ()) if raised else ("loss", (told.rank,)))
        assert regrouped.rerun <= 1
        assert regrouped.steps_lost == 0


def test_a_node_is_lost_with_all_that_lived_there(faulted: FaultedJob) -> None:
    since = [event for event in faulted.table.since if isinstance(event, events.Regrouped)]
    assert {rank for regrouped in since for rank in regrouped.lost} == faulted.table.gone
    assert faulted.table.gone
    assert all(regrouped.steps_lost == 0 and regrouped.rerun <= 1 for regrouped in since)


def test_it_ends_with_the_bits_of_the_quiet_run(faulted: FaultedJob) -> None:
    assert faulted.metrics["state_sha256"] == faulted.quiet_sha256
    told = steps(faulted.log)
    assert told == list(range(1, len(told) + 1))
    faulted.log.assert_processes_gone()
