"""What states that travel take of computing: measured beside real streams, and how much of a state it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from planner.profile import Link
from workers.profiling import stream_probe
from workers.profiling.stream_probe import LEAST_BYTES, LONGEST_S, MOST_BYTES, ROUNDS, probe_streams
from workers.state.layer_state import LayerState, bytes_of
from workers.state_stream.fetching import fetch
from workers.transport.local import Hub, LocalChannel

FAST = Link(latency_s=1e-5, bytes_per_s=1e10)
RANKS = 3


def probed(compute: Callable[[], None], link: Link = FAST) -> list[float | None]:
    """What each of three ranks finds, which are threads."""
    hub = Hub(RANKS)
    links = [[None if a == b else link for b in range(RANKS)] for a in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        return [
            *threads.map(
                lambda rank: probe_streams(LocalChannel(hub, rank), "127.0.0.1", links, compute, 0.0),
                range(RANKS),
            )
        ]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[LayerState]:
    """The states that ranks get."""
    came: list[LayerState] = []

    def get(*args: Any, **kwargs: Any) -> LayerState:
        came.append(fetch(*args, **kwargs))
        return came[-1]

    monkeypatch.setattr(stream_probe, "fetch", get)
    return came


def test_each_rank_gets_the_next_ones_state(fetched: list[LayerState]) -> None:
    before = threading.active_count()
    assert all(one is not None and 0 <= one < 1e-6 for one in probed(lambda: time.sleep(0.001)))
    assert sorted(state.layer for state in fetched) == sorted([*range(RANKS)] * ROUNDS)
    assert {bytes_of(state) for state in fetched} == {LEAST_BYTES}
    assert threading.active_count() == before


def test_what_passes_take_longer_is_shared_out_over_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each state takes 40 ms, in which passes of 5 ms take twice as long: they lose 20 ms or a pass less."""
    under_way = threading.Event()

    def get(*_: Any, **__: Any) -> None:
        under_way.set()
        time.sleep(0.04)
        under_way.clear()

    monkeypatch.setattr(stream_probe, "fetch", get)
    for found in probed(lambda: time.sleep(0.01 if under_way.is_set() else 0.005)):
        assert found is not None
        assert found == pytest.approx(0.02 / (2 * LEAST_BYTES), rel=0.6)


def test_where_states_do_not_arrive_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stream_probe, "fetch", lambda *given, **kept: fetch("127.0.0.1", 1, *given[2:], **kept)
    )
    assert probed(lambda: time.sleep(0.001)) == [None] * RANKS


@pytest.mark.parametrize(
    ("pass_s", "link", "expected"),
    [
        (0.001, FAST, LEAST_BYTES),
        (0.1, FAST, 10_000_000),
        (10.0, FAST, MOST_BYTES),
        (10.0, Link(latency_s=0.0, bytes_per_s=1e6), LONGEST_S * 1e6),
        (0.1, None, 10_000_000),
    ],
)
def test_a_state_takes_as_long_as_a_pass_and_is_not_long_on_its_way(
    pass_s: float, link: Link | None, expected: float
) -> None:
    assert stream_probe._state_bytes(pass_s, link) == pytest.approx(expected, abs=4)
