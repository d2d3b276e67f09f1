"""Placement: spread, room, and the message when there is no room."""

from __future__ import annotations

import pytest

from orchestrator.cluster.placement import Node, assign, congestion, shortage


def node(name: str, total: dict[str, float], available: dict[str, float] | None = None) -> Node:
    return Node(
        id=name, host=f"host-{name}", total=total, available=total if available is None else available
    )


def test_ranks_are_spread_evenly_and_neighbours_stay_together() -> None:
    nodes = [node("a", {"CPU": 8}), node("b", {"CPU": 8})]
    assert assign(nodes, 5, {"CPU": 1}) == ("a", "a", "a", "b", "b")


def test_a_busy_node_gets_what_it_has_room_for() -> None:
    nodes = [node("a", {"CPU": 8}, {"CPU": 1.5}), node("b", {"CPU": 8}), node("c", {"GPU": 4})]
    assert assign(nodes, 4, {"CPU": 1}) == ("a", "b", "b", "b")


def test_ranks_without_room_are_left_to_the_cluster() -> None:
    assert assign([node("a", {"CPU": 2})], 3, {"CPU": 1}) == ("a", "a", None)
    assert assign([], 2, {"CPU": 1}) == (None, None)


def test_fractions_add_up() -> None:
    assert assign([node("a", {"CPU": 1})], 10, {"CPU": 0.1}) == ("a",) * 10


def test_every_resource_counts() -> None:
    nodes = [node("a", {"CPU": 8, "GPU": 1}), node("b", {"CPU": 1, "GPU": 8})]
    assert assign(nodes, 3, {"CPU": 1, "GPU": 1}) == ("a", "b", None)


@pytest.mark.parametrize(
    ("nodes", "ranks", "per_rank", "expected"),
    [
        ([node("a", {"CPU": 4})], 4, {"CPU": 1}, None),
        ([node("a", {"CPU": 1})], 10, {"CPU": 0.1}, None),
        (
            [node("a", {"CPU": 2}), node("b", {"CPU": 1})],
            4,
            {"CPU": 1},
            "the cluster lacks 1 CPU (4 needed, 3 there) for 4 ranks of 1 CPU each",
        ),
        (
            [node("a", {"CPU": 2})],
            2,
            {"CPU": 2, "GPU": 1},
            "the cluster lacks 2 CPU (4 needed, 2 there) and 2 GPU (2 needed, 0 there)"
            " for 2 ranks of 2 CPU and 1 GPU each",
        ),
        (
            [node("a", {"CPU": 3}), node("b", {"CPU": 3})],
            3,
            {"CPU": 2},
            "the cluster's nodes have room for 2 of 3 ranks of 2 CPU each:"
            " a rank needs all of its resources on one node",
        ),
    ],
)
def test_a_shortage_is_told_in_numbers(
    nodes: list[Node], ranks: int, per_rank: dict[str, float], expected: str | None
) -> None:
    assert shortage(nodes, ranks, per_rank) == expected


def test_a_busy_cluster_is_told_apart_from_a_small_one() -> None:
    nodes = [node("a", {"CPU": 4}, {"CPU": 1})]
    assert shortage(nodes, 4, {"CPU": 1}) is None
    assert congestion(nodes, 4, {"CPU": 1}) == (
        "the cluster has room for 1 of 4 ranks of 1 CPU each now: others hold 3 CPU"
    )
