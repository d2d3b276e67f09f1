"""Keeps Python's garbage collector from stopping the controller's event loop.

A full collection searches every event and step that the controller keeps: 200 ms and more after a while.
"""

from __future__ import annotations

import gc


def exclude_kept_objects() -> None:
    """Free young reference cycles, and exclude what is left from later collections.

    Objects still go when nothing refers to them; only cycles that outlive a call of this function stay, and events,
    steps and plans form none.
    """
    gc.collect(1)
    gc.freeze()
