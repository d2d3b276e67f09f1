"""The first SIGTERM to a process is a notice; the next one does what it would have done without us."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from workers.notices.notice import Notice


class Sigterm:
    """Takes this process's SIGTERM over. Make it in the main thread, after all other handlers of the signal.

    Nobody says when a SIGKILL follows: 30 s later under Kubernetes, unless the pod sets another time.
    """

    name = "sigterm"
    every_s = 0.1
    of_node = False

    def __init__(self) -> None:
        self._came = False
        self._before: Callable[[int, FrameType | None], Any] | int | None = signal.signal(
            signal.SIGTERM, self._handle
        )

    def look(self) -> tuple[Notice, ...]:
        """One notice, once the signal came."""
        if not self._came:
            return ()
        return (Notice(source=self.name, left_s=None, text="the process got SIGTERM"),)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a flag: a handler interrupts whatever the main thread is doing.
        self._came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
