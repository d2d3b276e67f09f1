"""Watches what is left of a rank's memory: on a sudden fall it gives back what is cached, and holds the next microbatch
up for a bounded time, while the controller moves layers away.

Where an action may wait it never reorders: the program of a schedule stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.devices.device import Device

LOOK_EVERY_S = 0.1
"""Between two looks, at least: one at the host's memory costs some 0.2 ms."""
HOLD_S = 0.3
"""Longest hold of microbatches per fall, in seconds: others may free memory meanwhile. Moving layers does the rest."""
POLL_S = 0.01
FIRST_STEP = 2
"""The first step in which it watches: before, the memory of a step is not known."""


class MemoryWatch:
    """The watch of one rank while it follows one plan.

    Args:
        reserve: the share of the device's memory that is to stay free.
        tell: takes what is left, and the reserve, in bytes: once for each fall below the reserve.
    """

    def __init__(
        self,
        device: Device,
        reserve: float,
        tell: Callable[[int, int], None],
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device = device
        self._reserve_bytes = int(reserve * device.total_bytes())
        self._tell = tell
        self._clock_s = clock_s
        self._sleep = sleep
        self._looked_s = float("-inf")
        self._steps = 0
        self._most_held = 0
        self._most_left: int | None = None
        self._low = False

    def begin_step(self) -> None:
        """The next step begins."""
        self._steps += 1

    def admit(self) -> None:
        """Return once the next microbatch may go forward."""
        now_s = self._clock_s()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        left = self._left()
        if self._steps < FIRST_STEP:
            return
        self._most_left = max(left, self._most_left or left)
        if left >= self._reserve_bytes:
            self._low = self._low and left < 2 * self._reserve_bytes
            return
        # A plan that leaves less than the reserve from the beginning is as it was meant to be.
        if self._low or self._most_left - left < self._reserve_bytes:
            return
        self._low = True
        self._tell(left, self._reserve_bytes)
        self._device.release()
        while self._left() < self._reserve_bytes and self._clock_s() - now_s < HOLD_S:
            self._sleep(POLL_S)

    def _left(self) -> int:
        """Bytes left when this rank takes the most that a step has taken so far."""
        held = self._device.held_bytes() or 0
        self._most_held = max(self._most_held, held)
        return self._device.free_bytes() + held - self._most_held
