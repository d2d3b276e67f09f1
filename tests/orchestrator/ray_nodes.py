"""Ray clusters of tests, and their nodes. Imports none of the packages of jobs, which take seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ray.cluster_utils import Cluster

from orchestrator.cluster.ports import agents_announced

Made = TypeVar("Made")


def started(start: Callable[[], Made]) -> Made:
    """What `start` starts. A busy machine may take longer than Ray waits, so a start is tried again."""
    with agents_announced():
        for _ in range(2):
            with suppress(Exception):
                return start()
        return start()


NODE = {"object_store_memory": 2**27, "include_log_monitor": False}
"""Options of every node. A log monitor would take a second to start and show output that no test reads."""


HEAD: dict[str, Any] = {
    "include_dashboard": False,
    "no_monitor": True,
    "_system_config": {"enable_metrics_collection": False},
}
"""Options of the first node. Ray's autoscaler and its own metrics would take processor time that no test needs."""


def start_head(cpus: int, **options: Any) -> Cluster:
    """A cluster with one node, which has room for `cpus` ranks."""
    head = {**NODE, **HEAD, "num_cpus": cpus, **options}
    return started(lambda: Cluster(initialize_head=True, head_node_args=head))


def add_node(cluster: Cluster, cpus: int, **options: Any) -> Any:
    return started(lambda: cluster.add_node(**NODE, num_cpus=cpus, **options))
