"""The last output of a rank's process, from the job's folder: it often says why the process died."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workers.process.output import cause_of_death, last_lines, rank_log_path

OUTPUT_S = 1.0
"""Time limit for reading a dead rank's output."""
OUTPUT_LINES = 40
"""Number of lines quoted: enough for the stack of one thread that crashed in a layer."""


@dataclass(frozen=True)
class LastOutput:
    """The last output of a rank's process."""

    cause: str | None = None
    """The signal or exit code by which it ended, if its output says so."""
    place: str = ""
    """Where its output is, in words that follow the cause."""
    lines: str = ""

    @classmethod
    def read(cls, path: Path) -> LastOutput:
        """Read the file at `path`. Blocks."""
        if not path.exists():
            return cls()
        return cls(
            cause_of_death(path), f"; its output is in {path}", "\n".join(last_lines(path, OUTPUT_LINES))
        )


async def last_output(folder: str, rank: int) -> LastOutput:
    """Return the last output of the process of `rank`; nothing if reading takes too long.

    Args:
        folder: the job's.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(OUTPUT_S):
            return await asyncio.to_thread(LastOutput.read, rank_log_path(folder, rank))
    return LastOutput()
