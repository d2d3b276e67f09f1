"""What was sent and has not left yet. A thread waits for the oldest message, so that its memory is free when it has
left and the sender never waits in between.

Gloo says that a send is complete to who waits for it, and to nobody else; and to wait before the next send could
deadlock: a message leaves when its receiver has come to post its receive, which may need what is yet to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from workers.transport.waiter import Waiter

MOST = 4
"""Messages that wait for nobody's attention. The thread wakes when there are more and leaves half of these, as it would
slow the sender down to wake for each."""


class Outbox:
    """Works of one rank's sends, in order, with the memory that they read.

    Args:
        lost: see `Waiter`.
    """

    def __init__(self, lost: Callable[[], bool] = lambda: False) -> None:
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._waiter = Waiter("outbox", lost)
        self._asked = 0
        """How often the thread was woken of which nobody has heard."""

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
        """Wake who waits, and end the thread; from any thread. The works are complete, or have been made to fail."""
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
