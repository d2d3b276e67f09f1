"""A lane for what ranks observe of their work: batched and bounded; what nobody takes in time is dropped.

A thread of its own sends, so that training never waits; it ends once nothing is left to send. Knows no Ray: the caller
passes the functions that send a batch and say whether it has arrived.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from planner.observed import StepTimes

EVERY_S = 0.25
"""Between two batches."""
KEPT = 64
"""Observations that wait at most; older ones are dropped."""
PATIENCE_S = 10.0
"""Seconds that a batch may be in flight before it counts as lost."""


class TelemetryLane:
    """Sends observations in batches, one at a time.

    Args:
        send: starts sending a batch and returns a handle; must not wait.
        done: whether the batch of a handle has arrived or failed; must not wait.
    """

    def __init__(
        self,
        send: Callable[[Sequence[StepTimes]], Any],
        done: Callable[[Any], bool],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self._send = send
        self._done = done
        self._every_s = every_s
        self._lock = threading.Lock()
        self._waiting: deque[StepTimes] = deque(maxlen=KEPT)
        self._thread: threading.Thread | None = None
        """While there is something to send."""

    def offer(self, observed: StepTimes) -> None:
        """Send `observed` with the next batch, if there is one in time. Never waits."""
        with self._lock:
            self._waiting.append(observed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
                self._thread.start()

    def send_with(self, send: Callable[[Sequence[StepTimes]], Any]) -> None:
        """Send with `send` from now on."""
        with self._lock:
            self._send = send

    def _run(self) -> None:
        while True:
            with self._lock:
                batch, send = tuple(self._waiting), self._send
                self._waiting.clear()
                if not batch:
                    self._thread = None
                    return
            self._deliver(batch, send)
            time.sleep(self._every_s)

    def _deliver(self, batch: Sequence[StepTimes], send: Callable[[Sequence[StepTimes]], Any]) -> None:
        """Send `batch`, and wait until it has arrived, failed or taken too long."""
        deadline_s = time.monotonic() + PATIENCE_S
        try:
            handle = send(batch)
            while not self._done(handle) and time.monotonic() < deadline_s:
                time.sleep(self._every_s / 5)
        except Exception:  # observations are not worth a word: training goes on without them
            return
