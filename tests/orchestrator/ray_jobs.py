"""What the tests of jobs on a Ray cluster share."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import ray
from pace import patient
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.job_config import JobConfig
from ray.util.placement_group import placement_group_table
from resolving import resolve_spec

from benchmarks.parts.rank_threads import run_threads
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.cluster import connection as cluster
from orchestrator.cluster.actor_names import NAMESPACE
from orchestrator.events import types as events
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import Spec
from workers.launch.ranks import LaunchedJob

Kind = TypeVar("Kind")


def controller_pid(job: str) -> int:
    """The process id of the job's controller."""
    pid = BlockingJobClient().view(job).pid
    assert pid is not None
    return pid


def kill_controller(job: str) -> None:
    """Kill the process of the job's controller; Ray starts another one."""
    os.kill(controller_pid(job), signal.SIGKILL)


@contextmanager
def driver_of(nodes: Cluster) -> Iterator[None]:
    """Make this process a driver of `nodes`."""
    here = os.path.dirname(__file__)
    try:
        ray.init(
            nodes.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            job_config=JobConfig(_py_driver_sys_path=[here, os.path.dirname(here), *cluster.import_paths()]),
        )
        yield
    finally:
        ray.shutdown()


def drain(node: str, left_s: float | None) -> None:
    """Have Ray drain a node, as `ray drain-node` does; None means no deadline."""
    deadline_ms = 0 if left_s is None else round((time.time() + left_s) * 1e3)
    gcs: Any = GcsClient(address=ray.get_runtime_context().gcs_address)
    reasons: Any = autoscaler_pb2.DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]
    reason = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = gcs.drain_node(node, reason, "a test", deadline_ms)
    assert accepted, why


def wait_for(true: Callable[[], bool]) -> None:
    """Wait until `true` holds."""
    deadline = time.monotonic() + patient(120)
    while not true():
        assert time.monotonic() < deadline, "it did not happen within two minutes"
        time.sleep(0.1)


def assert_nothing_left() -> None:
    """Check that no actor and no reservation is left; Ray takes a moment to notice a death."""
    wait_for(lambda: not unfinished())
    assert unfinished() == []


def unfinished() -> list[str]:
    """Names of actors and of reservations."""
    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    groups = placement_group_table().values()
    return [
        *(actor["name"] for actor in actors),
        *(entry["name"] for entry in groups if entry["state"] != "REMOVED"),
    ]


class Log:
    """An observer that remembers, and acts on what it sees."""

    def __init__(self, act: Callable[[events.Record], None] = lambda record: None) -> None:
        self.events: list[events.Event] = []
        self._act = act

    def __call__(self, record: events.Record) -> None:
        self.events.append(record.event)
        self._act(record)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type) -> None:
        deadline = time.monotonic() + patient(180)
        while not self.of(kind):
            assert time.monotonic() < deadline, f"no {kind.__name__} within three minutes"
            time.sleep(0.05)

    def assert_processes_gone(self) -> None:
        ranks = [started.pid for started in self.of(events.RankStarted)]
        assert ranks
        pids = [*ranks, *(started.pid for started in self.of(events.PlannerStarted))]
        deadline = time.monotonic() + patient(30)
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() < deadline, "a process of the job is still there"
            time.sleep(0.05)


def state_sha256(spec: Spec) -> str:
    """The state of the same job with its ranks as threads of this process. Modelled times change no bits and
    are left out."""
    quick = {"forward_s": 0.0, "input_grad_s": 0.0, "weight_grad_s": 0.0}
    emulated = spec.cluster.emulated.model_copy(update=quick)
    return run_threads(
        job_of(spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"emulated": emulated})}))
    ).state_sha256


def resolved(spec: Spec) -> Settled:
    spec = absolute(spec)
    return resolve_spec(spec, outline_model(spec), {}, epoch=1)


def job_of(spec: Spec) -> LaunchedJob:
    done = resolved(spec)
    return LaunchedJob(done.config, done.plan, done.schedule)
