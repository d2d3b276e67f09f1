"""The garbage collector is held back for as long as anyone asks for it, and never searches what it is told to leave."""

import gc
import threading

import pytest

from orchestrator.garbage import collections_held_back, exclude_all_objects


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


def test_what_was_made_while_they_were_held_back_is_not_searched_afterwards() -> None:
    with collections_held_back():
        made = [[number] for number in range(1_000)]
        before = gc.get_freeze_count()
        exclude_all_objects()
    try:
        assert gc.get_freeze_count() >= before + len(made)
        gc.collect()
        assert not {id(one) for one in made} & {id(one) for one in gc.get_objects()}
    finally:
        gc.unfreeze()


def _read_a_damaged_log() -> None:
    with collections_held_back():
        assert not gc.isenabled()
        raise ValueError("damaged")
