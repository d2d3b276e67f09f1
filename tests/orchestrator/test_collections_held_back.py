"""The garbage collector is held back for as long as anyone asks for it, and runs again afterwards."""

import gc
import threading

import pytest

from orchestrator.garbage import collections_held_back


def test_collections_run_again_once_the_last_thread_is_done() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with collections_held_back():
            entered.set()
            leave.wait()

    other = threading.Thread(target=hold)
    other.start()
    entered.wait()
    with pytest.raises(ValueError, match="damaged"):
        _read_a_damaged_log()
    assert not gc.isenabled()
    leave.set()
    other.join()
    assert gc.isenabled()


def _read_a_damaged_log() -> None:
    with collections_held_back():
        assert not gc.isenabled()
        raise ValueError("damaged")
