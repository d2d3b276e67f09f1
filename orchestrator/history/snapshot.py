"""A view kept beside the log it was folded from, so that a controller that takes over reads only the log's end.

A snapshot names the file and offset that it covers. If it does not match the log or has another version, the whole log
is folded instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.events.log import DamagedLogError, open_regular, parse_line
from orchestrator.events.segments import replace_file
from orchestrator.events.types import Record
from orchestrator.history.job_view import VERSION, JobView

SNAPSHOT = "view.json"
CHECKED_BYTES = 4096
"""Bytes of the log before the snapshot that are hashed, to see whether it is still the same log."""
RECENT_RECORDS = 2_000
"""Events before the snapshot that are read again, for drivers that have not read them yet."""
RECENT_BYTES = 2 << 20
LONGEST_LINE = 32 << 20
"""Bytes of a line beyond which it is no event."""
LONGEST_HEADER = 1 << 16
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LogPosition:
    """A place in a log."""

    file: str
    """Name of one of its files."""
    offset: int
    """Bytes of the file that are folded."""
    sha256: str
    """Hash of the last `CHECKED_BYTES` before the offset."""


@dataclass(frozen=True, kw_only=True)
class LoadedLog:
    """A log as it was read."""

    view: JobView
    recent: tuple[Record, ...]
    """The newest events since the newest start, perhaps not all."""
    torn_bytes: int
    """Bytes of an unfinished last line, which is left out."""
    folded: int
    """Events that were read to bring the view up to date."""
    from_snapshot: bool
    damage: DamagedLogError | None
    """Names the file and line that is no event. Nothing after it is read."""
    position: LogPosition | None
    """Where the view ends; None if the log is empty or damaged."""


def position(log: Path, offset: int) -> LogPosition:
    """The place `offset` bytes into the file `log`."""
    return LogPosition(file=log.name, offset=offset, sha256=_digest(log, offset))


def position_of(snapshot: bytes) -> LogPosition | None:
    """The place up to which the view in the file `snapshot` holds its log; None if it is no snapshot."""
    try:
        fields = json.loads(snapshot.partition(b"\n")[0])
        at = LogPosition(file=fields["file"], offset=fields["offset"], sha256=fields["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return at if type(at.offset) is int and at.offset >= 0 else None


def write_snapshot(path: Path, view: bytes, at: LogPosition) -> None:
    """Write the view, given as JSON, atomically: a reader sees the previous snapshot or this one.

    Raises:
        OSError: the disk is full or gone.
    """
    replace_file(path, json.dumps({"version": VERSION, **asdict(at)}).encode() + b"\n" + view)


def goes_further(snapshot: bytes, other: bytes) -> bool:
    """Whether the view in the file `snapshot` holds more of its log than that in `other`."""
    return _place(snapshot) > _place(other)


def _place(snapshot: bytes) -> tuple[str, int]:
    try:
        header = json.loads(snapshot.partition(b"\n")[0])
        return str(header["file"]), int(header["offset"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", -1


def load(
    files: Sequence[Path],
    snapshot: Path,
    *,
    known: tuple[JobView, LogPosition] | None = None,
    recent: bool = True,
) -> LoadedLog:
    """The view of the log in `files`, oldest first, from what is known of it, or from `snapshot`, where that fits.

    Args:
        known: the view and the position of an earlier load, a view that may be folded further.
        recent: whether to return the newest events too.

    Raises:
        OSError: a file cannot be read.
    """
    place = _place_of(known[1], files) if known is not None else None
    kept = (known[0], *place) if known is not None and place is not None else _read_snapshot(snapshot, files)
    view, index, offset = kept if kept is not None else (JobView(), 0, 0)
    records = _before(files[index], offset, min(view.events, RECENT_RECORDS)) if recent and kept else []
    folded, torn_bytes, damage, end = 0, 0, None, None
    try:
        for file in files[index:]:
            torn_bytes = 0
            for line in _lines(file, offset):
                if not line.endswith(b"\n"):
                    torn_bytes = len(line)
                    break
                record = _parsed(line, file, offset)
                view.fold(record)
                folded += 1
                offset += len(line)
                if recent:
                    records.append(record)
            end, offset = (file, offset), 0
    except DamagedLogError as error:
        damage = error
    return LoadedLog(
        view=view,
        recent=tuple(records[-view.events :] if view.events else ()),
        torn_bytes=torn_bytes,
        folded=folded,
        from_snapshot=kept is not None,
        damage=damage,
        position=position(*end) if end is not None and damage is None else None,
    )


def _place_of(at: LogPosition, files: Sequence[Path]) -> tuple[int, int] | None:
    """Index of the file and offset of the position `at`; None if the log in `files` is not the one it was taken of.

    Raises:
        OSError: the file cannot be read.
    """
    for index, file in enumerate(files):
        if file.name == at.file:
            return (index, at.offset) if _digest(file, at.offset) == at.sha256 else None
    return None


def _read_snapshot(path: Path, files: Sequence[Path]) -> tuple[JobView, int, int] | None:
    """(the view, index of the file and offset up to which it is folded); None if no snapshot matches."""
    try:
        with open_regular(path) as file:
            fields = json.loads(file.readline(LONGEST_HEADER))
            if fields.pop("version") != VERSION:
                return None
            at = LogPosition(**fields)
            place = _place_of(at, files)
            return None if place is None else (JobView.from_json(file.read(LONGEST_LINE)), *place)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _digest(log: Path, offset: int) -> str:
    first = max(offset - CHECKED_BYTES, 0)
    with open_regular(log) as file:
        file.seek(first)
        return hashlib.sha256(file.read(max(offset - first, 0))).hexdigest()


def _lines(log: Path, offset: int) -> Iterator[bytes]:
    """The lines of `log` from `offset` on, each with its newline, and perhaps an unfinished one at the end.

    Raises:
        DamagedLogError: a line has more than `LONGEST_LINE` bytes.
    """
    with open_regular(log) as file:
        file.seek(offset)
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                number = _number(log, file.tell() - len(line))
                raise DamagedLogError(
                    f"{log}, line {number}, is no event: it has more than {LONGEST_LINE:,} bytes"
                )
            yield line


def _parsed(line: bytes, log: Path, offset: int) -> Record:
    """The event in `line`, which begins `offset` bytes into `log`."""
    try:
        return parse_line(line, log, 0)
    except DamagedLogError:
        return parse_line(line, log, _number(log, offset))


def _number(log: Path, offset: int) -> int:
    """Number of the line that begins `offset` bytes into `log`."""
    earlier = 0
    with open_regular(log) as file:
        while offset > 0 and (block := file.read(min(offset, BLOCK))):
            earlier += block.count(b"\n")
            offset -= len(block)
    return earlier + 1


def _before(log: Path, offset: int, most: int) -> list[Record]:
    """The last readable records before `offset`, at most `most`."""
    first = max(offset - RECENT_BYTES, 0)
    with open_regular(log) as file:
        file.seek(first)
        lines = file.read(offset - first).splitlines()
    if first > 0:
        del lines[0]
    records: list[Record] = []
    for line in reversed(lines[-most:] if most else []):
        try:
            records.append(parse_line(line, log, 0))
        except DamagedLogError:
            break
    return records[::-1]
