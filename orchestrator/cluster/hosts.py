"""The interface through which the runtime reserves resources, and starts, calls and kills rank processes.

`ray_hosts.py` implements it; tests implement it with plain processes, to run the same lifecycle without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from typing import Any, Protocol

from workers.actor import Home
from workers.process.process_times import ProcessTimes

CONNECT_S = 1.0
"""Time limit for a reachable machine to accept or refuse a connection."""


class RankGone(Exception):
    """A rank's process is dead, or its node is.

    Args:
        cause: how it ended, in words that follow "its process died:".
    """

    def __init__(self, cause: str, *, stillborn: bool = False, unreachable: bool = False) -> None:
        super().__init__(cause)
        self.stillborn = stillborn
        """It never started."""
        self.unreachable = unreachable
        """It cannot be reached now, but may not be dead."""


class Hosts(Protocol):
    """The processes of one job's ranks."""

    async def reserve(self, ranks: Sequence[int], wait_s: float) -> str | None:
        """Reserve resources for each of `ranks`; return in words why that failed, or None."""
        ...

    def start(self, rank: int) -> None:
        """Start the rank's process where its resources are."""
        ...

    async def reclaim(self, rank: int) -> Home:
        """Take over a rank that an earlier controller started, and have it report here from now on.

        Raises:
            RankGone: there is no such process.
        """
        ...

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of `workers.actor.RankActor`; it is under way when this returns.

        The awaitable raises:
            RankGone: the process died before it answered.
            RankError: the rank raised.
        """
        ...

    async def look(self, home: Home) -> ProcessTimes | None:
        """Look at the process at `home` from its own machine; None: nobody there can.

        It may never return, if the machine stands still.
        """
        ...

    async def end(self, rank: int) -> None:
        """Kill the rank's process, if it lives, and release its resources; safe more than once."""
        ...

    async def room(self, without: Collection[str] = ()) -> int:
        """Return for how many more ranks the cluster has room now, on other nodes than `without`."""
        ...

    def placed_on(self, node: str) -> frozenset[int]:
        """Return the ranks that this controller has given room on `node`: they start there, or are up."""
        ...

    def started(self, rank: int) -> None:
        """Record that the rank is up: its node is usable again."""
        ...

    def failed(self, rank: int) -> str:
        """Record that the rank did not start: its node gets no other for a while, each time for longer.
        Return that in words, or nothing if its node is not known."""
        ...

    def shun(self, node: str) -> None:
        """Start no more ranks on the draining `node`. Node ids are never reused."""
        ...

    def readmit(self, node: str) -> None:
        """Start ranks on `node` again, though it was to be shunned."""
        ...

    async def release(self) -> None:
        """End all ranks; safe at any point, and more than once."""
        ...


async def stands(home: Home) -> bool:
    """Whether the process at `home` lives: a dead one no longer listens, and its machine says so at once."""
    # Twice: if this process itself was suspended, the first attempt times out although the answer is there.
    for _ in range(2):
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(home.host, home.port)
        except TimeoutError:
            continue
        except OSError:
            return False
        writer.close()
        return True
    return False
