"""Assigns ranks to nodes, and says why the cluster cannot take a job. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.wording import counted

Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A live node of the cluster."""

    id: str
    host: str
    total: Resources
    available: Resources


def assign(nodes: Sequence[Node], ranks: int, per_rank: Resources) -> tuple[str | None, ...]:
    """Return per rank the id of the node to put it on; None if the cluster has no room now.

    The ranks are spread over as many nodes as have room, as evenly as possible; neighbours in rank order
    share a node, so that few edges of the pipeline cross the network.
    """
    room = {node.id: fits(node.available, per_rank) for node in nodes}
    given = dict.fromkeys(room, 0)
    for _ in range(ranks):
        open_nodes = [node for node in room if given[node] < room[node]]
        if not open_nodes:
            break
        given[min(open_nodes, key=lambda node: given[node])] += 1
    placed = [node for node, count in given.items() for _ in range(count)]
    return (*placed, *[None] * (ranks - len(placed)))


def capacity(nodes: Sequence[Node], per_rank: Resources) -> int:
    """Return how many ranks of `per_rank` each the cluster would hold if it were idle."""
    return sum(fits(node.total, per_rank) for node in nodes)


def shortage(nodes: Sequence[Node], ranks: int, per_rank: Resources) -> str | None:
    """Return why `ranks` ranks of `per_rank` each would not fit into the idle cluster; None if they would."""
    missing = []
    for name, each in per_rank.items():
        needed, there = each * ranks, sum(node.total.get(name, 0.0) for node in nodes)
        if there < needed * (1 - 1e-9):
            missing.append(
                f"{_number(needed - there)} {name} ({_number(needed)} needed, {_number(there)} there)"
            )
    needs = f"{counted(ranks, 'rank')} of {_listed(per_rank)} each"
    if missing:
        return f"the cluster lacks {' and '.join(missing)} for {needs}"
    room = capacity(nodes, per_rank)
    if room < ranks:
        return f"the cluster's nodes have room for {room} of {needs}: a rank needs all of its resources on one node"
    return None


def congestion(nodes: Sequence[Node], ranks: int, per_rank: Resources) -> str:
    """Describe what others hold in a cluster that is large enough but busy."""
    room = sum(fits(node.available, per_rank) for node in nodes)
    held = {
        name: sum(node.total.get(name, 0.0) - node.available.get(name, 0.0) for node in nodes)
        for name in per_rank
    }
    return (
        f"the cluster has room for {room} of {counted(ranks, 'rank')} of {_listed(per_rank)} each now:"
        f" others hold {_listed(held)}"
    )


def fits(resources: Resources, per_rank: Resources) -> int:
    """Return how many ranks fit."""
    return min(math.floor(resources.get(name, 0.0) / each + 1e-9) for name, each in per_rank.items())


def preferring(node: str) -> dict[str, Any]:
    """Return Ray's options for an actor that runs on `node` while that lives, and anywhere else afterwards.

    Soft node affinity does not: Ray 2.60 places about half of such actors elsewhere although the node is there.
    """
    return {"label_selector": {"ray.io/node-id": node}, "fallback_strategy": [{"label_selector": {}}]}


def _listed(resources: Resources) -> str:
    return " and ".join(f"{_number(amount)} {name}" for name, amount in resources.items())


def _number(amount: float) -> str:
    return f"{amount:.4g}"
