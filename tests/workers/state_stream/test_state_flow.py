"""The length of a state stream's queue; a maker works no further ahead than that, and stops on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pace import patient

from workers.state_stream.flow import MOST_GIVE_WAY_S, Ahead, StreamPace, give_way, queue_length


@pytest.mark.parametrize(
    ("training", "transfer", "service", "packets"),
    [
        (0, 50, 100, 1),  # 0.5
        (50, 25, 100, 2),  # 1.5
        (50, 45, 100, 18),  # 17.1
        (70, 25, 100, 16),  # 15.83: the paper's "approximately 16"
        (0, 99, 100, 99),  # 98.01: without training it is M/M/1, rho^2 / (1 - rho)
        (90, 0, 100, 1),
    ],
)
def test_equation_8(training: float, transfer: float, service: float, packets: int) -> None:
    assert queue_length(training, transfer, service) == packets


@pytest.mark.parametrize(
    ("held_s", "packets"), [(0.0, 19), (5.0, 18), (7.0, 16), (9.0, 10), (9.5, 1), (10.0, 1)]
)
def test_what_may_wait_in_the_system_by_the_share_of_the_link_that_training_takes(
    held_s: float, packets: int
) -> None:
    assert StreamPace(held_s=held_s, writing_s=10.0 - held_s).packets_ahead() == packets
    assert StreamPace(held_s=held_s / 100, writing_s=(10.0 - held_s) / 100).packets_ahead() == 16, (
        "too early to say"
    )


@pytest.mark.parametrize(
    ("bytes_per_s", "chunk_bytes"), [(1e4, 8192), (12.5e6, 25_000), (125e6, 250_000), (1e12, 512 * 1024)]
)
def test_a_chunk_is_what_the_link_carries_in_two_milliseconds(bytes_per_s: float, chunk_bytes: int) -> None:
    assert StreamPace().chunk_bytes() == 32 * 1024
    pace = StreamPace(held_s=99.0, writing_s=1e7 / bytes_per_s, written_bytes=10_000_000)
    assert pace.chunk_bytes() == pytest.approx(chunk_bytes, abs=1)


@given(st.floats(0, 0.9), st.floats(0.001, 0.099), st.floats(0.1, 1e6))
def test_both_classes_together_wait_as_one_queue_does(
    training: float, transfer: float, service: float
) -> None:
    """Work is conserved: L_q^(1) + L_q^(2) of eq. 8 is M/M/1's queue. Only ratios matter."""
    load = training + transfer
    all_waiting = load**2 / (1 - load)
    training_waiting = training * load / (1 - training)
    expected = all_waiting - training_waiting
    got = queue_length(training * service, transfer * service, service)
    assert got in (max(1, ceil(expected - 1e-6)), max(1, ceil(expected + 1e-6)))


@pytest.mark.parametrize("rates", [(60, 40, 100), (120, 0, 100), (-1, 2, 100), (1, -2, 100), (0, 0, 0)])
def test_a_link_that_cannot_carry_it_is_an_error(rates: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=f"link of {rates[2]} packets/s cannot carry {rates[0]} of training"):
        queue_length(*rates)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "maker"]


def wait_until(happened: Callable[[], bool]) -> None:
    over = time.monotonic() + patient(30)
    while not happened():
        assert time.monotonic() < over
        time.sleep(0.001)


def test_it_is_made_in_order_and_no_further_ahead_than_the_queue_is_long() -> None:
    made: list[int] = []
    may_make = threading.Semaphore(0)

    def make() -> Iterator[int]:
        for number in range(10):
            may_make.acquire()
            made.append(number)
            yield number

    with Ahead(make(), 2, "maker") as ahead:
        may_make.release(10)
        taken: list[int] = []
        for number in ahead:
            taken.append(number)
            # Two are in the queue, and the maker holds one.
            assert len(made) <= len(taken) + 3
        assert taken == list(range(10))
    assert threads() == []


def test_a_maker_that_is_far_ahead_is_not_woken_for_each_that_is_taken() -> None:
    with Ahead(iter(range(100)), 8, "maker") as ahead:
        items = iter(ahead)
        wait_until(lambda: len(ahead._made) == 8)
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        time.sleep(0.1)
        assert len(ahead._made) == 5
        # Half of the queue is free now.
        assert next(items) == 3
        wait_until(lambda: len(ahead._made) == 8)
        assert list(items) == list(range(4, 100))
    assert threads() == []


def test_an_error_comes_after_what_was_made_before_it() -> None:
    def make() -> Iterator[int]:
        yield 1
        raise ValueError("no second one")

    with Ahead(make(), 4, "maker") as ahead:
        items = iter(ahead)
        assert next(items) == 1
        with pytest.raises(ValueError, match="no second one"):
            next(items)
    assert threads() == []


def test_leaving_stops_a_maker_that_waits_for_room() -> None:
    with Ahead(iter(range(100)), 1, "maker") as ahead:
        assert next(iter(ahead)) == 0
    assert threads() == []


def test_giving_way_ends_when_training_is_quiet_or_all_is_over() -> None:
    told: list[int] = []
    looks = iter([True, True, True, False])

    def tell() -> None:
        told.append(1)

    stopped = threading.Event()
    assert give_way(lambda: next(looks), stopped, tell=tell, tell_every_s=0)
    assert len(told) == 3
    stopped.set()
    assert not give_way(lambda: True, stopped, tell=tell, tell_every_s=0)
    assert not give_way(lambda: False, stopped, tell=tell, tell_every_s=0)


def test_who_gives_way_looks_ever_less_often() -> None:
    looks = 0
    over = inf

    def busy() -> bool:
        nonlocal looks, over
        over = min(over, time.monotonic() + 0.3)
        looks += 1
        return time.monotonic() < over

    assert give_way(busy, threading.Event(), tell=lambda: None, tell_every_s=1.0)
    # Six growing pauses, 21 ms in all, then one every MOST_GIVE_WAY_S.
    assert 1 < looks <= 8 + 0.3 / MOST_GIVE_WAY_S
