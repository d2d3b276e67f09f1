"""What a test changes in a rank's process before it serves. Each process imports this module, so it imports little."""

from __future__ import annotations

import threading


def never_up(rank: int) -> None:
    """Ranks other than 0 and 1 start for ever."""
    if rank > 1:
        threading.Event().wait()
