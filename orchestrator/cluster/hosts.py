"""What rank processes live in, as the runtime sees it: it reserves, starts, calls and kills. An interface, and no more.

`ray_hosts.py` is the real one; tests have one of plain processes, so that the same lifecycle runs without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from workers.actor import Home

CONNECT_S = 1.0
"""How long a machine that is there takes at most to accept or refuse a connection."""


class Gone(Exception):
    """A rank's process is dead, or its node is.

    Args:
        cause: how it ended, in words that follow "its process died:".
    """

    def __init__(self, cause: str, *, stillborn: bool = False, unheard: bool = False) -> None:
        super().__init__(cause)
        self.stillborn = stillborn
        """It never came up."""
        self.unheard = unheard
        """It cannot be reached just now, which need not mean that it is dead."""


class Hosts(Protocol):
    """The processes of one job's ranks."""

    async def reserve(self, ranks: Sequence[int], wait_s: float) -> str | None:
        """Reserve resources for each of `ranks`; why there are none, in words."""
        ...

    def start(self, rank: int) -> None:
        """Start the rank's process where its resources are."""
        ...

    async def reclaim(self, rank: int) -> Home:
        """Take over a rank that an earlier controller started, and have it report here from now on.

        Raises:
            Gone: there is no such process.
        """
        ...

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of `workers.actor.RankActor`; it is under way when this returns.

        The awaitable raises:
            Gone: the process died before it answered.
            RankError: the rank raised.
        """
        ...

    async def end(self, rank: int) -> None:
        """Kill the rank's process, if it lives, and give its resources back; safe again."""
        ...

    async def room(self) -> int:
        """For how many more ranks the cluster has room now."""
        ...

    def started(self, rank: int) -> None:
        """The rank is up: its node is like any other."""
        ...

    def failed(self, rank: int) -> str:
        """The rank did not start: its node gets no other for a while, each time for longer; what that means, in words,
        or nothing where its node is not known."""
        ...

    def shun(self, node: str) -> None:
        """Start no rank on `node` any more: it is to go. Ids of nodes are never used again."""
        ...

    async def release(self) -> None:
        """End all ranks; safe at any point, and again."""
        ...


async def stands(home: Home) -> bool:
    """Whether the process at `home` lives, as its machine tells at once: who is dead listens no more."""
    # Twice: where this process itself stood still meanwhile, the answer is there and the time is up.
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
