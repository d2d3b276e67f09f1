"""One rank in the group of a generation: it joins it, and leaves it as soon as the generation is known to be over."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.protocol.errors import ChannelError
from workers.protocol.orders import Generation
from workers.transport.channel import Channel
from workers.transport.open_channel import open_channel


class ChannelMembership:
    """The generation that a rank is in, and its channel there. `end`, `leave` and `lasting` may be called from any
    thread, also while another one joins.

    Args:
        rank: its global number.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: dist.TCPStore | None = None
        self._joining: ChannelAttempt | None = None
        self._ending = threading.Lock()
        self.generation: Generation | None = None
        """The newest that it has tried to join."""
        self.channel: Channel | None = None
        self.over = 0
        """The newest generation that is known to be over."""

    def host_store(self, host: str) -> int:
        """Host the store through which a generation forms, on the interface of `host`; returns its port."""
        if self._store is None:
            listener = socket.create_server((host, 0))
            self._store = dist.TCPStore(
                host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                timeout=timedelta(seconds=60),
            )
        return self._store.port

    def join(self, generation: Generation, device: torch.device, channel: Channel | None = None) -> None:
        """Form the generation's process group; waits for all its members.

        Args:
            device: what the rank computes on.
            channel: a group that is formed already.

        Raises:
            ChannelError: the generation is over, a member is gone, or `leave` was called.
        """
        self.generation = generation
        if channel is None:
            joining = ChannelAttempt(lambda: open_channel(generation, self._rank, device))
            with self._ending:
                if generation.number <= self.over:
                    raise ChannelError(f"generation {generation.number} was over before this rank joined it")
                self._joining = joining
            channel = joining.wait()
        with self._ending:
            self.channel = channel
            over = generation.number <= self.over
        if over:
            channel.close()
            raise ChannelError(f"generation {generation.number} was over as this rank had joined it")

    def end(self, generation: int) -> bool:
        """Note that `generation` and earlier ones are over: a later `join` of them raises.

        Returns:
            Whether this rank has to leave; it stays in a newer one.
        """
        with self._ending:
            self.over = max(self.over, generation)
            return not (generation and self.generation is not None and self.generation.number > generation)

    def leave(self) -> None:
        """Drop the group: every call that waits in it, here or at a neighbour, raises."""
        if self._joining is not None:
            self._joining.leave()
        if self.channel is not None:
            self.channel.close()

    @contextmanager
    def lasting(self, generation: int) -> Iterator[bool]:
        """Yields whether `generation` is not known to be over; in the context no news of its end arrives."""
        with self._ending:
            yield generation > self.over

    def sending(self) -> bool:
        """Whether training traffic is on its way."""
        return self.channel is not None and self.channel.sending()

    def close(self) -> None:
        """Stop hosting the store. Leave before."""
        self.channel = None
        self._store = None


class ChannelAttempt:
    """One attempt to open a channel, which can be abandoned.

    Forming a group cannot be interrupted, so it runs on a thread of its own.

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
