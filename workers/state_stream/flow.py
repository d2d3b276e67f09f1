"""How a state stream flows: what is made ahead of what is sent, and when it gives way to training.

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
"""Share of a link that is taken to be in use when a state stream uses what training leaves: with all of it eq. 8 has no
bound. Where training takes 0.7, 16 packets follow, the paper's figure."""
SEEN_S = 0.5
PRESUMED_SHARE = 0.7
"""Of the link that training takes, until a stream has seen it for `SEEN_S`."""
CHUNK_S = 0.002
"""How long a training message that comes in the middle of a chunk may have to wait for the rest of it."""
SEEN_BYTES = 256 * 1024
FIRST_CHUNK_BYTES = 32 * 1024
"""Until a stream has written `SEEN_BYTES`."""
LEAST_CHUNK_BYTES = 8 * 1024
MOST_CHUNK_BYTES = 512 * 1024
GIVE_WAY_S = 0.001
"""Between the first two looks whether training still sends; each pause is half as long again as the one before."""
MOST_GIVE_WAY_S = 0.008
JOIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Flow:
    """How layer states travel. The two switches are the rows of DynPipe's table III."""

    pipelined: bool = True
    """Serialize, send and load chunks at the same time; else the whole state is serialized before the first chunk
    leaves and has arrived before the first is loaded."""
    prioritized: bool = True
    """Start no chunk while training sends, and tag the packets as bulk traffic for the network's queues."""
    chunk_bytes: int | None = None
    """What is sent between two looks at training's traffic; unset: as much as the link carries in `CHUNK_S`."""
    chunks_ahead: int = 16
    """Chunks serialized but not sent. What is received but not loaded waits in the system."""
    sign_of_life_s: float = 1.0
    """While a server has to wait it says so this often."""


def queue_length(training_rate: float, transfer_rate: float, service_rate: float) -> int:
    """Packets of a state stream that wait on average where training's have priority: DynPipe eq. 8, L_q^(2), rounded
    up. With a shorter queue the link runs dry, a longer one only stands in training's way.

    Args:
        training_rate: training's packets per second, lambda_1.
        transfer_rate: the state stream's packets per second, lambda_2.
        service_rate: packets per second that the link carries, mu.

    Returns:
        At least 1.

    Raises:
        ValueError: a rate is negative, or the link carries less than what arrives, so that no queue is long enough.
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
class Pace:
    """What a state stream has seen of its way so far, and what follows from it for what comes."""

    held_s: float = 0.0
    """Waited while training sent."""
    writing_s: float = 0.0
    """Waited for the link to take the stream's own bytes."""
    written_bytes: int = 0

    def chunk_bytes(self) -> int:
        """Bytes of the next chunk."""
        if self.written_bytes < SEEN_BYTES:
            return FIRST_CHUNK_BYTES
        fitting = self.written_bytes * CHUNK_S / max(self.writing_s, 1e-9)
        return int(min(max(fitting, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES))

    def packets_ahead(self) -> int:
        """Packets that may wait in the system's own queue, where nothing holds them back: DynPipe eq. 8 for the share
        of the link that training was seen to take, and a stream that takes the rest up to `FULL`."""
        seen_s = self.held_s + self.writing_s
        share = min(self.held_s / seen_s, FULL) if seen_s >= SEEN_S else PRESUMED_SHARE
        return queue_length(share, FULL - share, 1.0)


class Ahead(Generic[Item]):
    """`items`, made in a thread of its own, at most `length` ahead of the consumer; it ends with the context."""

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
        """Raises what the making of an item raised, after the items before it."""
        while True:
            with self._changed:
                while not self._made and not self._ended:
                    self._changed.wait()
                if not self._made:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._made.popleft()
                # Not for each that is taken: a thread that wakes takes the interpreter from training every time.
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
        tell: called now and then while it waits.

    Returns:
        False if `stopped` was set meanwhile.
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
