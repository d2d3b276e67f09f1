"""Where the controller drops requests for a rank that is training. Nobody waits at it."""

from __future__ import annotations

import threading

from workers.protocol import Request


class Mailbox:
    """Requests until the next commit takes them along; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[Request] = []

    def put(self, request: Request) -> None:
        with self._lock:
            self._requests.append(request)

    def take(self) -> tuple[Request, ...]:
        """The requests since the last call."""
        with self._lock:
            requests, self._requests = tuple(self._requests), []
        return requests
