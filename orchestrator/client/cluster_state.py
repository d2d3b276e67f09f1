"""The connected cluster's nodes: what they have, what is free, which are leaving; and the clusters of this machine.

Blocks briefly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.cluster.draining import draining
from orchestrator.cluster.here import clusters_here, end_cluster
from planner.wording import counted


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A node."""

    id: str
    host: str
    """Its address."""
    head: bool
    alive: bool
    total: Mapping[str, float]
    """Resource -> amount; memory in bytes."""
    available: Mapping[str, float]
    draining: bool
    deadline_s: float | None
    """When it will be gone, in seconds since the Unix epoch; None if unknown, or if it stays."""


def cluster_nodes() -> tuple[NodeState, ...]:
    """The cluster's nodes, those that died too."""
    import ray
    from ray._private.state import available_resources_per_node

    going = draining()
    available: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return tuple(
        NodeState(
            id=node["NodeID"],
            host=node["NodeManagerAddress"],
            head="node:__internal_head__" in node["Resources"],
            alive=node["Alive"],
            total=_plain(node["Resources"]),
            available=_plain(available.get(node["NodeID"], {})),
            draining=node["NodeID"] in going,
            deadline_s=(going.get(node["NodeID"]) or 0) / 1e3 or None,
        )
        for node in ray.nodes()
    )


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """`resources` without those that only mark a node or stand for a part of it that is reserved."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith("node:") and "_group_" not in name
    }


def own_address(address: str) -> str:
    """`address`; in place of `auto`, that of the cluster that this process is a driver of: another process may find
    another cluster on this machine."""
    import ray

    if address != "auto" or not ray.is_initialized():
        return address
    return ray.get_runtime_context().gcs_address


def clusters_of_this_machine() -> tuple[str, ...]:
    """The Ray clusters with nodes on this machine, in words: address, when they started, what keeps them."""
    return tuple(cluster.text for cluster in clusters_here())


def end_of_cluster(address: str) -> str:
    """End one cluster's processes on this machine, and say how many there were.

    Raises:
        JobError: there are none, or some belong to another user.
    """
    count = counted(end_cluster(address), "process", "processes")
    return f"the Ray cluster at {address} has ended on this machine: {count}"
