"""Folders in which the ranks of a job keep activations on their node: in shared memory, and on disk.

Whoever uses the folder in memory holds a lock on it, and the last one to let go removes it. A kill leaves it, for the
rank that takes the place; what nobody takes up again, the next job on the node removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from workers.activation_cache.slot_files import Tier, taken_bytes
from workers.process.host_memory import free_host_bytes
from workers.protocol.errors import JobError

MEMORY = Path("/dev/shm")
"""Shared memory of a Linux host."""
MEMORY_SHARE, DISK_SHARE = 1 / 4, 1 / 10
"""Parts of what would be free without them that activations may take, unless the job says how much."""
ABANDONED_S = 3600.0
"""After so long, a folder that nobody uses is nobody's."""
_PREFIX = "freshet-activations-"
_LOCK = "lock"


@dataclass
class CacheFolders:
    """One rank's part in its job's folders."""

    job: str
    """Folder of the job."""
    on_disk: Path | None
    """Where to keep them on disk, named by the user; None: in the job's folder, after those in memory."""
    memory_bytes: int | None = None
    """The most in memory; None: a quarter of what is free."""
    disk_bytes: int | None = None
    """The most on disk; None: a tenth of what is free."""
    memory: Path = field(default_factory=lambda: MEMORY)
    _lock: int | None = field(default=None, init=False)
    _in_use: bool = field(default=False, init=False)
    """Whether it has taken part in the folder in memory, and has not left it for good."""

    def check(self) -> None:
        """Check that a folder that a user named can be written to.

        Raises:
            JobError: it cannot.
        """
        if self.on_disk is None:
            return
        try:
            assert self._disk_folder is not None
            self._disk_folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise JobError(
                f"freeze.cache: cannot keep activations in {self.on_disk}: {reason}; name a folder that can be"
                ' written to on every node, or set freeze.cache to "auto" or "off"'
            ) from error

    def open(self, warn: Callable[[str], None]) -> list[Tier]:
        """Take part in the folders, and make them if they are not there."""
        tiers = [self._in_memory()] if self.on_disk is None else []
        disk = self._disk_folder
        if disk is not None:
            try:
                disk.mkdir(parents=True, exist_ok=True)
                tiers.append(_tier(disk, self.disk_bytes, DISK_SHARE, _free_disk_bytes(disk)))
            except OSError as error:
                warn(f"no activations of frozen layers are kept in {disk}: {error.strerror}")
        return [tier for tier in tiers if tier is not None and tier.bound_bytes]

    def _in_memory(self) -> Tier | None:
        if not os.access(self.memory, os.W_OK | os.X_OK):
            return None
        self._remove_abandoned()
        folder = self._memory_folder
        for _ in range(3):  # the last one to leave may remove it meanwhile
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                found = folder.lstat()
                if folder.is_symlink() or found.st_uid != os.getuid():
                    return None
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if os.fstat(lock).st_ino == (folder / _LOCK).stat().st_ino:
                    os.utime(folder / _LOCK)
                    free_bytes = min(_free_disk_bytes(folder), free_host_bytes())
                    tier = _tier(folder, self.memory_bytes, MEMORY_SHARE, free_bytes)
                    self._lock, self._in_use = lock, True
                    return tier
            except OSError:
                pass
            os.close(lock)
        return None

    def release(self) -> None:
        """Take part no more, and leave all as it is."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Take part no more; whoever is the last one removes what is in memory."""
        self.release()
        if self._in_use:
            self._in_use = False
            _remove_unused(self._memory_folder)

    def remove(self) -> None:
        """Remove what is on disk: the job is done. Others that still read have their files open."""
        if self._disk_folder is not None:
            shutil.rmtree(self._disk_folder, ignore_errors=True)

    @property
    def _name(self) -> str:
        return _PREFIX + hashlib.sha256(os.path.abspath(self.job).encode()).hexdigest()[:16]

    @property
    def _memory_folder(self) -> Path:
        return self.memory / self._name

    @property
    def _disk_folder(self) -> Path | None:
        """None: the job's folder is no folder of a file system."""
        if self.on_disk is not None:
            return self.on_disk / self._name
        job = self.job.removeprefix("file://")
        return None if "://" in job else Path(job) / "activations"

    def _remove_abandoned(self) -> None:
        for folder in [*self.memory.glob(f"{_PREFIX}*")]:
            if folder != self._memory_folder:
                _remove_unused(folder, ABANDONED_S)


def left_behind(job: str) -> bool:
    """Remove what ranks of a job that has ended have left in this node's memory; whether some of them still have it."""
    folder = CacheFolders(job, None)._memory_folder
    _remove_unused(folder)
    return folder.exists()


def _tier(folder: Path, most_bytes: int | None, share: float, free_bytes: int) -> Tier:
    if most_bytes is None:
        most_bytes = int(share * (free_bytes + taken_bytes(folder)))
    return Tier(folder, most_bytes)


def _free_disk_bytes(folder: Path) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def _remove_unused(folder: Path, since_s: float = 0.0) -> None:
    """Remove `folder` if nobody holds its lock, nor has taken it for `since_s`."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_mtime <= time.time() - since_s:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # somebody does
        pass
    finally:
        os.close(lock)
