"""Ranks bound to cores: in turn, each with the threads that it starts, and no other thread."""

from __future__ import annotations

import os
import threading

import pytest

from workers.process.cores import core_of, pin_to_core

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(not CORES, reason="this system binds no thread to a core")


def test_ranks_take_the_cores_in_turn() -> None:
    assert [core_of(number) for number in range(len(CORES) + 1)] == [*CORES, CORES[0]]


def test_a_thread_and_those_that_it_starts_stay_on_the_core() -> None:
    seen: list[set[int]] = []

    def train() -> None:
        pin_to_core(1)
        seen.append(os.sched_getaffinity(0))
        started = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        started.start()
        started.join()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [{CORES[1 % len(CORES)]}] * 2
    assert os.sched_getaffinity(0) == set(CORES)
