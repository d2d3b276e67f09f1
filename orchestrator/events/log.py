"""The event log as a file: appends records and reads them back. Knows no event by name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from orchestrator.events.types import Record

_BLOCK = 1 << 16
"""Bytes per read when looking for a log's last line."""


class EventLog:
    """Appends records to a file, each flushed as it is written. `size` is the bytes of whole lines in the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # No buffer: bytes that could not be written must not be written again with the next line.
        self._file = path.open("a+b", buffering=0)
        self.path = path
        self.size = self._drop_torn_line()

    def append(self, record: Record) -> None:
        """Write `record` through to the file.

        Raises:
            OSError: the disk is full or gone; no part of the line remains.
        """
        whole = self._file.seek(0, os.SEEK_END)
        line = memoryview(record.to_json().encode() + b"\n")
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(whole)
            raise
        self.size = self._file.tell()

    def close(self) -> None:
        self._file.close()

    def _drop_torn_line(self) -> int:
        """Cut what a killed writer left after its last newline, so that the next record has its own line. Return the
        remaining bytes."""
        size = end = self._file.seek(0, os.SEEK_END)
        while end > 0:
            first = max(end - _BLOCK, 0)
            self._file.seek(first)
            newline = self._file.read(end - first).rfind(b"\n")
            end = first
            if newline >= 0:
                end += newline + 1
                break
        if end < size:
            self._file.truncate(end)
        return end


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
