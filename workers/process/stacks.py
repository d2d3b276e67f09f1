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
    told = [
        f"thread {thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident])[-MOST_LINES:])
        for thread in sorted(threading.enumerate(), key=lambda one: one is not threading.main_thread())
        if thread.ident in frames and thread is not threading.current_thread()
    ]
    return "".join(told)
