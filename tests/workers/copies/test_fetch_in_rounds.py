"""States asked for again: what a failed fetch leaves behind, and when the rounds end."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from planner.shards import Piece
from workers.copies import fetch_in_rounds as rounds
from workers.copies.fetch_in_rounds import fetch_in_rounds


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ASK_AGAIN_S", (0.0, 0.0))


def test_a_failed_fetch_keeps_nothing_of_what_it_received() -> None:
    received: list[weakref.ref[torch.Tensor]] = []

    def bring(piece: Piece) -> int:
        state = torch.zeros(4)
        received.append(weakref.ref(state))
        assert [each for each in received[:-1] if each() is not None] == []
        try:
            raise ConnectionError("the owner is gone")
        except ConnectionError as error:
            raise RuntimeError("half of it") from error

    ((piece, why), *others) = fetch_in_rounds([Piece(0), Piece(1)], bring, threading.Event())
    assert (piece, str(why)) == (Piece(0), "half of it")
    assert [each[0] for each in others] == [Piece(1)]
    assert len(received) == 6


def test_a_stop_in_the_last_round_tells_of_no_failure() -> None:
    stopped, asked = threading.Event(), 0

    def bring(piece: Piece) -> int:
        nonlocal asked
        asked += 1
        if asked == 3:
            stopped.set()
        raise ConnectionError("stopped")

    assert list(fetch_in_rounds([Piece(0)], bring, stopped)) == []
    assert asked == 3
