"""What states that travel take of computing: measured beside real streams, how much of a state, and from whom."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pace import patient

from benchmarks.parts.rank_threads import Hub, LocalChannel
from planner.profile import Link
from workers.profiling import stream_probe
from workers.profiling.stream_probe import (
    LEAST_STATE_BYTES,
    LONGEST_PASS_S,
    LONGEST_S,
    MOST_STATE_BYTES,
    ROUNDS,
    SLOWEST_STATE_BYTES,
    Traffic,
    probe_streams,
    shift,
    state_bytes,
)
from workers.state.layer_state import LayerState, bytes_of
from workers.state_stream.fetching import fetch

FAST = Link(latency_s=1e-5, bytes_per_s=1e10)
RANKS = 3


def probed(compute: Callable[[], None], link: Link = FAST) -> list[Traffic | None]:
    """What each of three ranks finds, which are threads."""
    hub = Hub(RANKS)
    links = [[None if a == b else link for b in range(RANKS)] for a in range(RANKS)]

    def probe(rank: int) -> Traffic | None:
        return probe_streams(LocalChannel(hub, rank), "127.0.0.1", "here", links, compute, 0.0)

    with ThreadPoolExecutor(RANKS) as threads:
        return [*threads.map(probe, range(RANKS))]


def test_each_rank_gets_another_ones_state_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[LayerState] = []

    def get(*args: Any, **kwargs: Any) -> LayerState:
        came.append(fetch(*args, **kwargs))
        return came[-1]

    monkeypatch.setattr(stream_probe, "fetch", get)
    for found in probed(lambda: time.sleep(0.001)):
        assert found is not None
        assert 0 <= found.socket_s_per_byte <= found.stream_s_per_byte < 1e-6
    assert sorted(state.layer for state in came) == sorted([*range(RANKS)] * ROUNDS)
    assert {bytes_of(state) for state in came} == {LEAST_STATE_BYTES}
    deadline = time.monotonic() + patient(10)
    while left := [one.name for one in threading.enumerate() if one.name.startswith(("state-", "stream-"))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_what_passes_take_longer_is_shared_out_over_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes 1 s, and 3 s beside a state, which is there after two of them."""
    clock = threading.local()

    class Arriving(stream_probe._Fetching):
        def start(self) -> None:
            clock.passes = 0

        def is_alive(self) -> bool:
            return clock.passes < 2

    def compute() -> None:
        beside = getattr(clock, "passes", 2) < 2
        clock.passes = getattr(clock, "passes", 2) + 1
        clock.now_s = getattr(clock, "now_s", 0.0) + (3.0 if beside else 1.0)

    monkeypatch.setattr(stream_probe, "_Fetching", Arriving)
    monkeypatch.setattr(stream_probe.time, "perf_counter", lambda: getattr(clock, "now_s", 0.0))
    monkeypatch.setattr(stream_probe, "_digest_s_per_byte", lambda _: 1e-9)
    expected = 4.0 / (2 * MOST_STATE_BYTES)
    assert probed(compute) == [Traffic(expected, expected - 1e-9)] * RANKS


@pytest.mark.parametrize("lacking", [{0, 1, 2}, {1}])
def test_where_states_do_not_arrive_nothing_is_known_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: set[int]
) -> None:
    def get(host: str, port: int, secret: bytes, owner: int, step: int, **rest: Any) -> LayerState:
        return fetch(host, 1 if owner in lacking else port, secret, owner, step, **rest)

    monkeypatch.setattr(stream_probe, "fetch", get)
    with caplog.at_level(logging.WARNING):
        assert probed(lambda: time.sleep(0.001)) == [None] * RANKS
    assert len(caplog.messages) == len(lacking), "none tries again"
    assert all("cannot connect" in text for text in caplog.messages)


def test_a_link_that_is_too_slow_is_left_out() -> None:
    assert probed(lambda: None, Link(latency_s=0.0, bytes_per_s=1e5)) == [None] * RANKS


@pytest.mark.parametrize(
    ("pass_s", "link", "expected"),
    [
        (0.001, FAST, LEAST_STATE_BYTES),
        (0.1, FAST, 10_000_000),
        (LONGEST_PASS_S, FAST, MOST_STATE_BYTES),
        (1.01 * LONGEST_PASS_S, FAST, 0),
        (1.0, Link(latency_s=0.0, bytes_per_s=2e6), LONGEST_S * 2e6),
        (1.0, Link(latency_s=0.0, bytes_per_s=0.99 * SLOWEST_STATE_BYTES), 0),
        (0.1, None, 10_000_000),
    ],
)
def test_a_state_takes_as_long_as_a_pass_and_is_not_long_on_its_way(
    pass_s: float, link: Link | None, expected: float
) -> None:
    assert state_bytes(pass_s, link) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("machines", "expected"), [("aa", 1), ("ab", 1), ("aaa", 1), ("aabb", 2), ("abab", 1), ("aaaabb", 2)]
)
def test_states_come_from_other_machines(machines: str, expected: int) -> None:
    assert shift(machines) == expected
