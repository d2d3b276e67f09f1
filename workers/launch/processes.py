"""The ranks of a job as processes of a forkserver, and what they and their starter tell each other. No Ray.

Knows no message: `ranks.py` trains with it, `profile.py` measures.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any

GRACE_S = 5.0
"""Seconds that ranks may go on after one of them has failed."""
AT_FIRST_USE = ("encodings.idna", "numpy.ctypeslib")
"""Modules that a rank's first connection and its first checkpoint import: milliseconds in each process."""


def forkserver(imports: Sequence[str] = ()) -> BaseContext:
    """The process that forks ranks: it imports once what each of them needs, and `imports`.

    Python has one for all, and what it imports is fixed when it forks for the first time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            *("torch", "workers.rank", "workers.launch.ranks", *AT_FIRST_USE),
            *imports,
            "workers.launch.uncollected",
        ]
    )
    return context


@dataclass(frozen=True)
class Died:
    """Heard of a process that ended before it was done."""

    exit_code: int | None
    """Minus the number of the signal that ended it; None: not known."""


class LaunchedProcesses:
    """Started as the context is entered; on leaving, told to close (or ended, after an exception) and waited for.

    Args:
        ranks: how many.
        target: what each runs, as `target(argument, rank, pipe)`; must be importable.
        imports: modules that each would import.
    """

    def __init__(
        self,
        ranks: int,
        target: Callable[[Any, int, Connection], None],
        argument: Any,
        imports: Sequence[str] = (),
    ) -> None:
        context: Any = forkserver(imports)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(argument, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._open = dict(zip(self._pipes, range(ranks), strict=True))
        self._failed = False

    def __enter__(self) -> LaunchedProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.tell("close")
        else:
            for process in self._processes:
                process.terminate()
        for process in self._processes:
            process.join()

    def receive(self) -> Iterator[tuple[int, Any]]:
        """(rank, message) as they come, until all ranks are done; after a failure for no longer than `GRACE_S` more."""
        while self._open:
            ready = wait(list(self._open), GRACE_S if self._failed else None)
            if not ready:
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    message = self._death(self._open[pipe])
                yield self._open[pipe], message

    def _death(self, rank: int) -> Died:
        """The pipe of `rank` has closed: its process ends."""
        process = self._processes[rank]
        process.join(GRACE_S)
        return Died(process.exitcode)

    def done(self, rank: int, *, failed: bool = False) -> None:
        """Nothing more is expected of `rank`."""
        del self._open[self._pipes[rank]]
        self._failed |= failed

    def tell(self, message: Any) -> None:
        """Send `message` to every rank; one that has failed meanwhile tells so itself."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(message)
