"""Messages that were queued and have not left yet.

A thread waits for the oldest and frees its memory once it has left, so that the sender never waits. Gloo
reports a completed send only to the thread that waits for it. Waiting before the next send could deadlock: a
message leaves when its receiver posts the receive, and that rank may first need a message yet to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from workers.transport.waiter import Waiter

MOST = 4
"""Messages that may be held before the thread wakes, where they are not large. It then waits until half as many are
left: waking for each one would slow the sender down."""


class Outbox:
    """The works of one rank's sends, in order, with the memory that they read.

    Args:
        lost: see `Waiter`.
        most: messages that may be held before the thread wakes.
    """

    def __init__(self, lost: Callable[[], bool] = lambda: False, most: int = MOST) -> None:
        self._most = most
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._waiter = Waiter("outbox", lost)
        self._asked = 0
        """Number of waits given to the thread whose results have not been taken."""

    def put(self, work: Any, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is complete; does not wait."""
        self._sent.append((work, tensor))
        if len(self._sent) > self._most:
            self._have_left(self._most // 2)

    def flush(self) -> None:
        """Wait until everything has left.

        Raises:
            RuntimeError: a message cannot be delivered, or the outbox is closed.
        """
        if self._sent:
            self._have_left(0)
        try:
            while self._asked:
                self._asked -= 1
                self._waiter.get()
        except RuntimeError:
            # A new deque: the thread still works on the old one.
            self._sent = deque()
            raise

    def close(self) -> None:
        """Wake waiting callers and end the thread. Call it from any thread, once the works are complete or
        have been made to fail."""
        self._waiter.leave()

    @property
    def held(self) -> int:
        """Messages whose memory is still kept."""
        return len(self._sent)

    def _have_left(self, most: int) -> None:
        self._asked += 1
        self._waiter.put(partial(_finish, self._sent, most))


def _finish(sent: deque[tuple[Any, Tensor]], most: int) -> None:
    """Wait for the oldest sends until at most `most` are left."""
    while len(sent) > most:
        # It stays in the queue during the wait: its memory is still held.
        sent[0][0].wait()
        sent.popleft()
