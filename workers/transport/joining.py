"""A join that can be abandoned: forming a group cannot be interrupted, so it runs on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from workers.transport.channel import Channel, ChannelError


class Joining:
    """One attempt to open a channel.

    Args:
        open_channel: waits for all members of a generation.
    """

    def __init__(self, open_channel: Callable[[], Channel]) -> None:
        self._open = open_channel
        self._results: queue.SimpleQueue[Channel | BaseException | None] = queue.SimpleQueue()
        """Channel that `wait` returns, or error that it raises; None: `leave` was called."""
        self._lock = threading.Lock()
        self._left = False

    def wait(self) -> Channel:
        """The channel, once all members have joined.

        Raises:
            ChannelError: a member is gone, or `leave` was called.
        """
        threading.Thread(target=self._run, name="join", daemon=True).start()
        result = self._results.get()
        if result is None:
            raise ChannelError("left while the group was forming")
        if isinstance(result, BaseException):
            raise result
        return result

    def leave(self) -> None:
        """Make `wait` raise; a channel that opens later is closed. Call it from any thread."""
        with self._lock:
            self._left = True
        self._results.put(None)

    def _run(self) -> None:
        try:
            channel = self._open()
        except BaseException as error:
            self._results.put(error)
            return
        with self._lock:
            if not self._left:
                self._results.put(channel)
                return
        channel.close()
