"""The folder in which this process compiles: fresh, its own, and gone with it.

What lies there is machine code for this processor, and what the compiler would load from there again it would run. So
no other process writes there, nothing is taken from an earlier one, and whatever a killed process left is removed.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "freshet-compiled-"
_LOCK = "lock"


class PrivateFolder:
    """A new folder that only this user may enter, locked while this process lives."""

    def __init__(self) -> None:
        remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        made = self.path / "new"
        self._lock: int | None = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(self.path / _LOCK)  # nobody finds it unlocked
        atexit.register(self.remove)

    def remove(self) -> None:
        """Delete it; what was loaded from there stays loaded."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_left() -> None:
    """Delete the folders of this user whose processes are gone."""
    for path in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
