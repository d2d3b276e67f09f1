"""Ctrl-C, SIGTERM and SIGHUP for a driver: they end the program before a job runs and are counted while it runs."""

from __future__ import annotations

import errno
import os
import signal
import termios
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context that handles these signals; outside the main thread it does nothing.

    Args:
        came: called for each signal that is counted, in the handler.
    """

    def __init__(self, came: Callable[[], object] = lambda: None) -> None:
        self._came = came
        self.count = 0
        """Signals since `hold`."""
        self._held = False
        self._raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises:
        KeyboardInterrupt: a signal came before, and Python ignored its error, as it does in a hook of `os.fork`.
        """
        if self._raised:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """Count signals from now on, instead of raising KeyboardInterrupt.

        Raises:
            KeyboardInterrupt: as in `check`.
        """
        self.check()
        self._held = True
        # Connecting to Ray may have installed its own handlers.
        self._install()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as under nohup
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_lost_terminal()
        if not self._held:
            self._raised = True
            raise KeyboardInterrupt
        self.count += 1
        self._came()


def _leave_lost_terminal() -> None:
    """Discard output whose terminal is gone: writing there would raise before the job has stopped."""
    for output in (1, 2):
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)
