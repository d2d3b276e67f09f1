"""Flow control of a state stream: how far it serializes ahead, and when it gives way to training.

Knows no socket and no state: `stream.py` moves the bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Generic, TypeVar

Item = TypeVar("Item")

FULL = 0.95
"""Assumed utilization of a link on which a state stream takes what training leaves: at 1, eq. 8 has no bound.
If training takes 0.7, eq. 8 gives 16 packets, the paper's figure."""
SEEN_S = 0.5
PRESUMED_SHARE = 0.7
"""Share of the link that training is assumed to take, until a stream has measured it for `SEEN_S`."""
CHUNK_S = 0.002
"""Longest time that a training message which arrives during a chunk waits for the rest of the chunk."""
SEEN_BYTES = 256 * 1024
FIRST_CHUNK_BYTES = 32 * 1024
"""Chunk size until a stream has written `SEEN_BYTES`."""
LEAST_CHUNK_BYTES = 8 * 1024
MOST_CHUNK_BYTES = 512 * 1024
GIVE_WAY_S = 0.001
"""Pause between the first two checks whether training still sends; each later pause is 1.5 times as long."""
MOST_GIVE_WAY_S = 0.008
JOIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Settings of layer-state transfers. The two switches are the rows of DynPipe's table III."""

    pipelined: bool = True
    """Serialize, send and load chunks concurrently. Otherwise the entire state is serialized before the first
    chunk leaves, and arrives before the first is loaded."""
    prioritized: bool = True
    """Start no chunk while training sends, and tag the packets as bulk traffic for the network's queues."""
    chunk_bytes: int | None = None
    """Bytes sent between two checks for training traffic; unset: as many as the link carries in `CHUNK_S`."""
    chunks_ahead: int = 16
    """Most chunks serialized but not sent. Received bytes that are not loaded wait in the kernel."""
    sign_of_life_s: float = 1.0
    """Interval of a server's keepalives while it has to wait."""


def queue_length(training_rate: float, transfer_rate: float, service_rate: float) -> int:
    """Mean number of waiting state packets where training's have priority: DynPipe eq. 8, L_q^(2).

    Rounded up. With a shorter queue the link runs dry; a longer one only delays training.

    Args:
        training_rate: training's packets per second, lambda_1.
        transfer_rate: the state stream's packets per second, lambda_2.
        service_rate: packets per second that the link carries, mu.

    Returns:
        At least 1.

    Raises:
        ValueError: a rate is negative, or more packets arrive than the link carries, so that no queue is long
            enough.
    """
    if min(training_rate, transfer_rate) < 0 or training_rate + transfer_rate >= service_rate:
        raise ValueError(
            f"a link of {service_rate:g} packets/s cannot carry {training_rate:g} of training and"
            f" {transfer_rate:g} of state: slow the state stream down"
        )
    load = (training_rate + transfer_rate) / service_rate
    waiting = transfer_rate * load / ((service_rate - training_rate) * (1 - load))
    return max(1, ceil(waiting))


@dataclass
class StreamPace:
    """Measurements of a state stream so far, and the chunk size and queue length that follow."""

    held_s: float = 0.0
    """Time spent waiting while training sent."""
    writing_s: float = 0.0
    """Time spent waiting for the link to accept the stream's own bytes."""
    written_bytes: int = 0

    def chunk_bytes(self) -> int:
        """Bytes of the next chunk."""
        if self.written_bytes < SEEN_BYTES:
            return FIRST_CHUNK_BYTES
        fitting = self.written_bytes * CHUNK_S / max(self.writing_s, 1e-9)
        return int(min(max(fitting, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES))

    def packets_ahead(self) -> int:
        """Packets that may wait in the kernel's queue, where they can no longer be held back.

        DynPipe eq. 8 for the measured share of training, and a stream that takes the rest of the link up to
        `FULL`.
        """
        seen_s = self.held_s + self.writing_s
        share = min(self.held_s / seen_s, FULL) if seen_s >= SEEN_S else PRESUMED_SHARE
        return queue_length(share, FULL - share, 1.0)


class Ahead(Generic[Item]):
    """`items`, produced on a thread at most `length` ahead of the consumer; it ends with the context."""

    def __init__(self, items: Iterable[Item], length: int, name: str) -> None:
        self._length = length
        self._made: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._make, args=(items,), name=name, daemon=True)

    def __enter__(self) -> Ahead[Item]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(JOIN_S)

    def __iter__(self) -> Iterator[Item]:
        """The items in order. If producing one raises, the error follows the items before it."""
        while True:
            with self._changed:
                while not self._made and not self._ended:
                    self._changed.wait()
                if not self._made:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._made.popleft()
                # Not for every item: each time a thread wakes, it takes the interpreter from training.
                if len(self._made) <= self._length // 2:
                    self._changed.notify_all()
            yield item

    def _make(self, items: Iterable[Item]) -> None:
        try:
            for item in items:
                with self._changed:
                    while len(self._made) >= self._length and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    self._made.append(item)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def give_way(
    busy: Callable[[], bool], stopped: threading.Event, *, tell: Callable[[], None], tell_every_s: float
) -> bool:
    """Wait while training sends.

    Args:
        tell: called every `tell_every_s` during the wait.

    Returns:
        False if `stopped` was set in the meantime.
    """
    told = time.monotonic()
    pause_s = GIVE_WAY_S
    while busy():
        if stopped.wait(pause_s):
            return False
        pause_s = min(1.5 * pause_s, MOST_GIVE_WAY_S)
        if time.monotonic() - told >= tell_every_s:
            tell()
            told = time.monotonic()
    return not stopped.is_set()
