"""What all tests share: Ray's environment, how examples are drawn, and which tests take turns."""

import os

import pytest
from hypothesis import HealthCheck, settings

from orchestrator.cluster.connection import prepare_local

# Threads of one test would wait for each other in busy loops, on cores that the next test needs. The engine's ranks
# have one thread each in any case.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray reads its environment when it is first imported, by whichever test that is: it is set before any of them.
prepare_local(os.environ)  # pyright: ignore[reportArgumentType]

# The same examples every time, however slow the machine: a failure is one of the code.
settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")

STARTS_A_CLUSTER = ("test_ray_", "test_cli_train", "test_local_nodes")
"""Of files whose tests start Ray clusters."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one of the processes that share the tests take all tests of a file that start Ray clusters: they share one,
    which has an address of its own."""
    for item in items:
        if item.path.name.startswith(STARTS_A_CLUSTER):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))
