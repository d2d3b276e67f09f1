"""Reads the output of a job's ranks from the files in its folder, also while they grow. Knows no cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from orchestrator.events.file_end import file_end
from workers.process.output import LOGS, local_folder, older_part, rank_log_path
from workers.protocol.errors import JobError

_NAME = re.compile(r"rank-(\d+)\.log")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Colours, cursors and titles of terminals."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class RankLog:
    """Reads one rank's output, piece by piece."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._line = b""
        """An incomplete last line."""

    def fresh(self) -> list[str]:
        """The lines since the last call, the older half of the output first."""
        content = b""
        if self._file is None:
            older = older_part(self._path)
            content += older.read_bytes() if older.exists() else b""
            self._open()
        while self._file is not None:
            content += self._file.read()
            if not self._was_replaced():
                break
            # What the process wrote before it changed to a new file.
            content += self._file.read()
            self._open()
        *lines, self._line = (self._line + content).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def rest(self) -> list[str]:
        """The unfinished last line."""
        line, self._line = self._line, b""
        return [line.decode(errors="replace")] if line else []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        self.close()
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            self._file = None

    def _was_replaced(self) -> bool:
        assert self._file is not None
        try:
            return os.stat(self._path).st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False


class JobLogs:
    """Reads the output of a job's ranks.

    Args:
        output: the job's folder.
        rank: only this rank's; None: all ranks, including later ones.
    """

    def __init__(self, output: str, rank: int | None = None) -> None:
        self._output = output
        self._rank = rank
        self._logs: dict[int, RankLog] = {}

    def check(self) -> None:
        """Raises:
        JobError: there is no output of the rank, or of any.
        """
        there = ranks_with_output(self._output)
        where = local_folder(self._output) / LOGS
        if not there:
            raise JobError(
                f"{where} holds no rank's output: each rank writes it on its own node; look there, or put job.output on"
                " a file system that all nodes see"
            )
        if self._rank is not None and self._rank not in there:
            raise JobError(
                f"{where} holds no output of rank {self._rank}; it has {', '.join(map(str, there))}"
            )

    def fresh(self) -> Iterator[tuple[int, str]]:
        """(rank, line) for all lines since the last call."""
        for rank in ranks_with_output(self._output):
            if self._rank in (None, rank):
                log = self._logs.setdefault(rank, RankLog(rank_log_path(self._output, rank)))
                yield from ((rank, line) for line in log.fresh())

    def rest(self) -> Iterator[tuple[int, str]]:
        """(rank, line) for the unfinished last lines."""
        for rank, log in sorted(self._logs.items()):
            yield from ((rank, line) for line in log.rest())
            log.close()


@dataclass(frozen=True)
class OutputEnd:
    """The newest output of a rank."""

    text: str
    """Without escape sequences for terminals."""
    cut: bool
    """Whether there is more before it."""


def output_end(output: str, rank: int, most_bytes: int) -> OutputEnd | None:
    """The newest output of `rank`, at most `most_bytes` of it; None where this machine sees none."""
    folder, path = local_folder(output), rank_log_path(output, rank)
    newest = file_end(folder, str(path.relative_to(folder)), most_bytes)
    if newest is None:
        return None
    content, cut = newest.content, newest.cut
    left = most_bytes - len(content)
    if not cut and left > 0:
        before = file_end(folder, str(older_part(path).relative_to(folder)), left)
        if before is not None:
            content, cut = before.content + content, before.cut
    return OutputEnd(_for_people(content.decode(errors="replace")), cut)


def _for_people(text: str) -> str:
    """`text` as a terminal would show it at last: a line that was written over, as progress bars do, once."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in _ESCAPES.sub("", text).split("\n"))
    return _CONTROL.sub("\ufffd", "\n".join(lines))


def ranks_with_output(output: str) -> tuple[int, ...]:
    """The ranks whose output this machine sees, in order."""
    folder = local_folder(output) / LOGS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return tuple(sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name))))
