"""A state stream leaves the network to training, and waits for a slow reader."""

from __future__ import annotations

import threading
import time

import torch
from pace import patient
from state_streams import HOST, LIVELY, SECRET, between, bits, eventually, fetching, rich_state, serving

from workers.state.layer_state import LayerState
from workers.state_stream.flow import Flow
from workers.state_stream.stream import fetch


def test_no_chunk_moves_while_training_sends() -> None:
    busy, looked = threading.Event(), threading.Semaphore(0)
    busy.set()

    def look() -> bool:
        looked.release()
        return busy.is_set()

    with serving(busy=look) as to:
        to.server.offer(17, [rich_state()])
        with fetching(to.fetch) as got:
            for _ in range(50):
                assert looked.acquire(timeout=patient(10))
            assert got == []
            busy.clear()
        assert isinstance(got[0], LayerState)


def test_signs_of_life_are_not_chunks() -> None:
    """A server that has to wait for long sends keep-alives, before the state and in the middle of it."""
    looks = 0

    def busy_mostly() -> bool:
        nonlocal looks
        looks += 1
        return looks % 5 != 0

    with serving(busy=busy_mostly, flow=LIVELY) as to, fetching(to.fetch) as got:
        eventually("the request is there", lambda: bool(to.server._peers))
        time.sleep(0.02)
        to.server.offer(17, [rich_state()])
    assert isinstance(got[0], LayerState)
    assert bits(got[0]) == bits(rich_state())


def test_unprioritized_streams_do_not_look() -> None:
    with serving(busy=lambda: True, flow=Flow(prioritized=False)) as to:
        to.server.offer(17, [rich_state()])
        assert bits(to.fetch()) == bits(rich_state())


def test_a_slow_reader_gets_everything() -> None:
    big = LayerState(0, "big", {"w": torch.randn(2_000_000)}, {}, {}, {"w": 1})

    def dawdle(before: int, piece: bytes) -> bytes:
        time.sleep(0.002)
        return piece

    with serving(flow=Flow()) as to:
        to.server.offer(17, [big])
        with between(to, dawdle) as port:
            assert bits(fetch(HOST, port, SECRET, 0, 17, wait_s=1)) == bits(big)
