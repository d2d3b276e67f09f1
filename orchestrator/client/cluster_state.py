"""The nodes of the connected cluster: what they have, what is free, which are leaving. Blocks briefly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.cluster.draining import draining


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
