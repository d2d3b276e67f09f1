"""What all tests share: Ray's environment, and which tests take turns."""

import os

import pytest

from orchestrator.cluster import prepare_local

# Ray reads its environment when it is first imported, by whichever test that is: it is set before any of them.
prepare_local(os.environ)  # pyright: ignore[reportArgumentType]

STARTS_A_CLUSTER = ("test_ray_", "test_cli_train", "test_local_nodes")
"""Of files whose tests start Ray clusters."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one of the processes that share the tests take all that start a Ray cluster, one after another."""
    for item in items:
        if item.path.name.startswith(STARTS_A_CLUSTER):
            item.add_marker(pytest.mark.xdist_group("ray"))
