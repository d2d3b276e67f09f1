"""What a rank computes now and for how long: this tells the controller whether the rank hangs or waits.

One thread computes; any thread may look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.ir import Action
from workers.protocol import Working


class Activity:
    """Tracks the action under way, if any.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: tuple[Action, float] | None = None
        """The action and when its computation began."""

    def begin(self, action: Action) -> None:
        """Record that the rank computes `action` from now on."""
        self._now = action, self._clock()

    @contextmanager
    def until_done(self) -> Iterator[None]:
        """Record on exit that the rank computes nothing, even after an exception."""
        try:
            yield
        finally:
            self._now = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the rank waits for another rank; that wait has its own limit. On exit the action's clock restarts."""
        before, self._now = self._now, None
        yield
        if before is not None:
            self.begin(before[0])

    def working(self) -> Working | None:
        """Return what the rank computes; None while it waits or does something else."""
        now = self._now
        return None if now is None else Working(action=str(now[0]), for_s=self._clock() - now[1])
