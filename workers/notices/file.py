"""A file that appears when its node is about to leave: for drills and for a user's own sources."""

from __future__ import annotations

import math
from pathlib import Path

from workers.notices.notice import Notice, NoticeError

LIMIT_BYTES = 64
"""Most bytes read from the file."""


class NoticeFile:
    """A file on this node. It may hold the number of seconds left."""

    name = "file"
    every_s = 0.2
    of_node = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def look(self) -> tuple[Notice, ...]:
        """One notice while the file exists; content that is not a number of seconds is ignored.

        Raises:
            NoticeError: the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                content = file.read(LIMIT_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise NoticeError(f"{self._path} cannot be read: {error.strerror}") from error
        left_s = _seconds(content)
        said = f"{self._path} is there" + (f" and says {content!r}" if content else "")
        return (Notice(source=self.name, left_s=left_s, text=said),)


def _seconds(content: str) -> float | None:
    try:
        seconds = float(content)
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
