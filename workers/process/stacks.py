"""Stacks of the threads of this process: they show what a rank that hangs was doing."""

from __future__ import annotations

import sys
import threading
import traceback

MOST_LINES = 12
"""Per thread; the innermost frames are kept."""


def stacks() -> str:
    """Return each thread's calls, innermost last; the main thread first, the calling thread left out."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    # Ray's threads run actor calls, and `threading` does not know all of them.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    told = [
        f"thread {names.get(thread, thread)}:\n"
        + "".join(traceback.format_stack(frames[thread])[-MOST_LINES:])
        for thread in sorted(frames, key=lambda thread: thread != main)
        if thread != threading.get_ident()
    ]
    return "".join(told)
