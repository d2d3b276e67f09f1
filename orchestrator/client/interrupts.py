"""Ctrl-C and SIGTERM for a driver: before a job runs they end the program, while it runs they are counted."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context that handles both signals; in any but the main thread it does nothing."""

    def __init__(self) -> None:
        self.count = 0
        """Signals since `hold`."""
        self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From now on count signals instead of raising KeyboardInterrupt."""
        self._held = True
        # Connecting to Ray may have put its own handlers in place.
        self._install()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self.count += 1
