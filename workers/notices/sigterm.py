"""Treats the first SIGTERM to a process as a notice; the next one has its usual effect."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from workers.notices.notice import Notice


class Sigterm:
    """Takes over this process's SIGTERM. Create it in the main thread, after all other SIGTERM handlers.

    The signal does not say when a SIGKILL follows: under Kubernetes after 30 s, unless the pod differs.
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
        """One notice, once the signal has arrived."""
        if not self._came:
            return ()
        return (Notice(source=self.name, left_s=None, text="the process got SIGTERM"),)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a flag: a handler interrupts the main thread anywhere.
        self._came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
