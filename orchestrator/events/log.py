"""The event log as a file: appends records and reads them back. Knows no event by name.

Each line carries the sha256 of the line before it: of its bytes as they lie in the file, newline included.
`orchestrator/verify/chain.py` checks it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from orchestrator.events.types import Record

NO_LINE = hashlib.sha256().hexdigest()
"""Hash that a log's first line carries: that of nothing."""
_BLOCK = 1 << 16
"""Bytes per read when looking for a log's last line."""


class EventLog:
    """Appends records to a file, each flushed as it is written. `size` is the bytes of whole lines in the file, `head`
    the hash of the last one.

    Args:
        before: hash of the line before the file's first.
    """

    def __init__(self, path: Path, before: str = NO_LINE) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # No buffer: bytes that could not be written must not be written again with the next line.
        self._file = path.open("a+b", buffering=0)
        self.path = path
        self.size, last = self._drop_torn_line()
        self.head = line_sha256(last) if last else before

    def append(self, record: Record) -> None:
        """Write `record` through to the file.

        Raises:
            OSError: the disk is full or gone; no part of the line remains.
        """
        whole = self._file.seek(0, os.SEEK_END)
        line = record.to_json(self.head).encode() + b"\n"
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(whole)
            raise
        self.size = self._file.tell()
        self.head = line_sha256(line)

    def close(self) -> None:
        self._file.close()

    def _drop_torn_line(self) -> tuple[int, bytes]:
        """Cut what a killed writer left after its last newline, so that the next record has its own line. Return the
        remaining bytes, and the last line of them."""
        size = self._file.seek(0, os.SEEK_END)
        end = self._line_begin(size)
        if end < size:
            self._file.truncate(end)
        begin = self._line_begin(end - 1)
        self._file.seek(begin)
        return end, self._file.read(end - begin)

    def _line_begin(self, place: int) -> int:
        """Where the line that `place` lies in begins: after the last newline before it."""
        while place > 0:
            first = max(place - _BLOCK, 0)
            self._file.seek(first)
            newline = self._file.read(place - first).rfind(b"\n")
            if newline >= 0:
                return first + newline + 1
            place = first
        return 0


def line_sha256(line: bytes) -> str:
    """Hash of a line of a log, newline included, as the next line carries it."""
    return hashlib.sha256(line).hexdigest()


class DamagedLogError(ValueError):
    """A line of a log, other than its last, is no event."""


def read_log(path: Path) -> Iterator[Record]:
    """The records of a log, oldest first. A torn last line (its writer was killed) is left out.

    Raises:
        DamagedLogError: a line is damaged; names the file and the line.
    """
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            yield parse_line(line, path, number)


def open_regular(path: Path) -> BinaryIO:
    """Open the file `path` to read its bytes. Never waits, as opening a pipe does until someone writes to it.

    Raises:
        OSError: it cannot be opened, or is a pipe, a socket, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def parse_line(line: bytes, path: Path, number: int) -> Record:
    """The record in one line of a log.

    Raises:
        DamagedLogError: there is none; names the file and the line.
    """
    try:
        return Record.from_json(line.decode())
    except RecursionError:
        raise DamagedLogError(f"{path}, line {number}, is no event: it is nested too deeply") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedLogError(f"{path}, line {number}, is no event: {error}") from error
