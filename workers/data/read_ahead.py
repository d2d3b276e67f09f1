"""Reads a rank's microbatches before it needs them, where reading is slow, and brings them to its device.

One thread reads, in the order of the actions, at most `AHEAD` microbatches ahead. Where reading is quick none of this
happens: a batch of text takes 8 to 160 us, of which a thread would save nothing. Knows no schedule and no source.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from resource import RUSAGE_THREAD, getrusage
from typing import Any, TypeVar

import torch
from torch import Tensor

from workers.data.dataset import Batch
from workers.process.dispatch_mode import DispatchMode
from workers.process.pinned_memory import Staged, Staging
from workers.reproducibility import rng

AHEAD = 2
"""Microbatches that wait to be taken."""
SLOW_S = 1e-3
SLOW_READS = 3
"""Slow reads in a row after which the next ones are made ahead."""
AGAIN = 256
"""After so many reads ahead one is made in place: they go on being made ahead if it is slow."""


@dataclass(frozen=True)
class WantedRead:
    """One read."""

    step: int
    microbatch: int
    """The global one."""
    inputs: bool
    """Whether the rank's device needs them."""
    targets: bool
    through: int = 0
    """Layers that the inputs may have gone through already, where that is kept."""


@dataclass(frozen=True)
class ReadResult:
    """Result of one read."""

    samples: list[int]
    batch: Batch


Read = Callable[[WantedRead], ReadResult]
Made = TypeVar("Made")


@dataclass(frozen=True)
class _Ahead:
    """Result of one read ahead, on its way to the device; or the error that prevented it."""

    found: ReadResult | None = None
    staged: Staged | None = None
    error: BaseException | None = None
    drew: bool = False
    """Whether the source was about to draw from torch's generator, from which layers draw meanwhile."""


class _Draws(DispatchMode):
    """Notes draws of this thread from torch's own generators, or refuses them: a source that draws is read in its
    turn.

    Args:
        refuse: whether to.
    """

    def __init__(self, *, refuse: bool) -> None:
        super().__init__()
        self.any = False
        self._refuse = refuse

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and kwargs.get("generator") is None:
            self.any = True
            if self._refuse:
                raise RuntimeError(f"{func} draws from torch's generator while layers do")
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ReadTime:
    """Time of one read."""

    seconds: float
    computed_s: float
    """Processor time of the thread that read, within `seconds`."""
    slow: bool | None
    """Whether it would better have been made ahead; None: perhaps it waited for other threads of this process."""


def timed(read: Callable[[], Made], device: torch.device, *, watch: bool = True) -> tuple[Made, ReadTime]:
    """Result of `read`, and the time that it took.

    It is slow if the thread lost `SLOW_S` and more; on a CPU, to waiting while the process did not compute. A thread
    waits too while others have Python's interpreter. It is never slow if it drew from the default generators of torch,
    or, as far as they are watched, of random and numpy.

    Args:
        watch: whether to notice also what it draws and takes back, which costs time.
    """
    draws = _Draws(refuse=False)
    with rng.turn, draws if watch else nullcontext():  # what draws meanwhile is the source
        drawn = torch.default_generator.get_state()
        beside = rng.state_beside_torch() if watch else ()
        before = _now()
        made = read()
        seconds, computed_s, all_computed_s, waits = (a - b for a, b in zip(_now(), before, strict=True))
        undrawn = torch.equal(drawn, torch.default_generator.get_state()) and (
            not watch or beside == rng.state_beside_torch()
        )
    lost_s = idle_s = seconds
    if device.type != "cuda":
        lost_s, idle_s = (seconds - computed_s if waits else 0.0), seconds - all_computed_s
    slow = undrawn and not draws.any and lost_s >= SLOW_S
    return made, ReadTime(seconds, computed_s, None if slow and idle_s < SLOW_S else slow)


def _now() -> tuple[float, float, float, int]:
    """Clock, processor time of this thread and of the process, and how often the thread has waited."""
    return time.perf_counter(), time.thread_time(), time.process_time(), getrusage(RUSAGE_THREAD).ru_nvcsw


class ReadAhead:
    """The reads of one rank, by its training thread or ahead of it: never two at once, and each in its turn.

    A read is slow if the training thread waits for it long: on a CPU, where a thread takes its processor time from
    computing, for something else than instructions of this process. After `AGAIN` reads ahead, one in place shows
    whether they still are. A source that draws from torch's generator, be it in some reads alone, is read where its
    microbatch is needed, with draws keyed by step and microbatch, between those of layers; so is one that draws from
    random or numpy in its first slow reads, and one that fails in another thread than the one that
    opened it. The read that shows this is made again.

    Args:
        device: of the rank.
        threads: torch threads of its training thread.
        seed: keys the draws of a source.
    """

    def __init__(self, device: torch.device, threads: int, seed: int = 0) -> None:
        self._device = device
        self._threads = threads
        self._seed = seed
        self._staging = Staging(device)
        self._changed = threading.Condition()
        self._read: Read | None = None
        self._coming: deque[WantedRead] = deque()
        """Not taken yet, in order."""
        self._there: deque[_Ahead] = deque()
        """Results of the first reads of `_coming`."""
        self._thread: threading.Thread | None = None
        self._leaving: threading.Thread | None = None
        """Was stopped, perhaps in the middle of a read."""
        self._slow = 0
        """Slow reads in a row."""
        self.ahead = False
        """Whether reads are made ahead."""
        self._taken = 0
        """Reads taken of those made ahead since the last one in place."""
        self._again = False
        """Whether the next read is to show that reads are no longer slow: if it shows nothing, they still are."""
        self._proven = False
        """Whether the source was read in another thread."""
        self._refused = False

    def begin(self, coming: Sequence[WantedRead], read: Read) -> None:
        """Announce the next reads, in order. The last of them may never be taken.

        Args:
            read: reads one; called by one thread at a time.
        """
        with self._changed:
            left = [*self._coming]
            if self._thread is not None and read == self._read and [*coming[: len(left)]] == left:
                self._coming.extend(coming[len(left) :])
                self._changed.notify_all()
                return
        self.stop()
        self._read, self._coming = read, deque(coming)
        if self.ahead and coming:
            self._start()

    def collect(self, step: int, microbatch: int) -> ReadResult:
        """The next of what was to come: tensors of the host, or already on their way to the device.

        Raises:
            Exception: whatever the source raised as it was read.
        """
        wanted = self._coming[0]
        assert (wanted.step, wanted.microbatch) == (step, microbatch), f"{wanted} was to be read next"
        if self._thread is None:
            return self._read_here()
        with self._changed:
            while not self._there:
                self._changed.wait()
            ahead = self._there[0]
            if ahead.error is None:
                self._there.popleft()
                self._coming.popleft()
                self._taken += 1
                self._changed.notify_all()
        if ahead.error is not None:
            if self._proven and not ahead.drew:
                raise ahead.error
            # It draws, or perhaps it may be read by the thread alone that opened it; if not, this raises what it
            # always raised.
            self.ahead, self._refused = False, True
            self._end()
            return self._read_here()
        self._proven = True
        if self._taken == AGAIN:  # and no more was read
            self.ahead, self._slow, self._again = False, SLOW_READS - 1, True
            self._end()
        assert ahead.found is not None
        assert ahead.staged is not None
        tensors = ahead.staged.collect()
        inputs = len(ahead.found.batch.inputs)
        batch = replace(ahead.found.batch, inputs=tensors[:inputs], targets=tensors[inputs:])
        return replace(ahead.found, batch=batch)

    def stop(self) -> None:
        """Forget what is to come, and read nothing ahead until `begin`. The thread ends with the read under way, which
        the next one waits for."""
        self._end()
        self._coming, self._read = deque(), None

    def wait(self) -> None:
        """Wait for a read that was under way as reads were stopped: the caller is about to read by itself."""
        if self._leaving is not None:
            self._leaving.join()
            self._leaving = None

    def _end(self) -> None:
        """Read no more ahead of what is to come, and forget what was."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._there = deque()
            self._changed.notify_all()
        if thread is not None:
            self._leaving = thread

    def _read_here(self) -> ReadResult:
        self.wait()
        read, wanted = self._read, self._coming[0]
        assert read is not None
        draws = rng.keyed(rng.key(self._seed, "data", wanted.step, wanted.microbatch))
        if self._refused:
            self._coming.popleft()
            with draws:
                return read(wanted)
        with draws:
            found, took = timed(lambda: read(wanted), self._device, watch=self._slow > 0)
        self._coming.popleft()
        slow = self._again if took.slow is None else took.slow
        if slow or took.slow is not None:
            self._slow = self._slow + 1 if slow else 0
        self._again = False
        if self._slow >= SLOW_READS:
            self.ahead, self._taken = True, 0
            self._start()
        return found

    def _start(self) -> None:
        before, self._leaving = self._leaving, None
        self._thread = threading.Thread(target=self._run, args=(before,), name="read-ahead", daemon=True)
        self._thread.start()

    def _run(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        torch.set_num_threads(self._threads)  # of this thread
        this = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is this and not self._may_read:
                    self._changed.wait()
                if self._thread is not this:
                    return
                wanted, read = self._coming[len(self._there)], self._read
            assert read is not None
            ahead = self._read_ahead(wanted, read)
            with self._changed:
                if self._thread is not this:
                    return
                self._there.append(ahead)
                self._changed.notify_all()

    @property
    def _may_read(self) -> bool:
        there = len(self._there)
        failed = there and self._there[-1].error is not None
        return not failed and there < min(AHEAD, len(self._coming), AGAIN - self._taken)

    def _read_ahead(self, wanted: WantedRead, read: Read) -> _Ahead:
        draws = _Draws(refuse=True)
        try:
            with draws:
                found = read(wanted)
            if draws.any:  # it made do without
                raise RuntimeError("the source draws from torch's generator while layers do")
            batch = replace(
                found.batch,
                inputs=found.batch.inputs if wanted.inputs else (),
                targets=found.batch.targets if wanted.targets else (),
            )
            tensors: tuple[Tensor, ...] = (*batch.inputs, *batch.targets)
            return _Ahead(replace(found, batch=batch), self._staging.begin(tensors))
        except BaseException as error:  # a source may call sys.exit
            return _Ahead(error=error, drew=draws.any)
