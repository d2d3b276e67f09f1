"""Nodes that are told to go under a job on a real Ray cluster: their ranks leave in time, and the bits stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray_jobs import Log, assert_nothing_left, drain, driver_of, started, state_sha256, wait_for
from tiny_jobs import tiny

from orchestrator.cluster.connection import nodes
from orchestrator.cluster.draining import draining
from orchestrator.events import types as events
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
from workers.protocol import CheckpointReport, StepReport

TIMES = {"forward_s": 0.005, "input_grad_s": 0.005, "weight_grad_s": 0.005}


@dataclass
class Nodes:
    """A head that takes no ranks, and nodes that hold one each."""

    cluster: Cluster
    added: list[Any] = field(default_factory=list)

    def add(self) -> None:
        self.added.append(started(lambda: self.cluster.add_node(num_cpus=1, object_store_memory=2**27)))


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    arguments = {
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": 2**27,
        # A busy machine is not to pass for a dead one.
        "_system_config": {"health_check_failure_threshold": 20},
    }
    nodes = started(lambda: Cluster(initialize_head=True, head_node_args=arguments))
    with driver_of(nodes):
        yield nodes
    nodes.shutdown()


@contextmanager
def nodes_for(head: Cluster, ranks: int) -> Iterator[Nodes]:
    """Nodes for one job: those that were drained are of no use to the next one."""
    there = Nodes(head)
    for _ in range(ranks):
        there.add()
    yield there
    assert_nothing_left()
    for node in there.added:
        if node.any_processes_alive():
            head.remove_node(node)


@pytest.fixture
def one_node(head: Cluster) -> Iterator[Nodes]:
    with nodes_for(head, 1) as there:
        yield there


@pytest.fixture
def two_nodes(head: Cluster) -> Iterator[Nodes]:
    with nodes_for(head, 2) as there:
        yield there


@pytest.fixture
def four_nodes(head: Cluster) -> Iterator[Nodes]:
    with nodes_for(head, 4) as there:
        yield there


def slow(folder: Path, name: str, steps: int, **sections: dict[str, Any]) -> Spec:
    job = {"steps": steps, "sample_tokens": 0}
    device = {"device": "emulated", "emulated": TIMES, "resources_per_rank": {"CPU": 1.0}}
    return tiny(folder, name, **{"job": job, "cluster": device, **sections})


def quiet_sha256(folder: Path, steps: int) -> str:
    """Of the same job with one rank, nothing emulated taking any time, and nobody told to go."""
    device = {"device": "emulated", "emulated": dict.fromkeys(TIMES, 0.0)}
    return state_sha256(slow(folder, "quiet", steps, pipeline={"ranks": 1}, cluster=device))


@pytest.mark.usefixtures("four_nodes")
def test_told_by_a_file_a_signal_and_ray_ranks_leave_one_after_the_other(tmp_path: Path) -> None:
    homes: dict[int, events.RankStarted] = {}
    ways: list[Callable[[], None]] = [
        lambda: (tmp_path / homes[1].node).touch(),
        lambda: os.kill(homes[3].pid, signal.SIGTERM),
        lambda: drain(homes[0].node, 30.0),
    ]
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
    spec = slow(tmp_path, "going", 60, elastic={"notice_file": f"{tmp_path}/{{node}}", "grow": False})
    result = PipelineTrainer(spec, observe=log).fit()
    assert result.error is None
    assert ways == []
    noticed = [(event.source, event.ranks) for event in log.of(events.Noticed)]
    assert noticed == [("file", (1,)), ("sigterm", (3,)), ("ray", (0,))]
    regrouped = log.of(events.Regrouped)
    assert [(event.cause, event.lost) for event in regrouped] == [
        ("drain", (1,)), ("drain", (3,)), ("drain", (0,)),
    ]  # fmt: skip
    assert all(event.rerun == event.steps_lost == 0 for event in regrouped)
    # With nothing left on it, the drained node goes.
    wait_for(lambda: homes[0].node not in {node.id for node in nodes()} and draining() == {})
    assert log.of(events.RankFailed) == []
    assert [report.step for report in log.of(StepReport)] == list(range(1, 61))
    assert result.metrics is not None
    assert result.metrics["state_sha256"] == quiet_sha256(tmp_path, 60)
    log.assert_processes_gone()


def test_drained_below_min_ranks_a_job_pauses_and_goes_on_when_a_node_joins(
    two_nodes: Nodes, tmp_path: Path
) -> None:
    homes: dict[int, events.RankStarted] = {}

    def act(record: events.Record) -> None:
        match record.event:
            case events.RankStarted() as started:
                homes[started.rank] = started
            case StepReport(step=4):
                drain(homes[1].node, None)
            case events.Paused():
                two_nodes.add()

    log = Log(act)
    spec = slow(tmp_path, "pausing", 30, pipeline={"ranks": 2}, elastic={"min_ranks": 2, "wait_s": 120.0})
    result = PipelineTrainer(spec, observe=log).fit()
    assert result.error is None
    (paused,) = log.of(events.Paused)
    assert "1 rank left, and elastic.min_ranks = 2" in paused.reason
    (regrouped,) = log.of(events.Regrouped)
    assert (regrouped.lost, regrouped.joined, regrouped.rerun, regrouped.steps_lost) == ((1,), (2,), 0, 0)
    assert homes[2].node == two_nodes.added[2].node_id
    assert [report.step for report in log.of(StepReport)] == list(range(1, 31))
    assert result.metrics is not None
    assert result.metrics["state_sha256"] == quiet_sha256(tmp_path, 30)
    log.assert_processes_gone()


def test_a_drain_of_the_only_node_pauses_the_job_with_its_state_safe(one_node: Nodes, tmp_path: Path) -> None:
    saved: list[int] = []

    def act(record: events.Record) -> None:
        match record.event:
            case StepReport(step=4):
                drain(one_node.added[0].node_id, 60.0)
            case events.Paused():
                saved.extend(report.step for report in log.of(CheckpointReport) if report.error is None)
                # What its machine held goes with it.
                (started,) = log.of(events.RankStarted)
                os.kill(started.pid, signal.SIGKILL)
                one_node.add()

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
