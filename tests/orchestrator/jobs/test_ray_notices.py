"""Word that a node is to go, on a real Ray cluster: what a rank's process hears itself, and Ray's own drains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_jobs import drain, job_of, two_node_cluster, wait_for
from tiny_jobs import tiny

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.draining import draining
from orchestrator.controller.drains import drained
from workers.actor import CONTROL, Home, RankActor
from workers.protocol import NoticeReport, Report, WarningReport


class Listener:
    """Takes a rank's reports in place of a controller."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def report(self, report: Report) -> None:
        self._reports.append(report)

    def reports(self) -> list[Report]:
        return self._reports


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    with two_node_cluster():
        yield


@pytest.mark.usefixtures("two_nodes")
def test_a_rank_hears_a_signal_and_the_file_of_its_node_and_goes_on(tmp_path: Path) -> None:
    spec = tiny(tmp_path, "heard", elastic={"notice_file": f"{tmp_path}/{{node}}"})
    listener: Any = ray.remote(Listener).remote()
    remote: Any = ray.remote(concurrency_groups={CONTROL: 2})(RankActor)  # pyright: ignore[reportCallIssue]
    rank = remote.remote(job_of(spec).config, 3, listener, None)
    home: Home = ray.get(rank.setup.remote())  # pyright: ignore[reportAssignmentType]

    def heard(count: int) -> list[Report]:
        wait_for(lambda: len(ray.get(listener.reports.remote())) >= count)
        return ray.get(listener.reports.remote())

    file = tmp_path / home.node
    file.mkdir()
    trouble = f"file does not say whether the node is to go: {file} cannot be read: Is a directory"
    assert heard(1) == [WarningReport(rank=3, text=trouble)]
    file.rmdir()
    written = tmp_path / "written"
    written.write_text("25")
    written.rename(file)
    heard(2)
    os.kill(home.pid, signal.SIGTERM)
    assert heard(3)[1:] == [
        NoticeReport(
            rank=3, source="file", left_s=25.0, text=f"{file} is there and says '25'", node=home.node
        ),
        NoticeReport(rank=3, source="sigterm", left_s=None, text="the process got SIGTERM", node=home.node),
    ]
    assert ray.get(rank.leave.remote()) is None
    assert "thread MainThread:" in ray.get(rank.stacks.remote())
    # The next one ends the process, as Ray has it.
    os.kill(home.pid, signal.SIGTERM)
    wait_for(lambda: not psutil.pid_exists(home.pid))


@pytest.mark.usefixtures("two_nodes")
def test_a_node_that_ray_drains_is_told_with_its_deadline_and_takes_no_ranks_any_more() -> None:
    both = {node.id for node in cluster.nodes()}
    head = ray.get_runtime_context().get_node_id()
    (other,) = both - {head}
    holder: Any = ray.remote(Listener).options(
        num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(other, soft=False)
    ).remote()  # fmt: skip
    # A node with nothing on it would be gone at once.
    ray.get(holder.reports.remote())
    assert draining() == {}
    before_s = time.time()
    drain(other, 60.0)
    homes = {0: Home(node=head, host="10.0.0.1", pid=1), 7: Home(node=other, host="10.0.0.2", pid=2)}
    (going,) = drained(draining(), homes, time.time())
    assert (going.node, going.source, set(going.ranks)) == (other, "ray", {7})
    assert going.left_s is not None
    assert 0 < going.left_s <= 60.0 + 1.0
    assert draining()[other] >= int((before_s + 60.0) * 1000)
    assert {node.id for node in cluster.nodes()} == {head}
    ray.kill(holder)
    wait_for(lambda: draining() == {})
