"""Links that are slower than the profile has them, and a cluster with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.profile import Cluster


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A link from one rank, or place, to another."""

    source: int
    target: int
    latency_s: float
    """From the end of a transfer to the arrival."""
    bytes_per_s: float


def with_slow_links(cluster: Cluster, slow: Sequence[SlowLink]) -> Cluster:
    """`cluster` with links that are as slow as `slow` says, by place; no link becomes faster. Places that it does not
    have are left out."""
    ranks = len(cluster.devices)
    known = {(one.source, one.target): one for one in slow if max(one.source, one.target) < ranks}
    if not known:
        return cluster
    links = [list(row) for row in cluster.links]
    for (source, target), one in known.items():
        link = cluster.link(source, target)
        links[source][target] = replace(
            link,
            latency_s=max(link.latency_s, one.latency_s),
            bytes_per_s=min(link.bytes_per_s, one.bytes_per_s),
        )
    return replace(cluster, links=tuple(map(tuple, links)))
