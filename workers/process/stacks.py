"""Where the threads of this process are: what a rank that comes to no end was doing."""

from __future__ import annotations

import sys
import threading
import traceback

MOST_LINES = 12
"""Of one thread, the innermost ones."""


def stacks() -> str:
    """Each thread's calls, innermost last; the main thread first, and without the one that asks."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    told = [
        f"thread {thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident])[-MOST_LINES:])
        for thread in sorted(threading.enumerate(), key=lambda one: one is not threading.main_thread())
        if thread.ident in frames and thread is not threading.current_thread()
    ]
    return "".join(told)
