"""Current action of a rank and its duration: they tell the controller whether the rank hangs or waits.

One thread computes; any thread may look.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.ir import Action
from workers.process.process_times import ProcessTimes, process_times, starved_s
from workers.protocol.reports import Working


class Activity:
    """Tracks the action under way, if any.

    Args:
        clock: monotonic seconds.
        look: returns the times of this process.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[], ProcessTimes] = lambda: process_times(os.getpid()),
    ) -> None:
        self._clock = clock
        self._look = look
        self._now: tuple[Action, float] | None = None
        """The action and when its computation began."""
        self._asked: tuple[Action, float] | None = None
        """Value of `_now` when someone asked last."""
        self._before: ProcessTimes | None = None
        """This process when someone asked about the same action for the second time."""

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
        """Return what the rank computes; None while it waits or does something else. One thread asks."""
        now, asked = self._now, self._asked
        self._asked = now
        if now is None:
            return None
        starved = 0.0
        if now is not asked:
            self._before = None  # most actions are short: nobody needs to look at the threads
        elif self._before is None:
            self._before = self._look()
        else:
            starved = starved_s(self._before, self._look()) or 0.0
        return Working(action=str(now[0]), for_s=self._clock() - now[1], starved_s=starved)
