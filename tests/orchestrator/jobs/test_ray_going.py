"""Nodes that get notice while a job runs on a real Ray cluster: ranks leave in time, the bits stay."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_jobs import Log, assert_nothing_left, controller_pid, drain, driver_of, state_sha256, wait_for
from ray_nodes import add_node, start_head
from tiny_jobs import tiny

from orchestrator.cli.steering import steer
from orchestrator.client import submit
from orchestrator.cluster import connection
from orchestrator.cluster.draining import draining
from orchestrator.cluster.placement import preferring
from orchestrator.commands.fault import InjectFault
from orchestrator.controller.ranks.drains import drained
from orchestrator.events import types as events
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
from workers.actor import Home
from workers.fault_injection.drill import Drill
from workers.protocol.reports import CheckpointReport, StepReport

TIMES = {"forward_s": 0.005, "input_grad_s": 0.005, "weight_grad_s": 0.005}


class Nodes:
    """A head node without ranks, and nodes with room for one rank each."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.up: list[Any] = []

    def add(self) -> Any:
        self.up.append(add_node(self.cluster, 1))
        return self.up[-1]

    def settle_at(self, count: int) -> None:
        """Provide `count` nodes that nobody drains, because the next job cannot use drained ones."""
        staying = {node.id for node in connection.nodes()}
        good = [node for node in self.up if node.node_id in staying]
        for node in [node for node in self.up if node not in good] + good[count:]:
            if node.any_processes_alive():
                self.cluster.remove_node(node)
        self.up = good[:count]
        while len(self.up) < count:
            self.add()


@pytest.fixture(scope="module")
def there() -> Iterator[Nodes]:
    # A busy machine must not look dead.
    cluster = start_head(0, _system_config={"health_check_failure_threshold": 20})
    try:
        with driver_of(cluster):
            yield Nodes(cluster)
    finally:
        cluster.shutdown()


@pytest.fixture
def nodes(there: Nodes, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """As many nodes as the test needs. Tests that need fewer come first and leave theirs to the others."""
    there.settle_at(request.param)
    yield there
    assert_nothing_left()


def with_nodes(count: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("nodes", [count], indirect=True)


def slow(folder: Path, name: str, steps: int, **sections: dict[str, Any]) -> Spec:
    job = {"steps": steps, "sample_tokens": 0}
    device = {"device": "emulated", "emulated": TIMES, "resources_per_rank": {"CPU": 1.0}}
    return tiny(folder, name, **{"job": job, "cluster": device, **sections})


def quiet_sha256(folder: Path, steps: int) -> str:
    """The state of the same job on one rank, without emulated times and without notices."""
    device = {"device": "emulated", "emulated": dict.fromkeys(TIMES, 0.0)}
    return state_sha256(slow(folder, "quiet", steps, pipeline={"ranks": 1}, cluster=device))


def holder() -> Any:
    """The class of an actor that tells its node. Defined in here, so that its process need not import this module."""

    class Holder:
        def node(self) -> str:
            return ray.get_runtime_context().get_node_id()

    return Holder


@with_nodes(1)
def test_a_node_that_ray_drains_is_seen_with_its_deadline_and_takes_no_ranks_any_more(nodes: Nodes) -> None:
    head = ray.get_runtime_context().get_node_id()
    other = nodes.up[0].node_id
    assert {node.id for node in connection.nodes()} == {head, other}
    # A drained node without actors would be gone at once.
    remote: Any = ray.remote(holder()).options(
        num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(other, soft=False)
    )
    held = remote.remote()
    assert ray.get(held.node.remote()) == other
    assert draining() == {}
    before_s = time.time()
    drain(other, 60.0)
    homes = {0: Home(node=head, host="10.0.0.1", pid=1), 7: Home(node=other, host="10.0.0.2", pid=2)}
    (going,) = drained(draining(), homes, time.time())
    assert (going.node, going.source, set(going.ranks)) == (other, "ray", {7})
    assert going.left_s is not None
    assert 0 < going.left_s <= 60.0 + 1.0
    assert draining()[other] >= int((before_s + 60.0) * 1000)
    assert {node.id for node in connection.nodes()} == {head}
    ray.kill(held)
    wait_for(lambda: draining() == {})


@with_nodes(1)
def test_a_drain_of_the_only_node_pauses_the_job_with_its_state_safe(nodes: Nodes, tmp_path: Path) -> None:
    saved: list[int] = []

    def act(record: events.Record) -> None:
        match record.event:
            case StepReport(step=4):
                drain(nodes.up[0].node_id, 60.0)
            case events.Paused():
                saved.extend(report.step for report in log.of(CheckpointReport) if report.error is None)
                # The machine's state is lost with it.
                (started,) = log.of(events.RankStarted)
                os.kill(started.pid, signal.SIGKILL)
                nodes.add()

    log = Log(act)
    spec = slow(tmp_path, "only", 30, pipeline={"ranks": 1}, elastic={"wait_s": 120.0})
    result = PipelineTrainer(spec, observe=log).fit()
    assert result.error is None
    (paused,) = log.of(events.Paused)
    assert paused.step in saved
    (regrouped,) = log.of(events.Regrouped)
    assert (regrouped.step, regrouped.steps_lost) == (paused.step, 0)
    assert result.metrics is not None
    assert result.metrics["state_sha256"] == quiet_sha256(tmp_path, 30)
    log.assert_processes_gone()


@with_nodes(1)
def test_a_controller_whose_node_goes_comes_up_on_another_one(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster outlives the driver's node, which has no ranks; those train on."""
    drivers = add_node(nodes.cluster, 0)
    monkeypatch.setattr(submit, "preferring", lambda node: preferring(drivers.node_id))
    raylet = drivers.all_processes["raylet"][0].process.pid

    def act(record: events.Record) -> None:
        if isinstance(record.event, StepReport) and record.event.step == 4:
            assert psutil.Process(controller_pid("led")).ppid() == raylet
            nodes.cluster.remove_node(drivers)

    log = Log(act)
    result = PipelineTrainer(slow(tmp_path, "led", 12, pipeline={"ranks": 1}), observe=log).fit()
    assert result.error is None
    assert [(each.epoch, each.takeover) for each in log.of(events.Submitted)] == [(1, False), (2, True)]
    assert [report.step for report in log.of(StepReport)] == list(range(1, 13))
    assert len(log.of(events.Formed)) == len(log.of(events.RankStarted)) == 1
    log.assert_processes_gone()


BY_FILE, BY_RAY = (1, "file"), (0, "ray")
"""A rank that leaves, and what tells it. `test_ray_faults.py` has one leave that is told by a signal."""


@pytest.mark.parametrize(
    ("nodes", "leaving"),
    [(2, (BY_RAY,)), pytest.param(3, (BY_FILE, BY_RAY), marks=pytest.mark.soak)],
    indirect=["nodes"],
)
def test_ranks_that_are_told_leave_one_after_the_other(
    nodes: Nodes, leaving: tuple[tuple[int, str], ...], tmp_path: Path
) -> None:
    """A rank hears of its file on a real cluster in `test_ray_notices.py`."""
    homes: dict[int, events.RankStarted] = {}
    said: list[str] = []

    def drill_a_drain() -> None:
        """Have Ray itself drain the node, as when a person or an autoscaler requests it."""
        node = homes[0].node
        drill = Drill(node=node[:16], deadline_s=30.0).to_json()
        said.append(steer("auto", "going", InjectFault(drill=drill), wait=False))

    tell: dict[str, Callable[[], object]] = {
        "file": lambda: (tmp_path / homes[1].node).touch(),
        "ray": drill_a_drain,
    }
    ways = [tell[source] for _, source in leaving]
    next_at = 4

    def act(record: events.Record) -> None:
        nonlocal next_at
        match record.event:
            case events.RankStarted() as started:
                homes[started.rank] = started
            case events.Regrouped(step=step):
                next_at = step + 4
            case StepReport(step=step) if step == next_at and ways:
                ways.pop(0)()

    log = Log(act)
    elastic = {"notice_file": f"{tmp_path}/{{node}}", "grow": False, "allow_faults": True}
    steps = 60
    spec = slow(tmp_path, "going", steps, pipeline={"ranks": len(leaving) + 1}, elastic=elastic)
    result = PipelineTrainer(spec, observe=log).fit()
    assert result.error is None
    assert ways == []
    assert said[0].startswith(f"drain of node {homes[0].node[:12]}")
    noticed = [(event.source, event.ranks) for event in log.of(events.Noticed)]
    assert noticed == [(source, (rank,)) for rank, source in leaving]
    regrouped = log.of(events.Regrouped)
    assert [(event.cause, event.lost) for event in regrouped] == [("drain", (rank,)) for rank, _ in leaving]
    assert all(event.rerun == event.steps_lost == 0 for event in regrouped)
    # The drained node disappears once nothing is left on it.
    wait_for(lambda: homes[0].node not in {node.id for node in connection.nodes()} and draining() == {})
    assert log.of(events.RankFailed) == []
    assert [report.step for report in log.of(StepReport)] == list(range(1, steps + 1))
    assert result.metrics is not None
    assert result.metrics["state_sha256"] == quiet_sha256(tmp_path, steps)
    log.assert_processes_gone()
