"""The event log of a job whose folder is a URI: such stores cannot append, so the log is cut into segments.

Each start of a controller writes its own segments, first to this machine's disk; they are copied to the store every few
seconds. A segment only grows, and no two starts share one, so no copy can replace a longer one. A reader takes the
longer of each segment's two copies, ordered by epoch and start.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from orchestrator.events.log import NO_LINE, EventLog, line_sha256
from orchestrator.events.types import Record
from workers.checkpoint.storage import Folder

FOLDER = "events"
"""Name in the job's folder."""
SEGMENT_BYTES = 1 << 20
"""A segment of this size is complete, and another one follows it."""
PUBLISH_S = 5.0
"""Seconds between copies: the most that the log loses if the controller's node fails."""


class Segments:
    """All segments of a job.

    Args:
        local: the folder on this machine.
        remote: the folder in the store.
    """

    def __init__(self, local: Path, remote: Folder) -> None:
        self._local = local
        self._remote = remote
        self._published: dict[str, int] = {}
        """Name -> bytes of the copy in the store."""
        self.published_head: str | None = None
        """Hash of the newest line that this process has copied to the store."""

    def files(self) -> list[Path]:
        """The segments on this machine, in order."""
        return sorted(self._local.glob("*.jsonl"))

    def fetch(self) -> list[Path]:
        """Copy each segment that is longer in the store from there. Return `files`."""
        for name in self._remote.names():
            path = self._local / name
            known = path.stat().st_size if path.exists() else -1
            if name.endswith(".jsonl") and known < SEGMENT_BYTES and self._remote.size(name) > known:
                self._local.mkdir(parents=True, exist_ok=True)
                replace_file(path, self._remote.read(name))
        return self.files()

    def assemble(self, path: Path) -> None:
        """Write all segments on this machine to the file `path`, atomically."""
        parts = (whole_lines(file.read_bytes()) for file in self.files())
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, b"".join(parts))

    def begin(self, epoch: int) -> SegmentedLog:
        """Begin a log for one start of a controller, after all segments of earlier incarnations."""
        contents = (path.read_bytes() for path in reversed(self.files()))
        before = next(filter(None, map(head_of, contents)), NO_LINE)
        return SegmentedLog(self._local, epoch, time.time_ns() // 1_000_000, before)

    def newest_epoch(self) -> int:
        """Epoch of the newest controller with a segment on this machine."""
        files = self.files()
        return int(files[-1].name.partition("-")[0]) if files else 0

    def publish(self) -> None:
        """Copy each segment that is longer on this machine to the store, also those of a killed controller.

        Raises:
            OSError: the store cannot be read or written.
        """
        for path in self.files():
            if path.name not in self._published:
                self._published[path.name] = self._remote.size(path.name)
            if path.stat().st_size > self._published[path.name]:
                content = path.read_bytes()
                self._remote.write(path.name, content)
                self._published[path.name] = len(content)
                self.published_head = head_of(content)


class SegmentedLog:
    """Appends records to segments of one start.

    Args:
        epoch: the controller's epoch.
        started_ms: orders two starts of the same epoch if the store has nothing of the first yet.
        before: hash of the last line before these segments.
    """

    def __init__(self, folder: Path, epoch: int, started_ms: int, before: str) -> None:
        self._folder = folder
        self._prefix = f"{epoch:06d}-{started_ms:013d}-"
        self._number = 0
        self._log = EventLog(self.path, before)

    @property
    def path(self) -> Path:
        """Path of the segment that is being written."""
        return self._folder / f"{self._prefix}{self._number:06d}.jsonl"

    @property
    def size(self) -> int:
        """Bytes of that segment."""
        return self._log.size

    @property
    def head(self) -> str:
        """Hash of the newest line."""
        return self._log.head

    def append(self, record: Record) -> None:
        """Write `record` through to the newest segment.

        Raises:
            OSError: the disk is full or gone; no part of the line remains.
        """
        if self._log.size >= SEGMENT_BYTES:
            self._log.close()
            self._number += 1
            self._log = EventLog(self.path, self._log.head)
        self._log.append(record)

    def close(self) -> None:
        self._log.close()


def whole_lines(content: bytes) -> bytes:
    """`content` without what a killed writer left after its last newline."""
    return content[: content.rfind(b"\n") + 1]


def head_of(content: bytes) -> str | None:
    """Hash of the last whole line of `content`; None if it has none."""
    whole = whole_lines(content)
    return line_sha256(whole[whole.rfind(b"\n", 0, -1) + 1 :]) if whole else None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the previous content or this one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
