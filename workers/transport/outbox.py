"""What was sent and has not left yet. A thread waits for the oldest message, so that its memory is free when it has
left and the sender never waits in between.

Gloo says that a send is complete to who waits for it, and to nobody else; and to wait before the next send could
deadlock: a message leaves when its receiver has come to post its receive, which may need what is yet to be sent.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from torch import Tensor

MOST = 4
"""Messages that wait for nobody's attention. The thread wakes when there are more and leaves half of these, as it would
slow the sender down to wake for each."""
CLOSE_S = 5.0


class Outbox:
    """Works of one rank's sends, in order, with the memory that they read."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._turn = threading.Lock()
        """Held by who waits for the oldest work."""
        self._due = threading.Semaphore(0)
        self._error: RuntimeError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, work: Any, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is complete; does not wait."""
        self._sent.append((work, tensor))
        if len(self._sent) <= MOST:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
            self._thread.start()
        self._due.release()

    def flush(self) -> None:
        """Wait until everything has left.

        Raises:
            RuntimeError: a message cannot be delivered.
        """
        with self._turn:
            while self._sent and self._error is None:
                self._finish_oldest()
            if self._error is not None:
                self._sent.clear()
                raise self._error

    def close(self) -> None:
        """End the thread. The works are complete, or have been made to fail."""
        self._closed = True
        self._due.release()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    @property
    def held(self) -> int:
        """Messages whose memory is still kept."""
        return len(self._sent)

    def _run(self) -> None:
        while True:
            self._due.acquire()
            if self._closed:
                return
            while len(self._sent) > MOST // 2 and self._error is None:
                with self._turn:
                    self._finish_oldest()

    def _finish_oldest(self) -> None:
        if not self._sent:  # whoever had the turn before finished them all
            return
        # It stays in the queue while it is waited for: it is held all the same.
        try:
            self._sent[0][0].wait()
        except RuntimeError as error:
            self._error = error
            return
        self._sent.popleft()
