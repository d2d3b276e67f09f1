"""How long an asyncio loop does not come round to a task that only wants to sleep for a millisecond."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

TICK_S = 0.001


class Stall(NamedTuple):
    """How late the loop came round once."""

    seconds: float
    collecting_s: float
    """Of these, in the garbage collector, whichever thread ran it: all threads wait for it."""
    own_s: float
    """Processor time of the loop's thread outside the garbage collector. The rest of a stall was another thread's or
    another process's."""

    @property
    def working_s(self) -> float:
        """Seconds outside the garbage collector."""
        return max(0.0, self.seconds - self.collecting_s)


class _Times(NamedTuple):
    wall_s: float
    own_s: float
    """Processor time of a thread."""

    def plus(self, other: _Times) -> _Times:
        return _Times(self.wall_s + other.wall_s, self.own_s + other.own_s)

    def minus(self, other: _Times) -> _Times:
        return _Times(self.wall_s - other.wall_s, self.own_s - other.own_s)


@dataclass
class Stalls:
    """Watches the running loop inside its `async with` block."""

    seen: list[Stall] = field(default_factory=list)
    """One for each time that the loop came round."""
    _ticking: asyncio.Task[None] | None = None
    _thread: int = field(default_factory=threading.get_ident)
    """The loop's."""
    _collecting: tuple[int, _Times] | None = None
    """The thread in which the garbage collector is at work, and when it began, by that thread's clocks."""
    _collected: _Times = field(default_factory=lambda: _Times(0.0, 0.0))
    """Its pauses so far; of the processor time, the part in the loop's thread."""

    async def __aenter__(self) -> Stalls:
        gc.callbacks.append(self._collect)
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._ticking is not None
        self._ticking.cancel()
        gc.callbacks.remove(self._collect)

    async def _tick(self) -> None:
        last, collected = _now(), self._so_far()
        while True:
            await asyncio.sleep(TICK_S)
            now, so_far = _now(), self._so_far()
            late_s, own_s = now.minus(last)
            collecting_s, collecting_own_s = so_far.minus(collected)
            self.seen.append(
                Stall(max(0.0, late_s - TICK_S), collecting_s, max(0.0, own_s - collecting_own_s))
            )
            last, collected = now, so_far

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = threading.get_ident(), _now()
        else:
            self._collected, self._collecting = self._so_far(), None

    def _so_far(self) -> _Times:
        """All pauses up to now. Another thread that has just ended one may not have come to say so."""
        if self._collecting is None:
            return self._collected
        thread, begun = self._collecting
        wall_s, own_s = _now().minus(begun)
        return self._collected.plus(_Times(wall_s, own_s if thread == self._thread else 0.0))


def _now() -> _Times:
    return _Times(time.perf_counter(), time.thread_time())
