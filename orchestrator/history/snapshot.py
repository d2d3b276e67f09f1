"""A view kept beside the log it was folded from, so that a controller that takes over reads only the log's end.

A snapshot names the file and offset that it covers. If it does not match the log or has another version, the whole log
is folded instead.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.events.log import DamagedLogError, parse_line
from orchestrator.events.segments import whole_lines
from orchestrator.events.types import Record
from orchestrator.history.job_view import VERSION, JobView

SNAPSHOT = "view.json"
CHECKED_BYTES = 4096
"""Bytes of the log before the snapshot that are hashed, to see whether it is still the same log."""
RECENT_RECORDS = 2_000
"""Events before the snapshot that are read again, for drivers that have not read them yet."""
RECENT_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a log."""

    file: str
    """Name of one of its files."""
    offset: int
    """Bytes of the file that are folded."""
    sha256: str
    """Hash of the last `CHECKED_BYTES` before the offset."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
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


def position(log: Path, offset: int) -> Position:
    """The place `offset` bytes into the file `log`."""
    return Position(file=log.name, offset=offset, sha256=_digest(log, offset))


def write_snapshot(path: Path, view: bytes, at: Position) -> None:
    """Write the view, given as JSON, atomically: a reader sees the previous snapshot or this one.

    Raises:
        OSError: the disk is full or gone.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(json.dumps({"version": VERSION, **asdict(at)}).encode() + b"\n" + view)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def goes_further(snapshot: bytes, other: bytes) -> bool:
    """Whether the view in the file `snapshot` holds more of its log than that in `other`."""
    return _place(snapshot) > _place(other)


def _place(snapshot: bytes) -> tuple[str, int]:
    try:
        header = json.loads(snapshot.partition(b"\n")[0])
        return str(header["file"]), int(header["offset"])
    except (ValueError, KeyError, TypeError):
        return "", -1


def load(files: Sequence[Path], snapshot: Path) -> Loaded:
    """The view of the log in `files`, oldest first, from `snapshot` where that fits.

    Raises:
        OSError: a file cannot be read.
    """
    kept = _read_snapshot(snapshot, files)
    if kept is None:
        view, tail, recent = JobView(), [(file, 0) for file in files], []
    else:
        view, index, offset = kept
        tail = [(files[index], offset), *((file, 0) for file in files[index + 1 :])]
        recent = _before(files[index], offset, min(view.events, RECENT_RECORDS))
    folded, torn_bytes, damage = 0, 0, None
    try:
        for file, offset in tail:
            content = _read_from(file, offset)
            whole = whole_lines(content)
            torn_bytes = len(content) - len(whole)
            for record in _parsed(whole, file, offset):
                view.take(record)
                recent.append(record)
                folded += 1
    except DamagedLogError as error:
        damage = error
    recent = recent[-view.events :] if view.events else []
    return Loaded(
        view=view,
        recent=tuple(recent),
        torn_bytes=torn_bytes,
        folded=folded,
        from_snapshot=kept is not None,
        damage=damage,
    )


def _read_snapshot(path: Path, files: Sequence[Path]) -> tuple[JobView, int, int] | None:
    """(the view, index of the file and offset up to which it is folded); None if no snapshot matches."""
    try:
        header, _, text = path.read_bytes().partition(b"\n")
        fields = json.loads(header)
        if fields.pop("version") != VERSION:
            return None
        at = Position(**fields)
        index = next(index for index, file in enumerate(files) if file.name == at.file)
        if _digest(files[index], at.offset) != at.sha256:
            return None
        return JobView.from_json(text), index, at.offset
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None


def _digest(log: Path, offset: int) -> str:
    first = max(offset - CHECKED_BYTES, 0)
    with log.open("rb") as file:
        file.seek(first)
        return hashlib.sha256(file.read(offset - first)).hexdigest()


def _read_from(log: Path, offset: int) -> bytes:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()


def _parsed(content: bytes, log: Path, offset: int) -> Iterator[Record]:
    """The events in `content`, which begins `offset` bytes into `log`."""
    for number, line in enumerate(content.splitlines(), 1):
        try:
            record = parse_line(line, log, number)
        except DamagedLogError:
            with log.open("rb") as file:
                earlier = file.read(offset).count(b"\n")
            record = parse_line(line, log, earlier + number)
        yield record


def _before(log: Path, offset: int, most: int) -> list[Record]:
    """The last readable records before `offset`, at most `most`."""
    first = max(offset - RECENT_BYTES, 0)
    with log.open("rb") as file:
        file.seek(first)
        lines = file.read(offset - first).splitlines()
    if first > 0:
        del lines[0]
    records: list[Record] = []
    for line in reversed(lines[-most:] if most else []):
        try:
            records.append(Record.from_json(line.decode()))
        except (ValueError, KeyError, TypeError, AttributeError):
            break
    return records[::-1]
