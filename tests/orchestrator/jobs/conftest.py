"""One Ray cluster of two nodes in two zones for all modules that leave it unchanged; each test process starts it
once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster
from ray_jobs import assert_nothing_left, driver_of
from ray_nodes import add_node, start_head

from workers.actor import ZONE_LABEL


@pytest.fixture(scope="session")
def shared_nodes() -> Iterator[Cluster]:
    nodes = start_head(2, labels={ZONE_LABEL: "east"})
    try:
        add_node(nodes, 2, labels={ZONE_LABEL: "west"})
        yield nodes
    finally:
        nodes.shutdown()


@pytest.fixture(scope="module")
def two_nodes(shared_nodes: Cluster) -> Iterator[None]:
    """Make this process a driver of the shared cluster."""
    with driver_of(shared_nodes):
        yield
        assert_nothing_left()
