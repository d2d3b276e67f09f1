"""Keeps Python's garbage collector from stopping an event loop.

A full collection searches every event and step that the process keeps: 200 ms and more after a while.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holding = 0
"""Threads that hold collections back."""


@contextmanager
def collections_held_back() -> Iterator[None]:
    """No collection runs inside, in any thread. For work that makes many objects and no cycles, as reading a log."""
    global _holding
    with _lock:
        _holding += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _holding -= 1
            if not _holding:
                gc.enable()


def exclude_all_objects() -> None:
    """Exclude every object there is from later collections, reference cycles too; takes no time."""
    gc.freeze()


def exclude_kept_objects() -> None:
    """Free young reference cycles, and exclude what is left from later collections.

    Objects still go when nothing refers to them; only cycles that outlive a call of this function stay, and events,
    steps and plans form none.
    """
    gc.collect(1)
    gc.freeze()
