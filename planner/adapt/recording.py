"""A record of everything that a live planner is told and answers, from which `replaying.py` repeats its decisions.

The file is JSON lines, compressed in gzip members that follow each other: what was written before the planner was
killed can be read, but for its last member perhaps, and the next planner appends. The first line of each planner's life
says what it began with. A plan is written once per life, and named by its number from then on.
"""

from __future__ import annotations

import gzip
import json
import mmap
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from planner.adapt.live import Heard, LivePlanner, LiveStart, Question
from planner.adapt.policy import MoveDecision
from planner.codec import from_json, to_json
from planner.observed import StepTimes
from planner.plan import Plan
from planner.search.replan import Replanner

FORMAT, READ = 3, (2, 3)
"""Version of what is written here, and those that are read."""
MOST_BYTES = 1 << 30
"""Size limit of the file; a recording that would exceed it ends."""
MEMBER_BYTES, MEMBER_S = 1 << 16, 1.0
"""Lines wait until there are so many bytes of them, or so long."""
MEMBER_BEGIN = b"\x1f\x8b\x08"
"""The first bytes of a gzip member (RFC 1952, section 2.3.1)."""
PIECE_BYTES = 1 << 16


class RecordingError(ValueError):
    """A file is no recording of this version; says why."""


@dataclass(frozen=True, kw_only=True)
class Began:
    """A planner's life begins."""

    start: LiveStart
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan that later lines name by its number."""

    number: int
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Took:
    """Observations, and what the planner answered."""

    batch: tuple[StepTimes, ...]
    plans: tuple[int, ...]
    """By number."""
    members: tuple[int, ...]
    heard: Heard


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A new generation began."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Given:
    """The replanner that the planner plans with from now on."""

    replanner: Replanner


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question came in. What the planner learns afterwards does not count for its answer."""

    number: int
    question: Question


@dataclass(frozen=True, kw_only=True)
class PlannerAnswered:
    """The answer to the question of this number."""

    number: int
    decision: MoveDecision


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The recording ends, though the planner lives."""

    reason: str


Entry = Began | Planned | Took | Kept | Given | Asked | PlannerAnswered | Ended
KINDS: dict[str, type[Entry]] = {kind.__name__: kind for kind in get_args(Entry)} | {
    "Answered": PlannerAnswered
}
"""By the name in a line; `Answered` is that of earlier recordings."""


def line_of(entry: Entry) -> bytes:
    """An entry as a line of the file: its kind, and its fields in a list of one."""
    return b"%b [%b]\n" % (type(entry).__name__.encode(), to_json(entry))


def entry_of(line: str) -> Entry:
    """The entry that `line_of` wrote, or an earlier version of it.

    Raises:
        ValueError: the line is none.
    """
    name, _, fields = line.partition(" ")
    if name == "PlansWith":
        return _given_in_format_2(fields)
    if name not in KINDS:
        raise ValueError(f"unknown kind of entry {name[:40]!r}")
    return from_json(KINDS[name], fields.strip().removeprefix("[").removesuffix("]"))


def _given_in_format_2(fields: str) -> Given:
    """The replanner of a line of format 2, among whose fields lie some of its schedule's."""
    match json.loads(fields):
        case [{"schedule": dict(schedule), "stages": stages, "programs": programs, **others}]:
            whole = {**schedule, "stages": stages, "programs": programs}
            return Given(replanner=from_json(Replanner, json.dumps({**others, "schedule": whole})))
        case _:
            raise ValueError("it lacks a replanner's schedule")


class Writer:
    """Appends entries to a file. Its methods may be called from several threads.

    Args:
        path: its folder is made if there is none.
        most_bytes: of the file.
        clock: seconds.
    """

    def __init__(
        self, path: Path, *, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._clock = clock
        self._turn = threading.Lock()
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._written_s = clock()
        self._ended = False
        self._trouble: str | None = None

    def write(self, entry: Entry, *, now: bool = False) -> None:
        """Append `entry`; at once, or together with others a little later."""
        with self._turn:
            if self._ended:
                return
            line = line_of(entry)
            self._lines.append(line)
            self._waiting_bytes += len(line)
            late = self._clock() - self._written_s >= MEMBER_S
            if now or late or self._waiting_bytes >= MEMBER_BYTES:
                self._flush()

    def trouble(self) -> str | None:
        """Why the recording has ended, once; None: it goes on, or this was said."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def _flush(self) -> None:
        content = gzip.compress(b"".join(self._lines), compresslevel=4)
        self._lines, self._waiting_bytes, self._written_s = [], 0, self._clock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                if file.tell() + len(content) > self._most_bytes:
                    reason = f"the recording would take more than {self._most_bytes:,} bytes and ends here"
                    content = gzip.compress(line_of(Ended(reason=reason)))
                    self._end(f"{reason}: {self._path}")
                file.write(content)
        except OSError as error:
            self._end(f"the recording {self._path} ends: {error.strerror or error}")

    def _end(self, trouble: str) -> None:
        self._ended, self._trouble = True, trouble


class RecordedPlanner(LivePlanner):
    """A live planner that writes down what it is told and answers."""

    def __init__(self, start: LiveStart, writer: Writer) -> None:
        super().__init__(start)
        self._writer = writer
        self._numbers: dict[Plan, int] = {}
        self._questions = 0
        writer.write(Began(start=start), now=True)

    def observe(self, batch: Iterable[StepTimes], plans: Sequence[Plan], members: Sequence[int]) -> Heard:
        taken = tuple(batch)
        heard = super().observe(taken, plans, members)
        numbers = tuple(self._number(plan) for plan in plans)
        self._writer.write(
            Took(batch=taken, plans=numbers, members=tuple(members), heard=heard), now=bool(heard.changes)
        )
        trouble = self._writer.trouble()
        return heard if trouble is None else replace(heard, warnings=(trouble,))

    def keep(self, ranks: Iterable[int]) -> None:
        kept = tuple(ranks)
        super().keep(kept)
        self._writer.write(Kept(ranks=kept), now=True)

    def plan_with(self, replanner: Replanner) -> None:
        super().plan_with(replanner)
        self._writer.write(Given(replanner=replanner), now=True)

    def considering(self, question: Question) -> Callable[[], MoveDecision]:
        decide = super().considering(question)
        self._questions += 1
        number = self._questions
        self._writer.write(Asked(number=number, question=question), now=True)

        def answer() -> MoveDecision:
            decision = decide()
            self._writer.write(PlannerAnswered(number=number, decision=decision), now=True)
            return decision

        return answer

    def _number(self, plan: Plan) -> int:
        if plan not in self._numbers:
            self._numbers[plan] = len(self._numbers) + 1
            self._writer.write(Planned(number=self._numbers[plan], plan=plan))
        return self._numbers[plan]


def planner_of(start: LiveStart) -> LivePlanner:
    """The planner that begins with `start`; it records itself if that says where."""
    return LivePlanner(start) if start.record is None else RecordedPlanner(start, Writer(Path(start.record)))


def entries(path: Path, lost: Callable[[int], None] = lambda size: None) -> Iterator[Entry]:
    """The entries of a recording, oldest first; without what was not written whole.

    Args:
        lost: is told how many bytes are left out, where a planner was killed as it wrote.

    Raises:
        RecordingError: it is no recording of this version.
        OSError: it cannot be read.
    """
    for number, line in enumerate(_whole_lines(path, lost), 1):
        try:
            entry = entry_of(line)
        except (ValueError, TypeError) as error:
            raise RecordingError(
                f"{path}, line {number}: not of a planner's recording: {_brief(error)}"
            ) from None
        if isinstance(entry, Began) and entry.format not in READ:
            known = " and ".join(map(str, READ))
            raise RecordingError(
                f"{path} is a recording of format {entry.format}, and this program reads {known}"
            )
        yield entry


def _whole_lines(path: Path, lost: Callable[[int], None]) -> Iterator[str]:
    """The lines of all whole members.

    Raises:
        RecordingError: the file does not begin with a member, or a line is no text.
    """
    with path.open("rb") as file:
        if file.read(len(MEMBER_BEGIN)) != MEMBER_BEGIN:
            raise RecordingError(f"{path} is no recording: it is no gzipped file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for member in _members(content):
                if isinstance(member, int):
                    lost(member)
                    continue
                try:
                    yield from filter(None, member.decode().split("\n"))
                except UnicodeDecodeError as error:
                    raise RecordingError(f"{path}: not of a planner's recording: {error}") from None


def _members(file: bytes | mmap.mmap) -> Iterator[bytes | int]:
    """Yields the content of each whole member, and the number of bytes of each gap before, between or after them."""
    at = lost = 0
    while at < len(file):
        found = _member(file, at) if file[at : at + len(MEMBER_BEGIN)] == MEMBER_BEGIN else None
        if found is None:
            # A writer that was killed left part of a member, which the next one's follows.
            following = file.find(MEMBER_BEGIN, at + 1)
            following = len(file) if following < 0 else following
            at, lost = following, lost + following - at
            continue
        if lost:
            yield lost
            lost = 0
        content, at = found
        yield content
    if lost:
        yield lost


def _member(file: bytes | mmap.mmap, begin: int) -> tuple[bytes, int] | None:
    """(content, end) of the member that begins at `begin`; None if it is not whole."""
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    pieces: list[bytes] = []
    at = begin
    try:
        while not reader.eof and at < len(file):
            pieces.append(reader.decompress(file[at : at + PIECE_BYTES]))
            at = min(len(file), at + PIECE_BYTES)
    except zlib.error:
        return None
    return (b"".join(pieces), at - len(reader.unused_data)) if reader.eof else None


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
