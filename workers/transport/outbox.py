"""Messages that were sent and have not left yet. A thread waits for the oldest, so that its memory is freed when it has
left and the sender never waits in between.

Gloo reports that a send is complete only to the thread that waits for it. To wait before the next send could deadlock:
a message leaves when its receiver posts its receive, which may need a message yet to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from workers.transport.waiter import Waiter

MOST = 4
"""Messages that may be held before the thread wakes. It then waits until half as many are left: to wake for each would
slow the sender down."""


class Outbox:
    """Works of one rank's sends, in order, with the memory that they read.

    Args:
        lost: see `Waiter`.
    """

    def __init__(self, lost: Callable[[], bool] = lambda: False) -> None:
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._waiter = Waiter("outbox", lost)
        self._asked = 0
        """How often the thread was woken and its result not yet taken."""

    def put(self, work: Any, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is complete; does not wait."""
        self._sent.append((work, tensor))
        if len(self._sent) > MOST:
            self._have_left(MOST // 2)

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
            # Not the deque that the thread is at.
            self._sent = deque()
            raise

    def close(self) -> None:
        """Wake waiting callers, and end the thread; from any thread. The works are complete, or were made to fail."""
        self._waiter.leave()

    @property
    def held(self) -> int:
        """Messages whose memory is still kept."""
        return len(self._sent)

    def _have_left(self, most: int) -> None:
        self._asked += 1
        self._waiter.put(partial(_finish, self._sent, most))


def _finish(sent: deque[tuple[Any, Tensor]], most: int) -> None:
    """Wait for the oldest until at most so many are left."""
    while len(sent) > most:
        # It stays in the queue while it is waited for: it is held all the same.
        sent[0][0].wait()
        sent.popleft()
