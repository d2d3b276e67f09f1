"""What all tests share: Ray's environment, how examples are drawn, and which tests share a process."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings
from pace import patient

from orchestrator.cluster.connection import prepare_local

# Threads of one test would spin while they wait for each other, on cores that the next test needs. The
# engine's ranks have one thread each in any case.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules and tests are hundreds of thousands of objects that all stay: no collection searches them, neither while they
# are made nor in the tests, where a full one would take half a second. Tests that make plans and graphs make Python's
# 700 new objects until the next collection in no time.
gc.disable()
gc.set_threshold(20_000, 10, 10)

# Ray reads its environment when a test first imports it, so the environment is set before any test.
prepare_local(os.environ)  # pyright: ignore[reportArgumentType]

# Examples are the same every time, however slow the machine, so a failure comes from the code.
settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")

STARTS_A_CLUSTER = ("test_ray_", "test_cli_train", "test_local_nodes")
"""How the names of files begin whose tests start Ray clusters."""

SHARING = (
    (
        "test_ray_recovery",
        "test_ray_faults",
        "test_ray_live_planner",
        "test_ray_notices",
        "test_ray_planning",
        "test_ray_planner",
    ),
    ("test_ray_jobs", "test_ray_following", "test_ray_moves"),
)
"""Files whose tests leave the cluster of two nodes unchanged, by the process that runs them: about as long each. Every
process that starts a cluster takes as much processor time for that as two short jobs."""
EACH_CHOICE = "each_choice"
"""The mark of tests whose parameters are a product."""
MADE_ONCE = {"quiet", "window", "page", "prometheus", "forest", "fitted"}
"""Fixtures of modules that take seconds: another process would make another one."""
GROUP = {stem: f"two nodes {number}" for number, stems in enumerate(SHARING) for stem in stems}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests of a file that starts Ray clusters to one test process: they share a cluster, which has its own
    address. And all that share something else that takes long to make. Limits follow the machine's pace."""
    for item in beyond_each_choice(items):
        item.add_marker(pytest.mark.soak)
    for item in items:
        if item.path.name.startswith(STARTS_A_CLUSTER):
            item.add_marker(pytest.mark.xdist_group(GROUP.get(item.path.stem, item.path.stem)))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))
        elif MADE_ONCE & {*getattr(item, "fixturenames", ())} and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.config.getoption("timeout") is not None:
            continue
        limit = item.get_closest_marker("timeout")
        limit_s = float(limit.args[0] if limit is not None else item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patient(limit_s)), append=False)


def beyond_each_choice(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of tests marked `each_choice` all of whose values earlier cases have: those are soaks.

    Each-choice coverage (Ammann and Offutt, "Introduction to Software Testing", section 6.2): each value of each
    parameter is in one case at least. The case of the most new values comes first, then the earlier one.
    """
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(EACH_CHOICE) is not None and not item.get_closest_marker("soak"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for cases in products.values() for item in _repeating(cases)]


def _parameters(case: pytest.Item) -> list[tuple[str, object]]:
    return list(getattr(case, "callspec").params.items())  # noqa: B009 - pytest's type of items does not tell of it


def _repeating(cases: list[pytest.Item]) -> list[pytest.Item]:
    choices = {case: {(name, str(value)) for name, value in _parameters(case)} for case in cases}
    seen: set[tuple[str, str]] = set()
    left = list(cases)
    while left:
        most = max(left, key=lambda case: len(choices[case] - seen))
        if not choices[most] - seen:
            break
        seen |= choices[most]
        left.remove(most)
    return left


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
