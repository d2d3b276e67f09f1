"""The chain of hashes through an event log: which line is not as it was written, and how far its witnesses reach. Pure.

Each line carries the hash of the line before it (`orchestrator/events/log.py`). A witness is a hash of one of its lines
that lies elsewhere, such as in a checkpoint's manifest: whoever changes a line and makes all later hashes anew
contradicts the witnesses of later lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.events.log import NO_LINE, line_sha256
from orchestrator.events.types import PREVIOUS
from planner.wording import counted

SHOWN = 12
"""Digits of a hash in a message."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of a log."""

    file: str
    number: int
    """From 1, in its file."""
    sha256: str
    previous: str | None
    """The hash that it carries; None: none."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}"


@dataclass
class LogChain:
    """The lines of a log, and what their hashes say of it."""

    lines: list[LogLine] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Where the chain is broken, the first place first."""
    unchained: int = 0
    """Lines at the log's beginning that the chain does not cover: nothing carries their hashes."""
    unwitnessed: int = 0
    """Lines at its end after which there is no witness."""
    late: list[tuple[LogLine, LogLine]] = field(default_factory=list)
    """First and last of lines that came to light after a later controller had gone on without them."""
    places: dict[str, int] = field(default_factory=dict)
    """Hash -> index of its line."""

    @property
    def head(self) -> str | None:
        """Hash of the last line."""
        return self.lines[-1].sha256 if self.lines else None

    def unproved(self) -> list[str]:
        """Facts that the hashes leave open."""
        found: list[str] = []
        if self.unchained == len(self.lines):
            found.append(
                "that no line of the log was changed: its lines carry no hashes, an older version wrote them"
            )
        elif self.unchained:
            found.append(
                f"that {self._named(0, self.unchained)} are as they were written: an older version wrote them, without"
                " hashes"
            )
        for first, last in self.late:
            found.append(
                f"that {first} to {last.number} are all that its controller wrote, and {last} as it was: they came to"
                " light after the next controller had begun"
            )
        begin = max(self.unchained, len(self.lines) - self.unwitnessed)
        if begin < len(self.lines):
            found.append(
                f"that {self._named(begin, None)} are as they were written: no checkpoint and no snapshot names"
                " one of them or a later one, so that their hashes may have been made anew; lines may be missing too"
            )
        return found

    def _named(self, begin: int, end: int | None) -> str:
        some = self.lines[begin:end]
        if some[0].file == some[-1].file:
            return f"{some[0].file}, lines {some[0].number} to {some[-1].number}"
        return f"{some[0]}, to {some[-1]}"


def read_chain(files: Iterable[tuple[str, bytes]], heads: Iterable[tuple[str, str]] = ()) -> LogChain:
    """Check the chain through `files`.

    Args:
        files: name and whole lines of each file of the log, oldest first.
        heads: witnesses: who names a line, and its hash.
    """
    chain = LogChain()
    begins: list[int] = []
    for name, content in files:
        begins.append(len(chain.lines))
        for number, text in enumerate(content.split(b"\n")[:-1], 1):
            text += b"\n"
            sha256 = line_sha256(text)
            chain.places.setdefault(sha256, len(chain.lines))
            chain.lines.append(LogLine(file=name, number=number, sha256=sha256, previous=_previous(text)))
    _follow(chain, set(begins))
    _ask_witnesses(chain, heads)
    return chain


def _previous(line: bytes) -> str | None:
    try:
        previous = json.loads(line).get(PREVIOUS)
    except (ValueError, AttributeError, RecursionError):
        return None
    return previous if isinstance(previous, str) else None


def _follow(chain: LogChain, begins: set[int]) -> None:
    """Compare what each line carries with the line before it.

    Args:
        begins: indices of the lines with which a file begins.
    """
    lines = chain.lines
    broken: list[int] = []
    chained = False
    for index, line in enumerate(lines):
        before = lines[index - 1].sha256 if index else NO_LINE
        if line.previous is None and not chained:
            chain.unchained = index + 1
            continue
        chained = True
        if line.previous == before:
            continue
        if index and index in begins and line.previous is not None:
            # A controller on another machine went on from the copy in the store, and more of its predecessor's lines
            # came later.
            known = -1 if line.previous == NO_LINE else chain.places.get(line.previous)
            if known is not None and known < index:
                chain.late.append((lines[known + 1], lines[index - 1]))
                continue
        broken.append(index)
    # The first chained line carries the hash of the last one without.
    if 0 < chain.unchained < len(lines):
        chain.unchained -= 1
    if broken:
        chain.wrong.append(_break(chain, broken[0], broken[1:2] == [broken[0] + 1]))
    if len(broken) > 1:
        chain.wrong.append(
            f"{counted(len(broken) - 1, 'more line')} of the log, the last one {lines[broken[-1]]}, carry"
            " another hash than that of the line before"
        )


def _break(chain: LogChain, index: int, next_too: bool) -> str:
    """Say what is wrong where the line at `index` does not follow the one before it.

    Args:
        next_too: whether the line after it does not follow it either.
    """
    lines = chain.lines
    line = lines[index]
    if line.previous is None:
        return (
            f"{line}, was changed or inserted: it carries no {PREVIOUS}, as the lines before it do; expected"
            f" {lines[index - 1].sha256[:SHOWN]}, the hash of line {lines[index - 1].number}"
        )
    known = -1 if line.previous == NO_LINE else chain.places.get(line.previous)
    if known is not None and known < index:
        if index and lines[index + 1 : index + 2] and lines[index + 1].previous == lines[index - 1].sha256:
            return (
                f"{line}, was inserted: line {line.number + 1} expects line {lines[index - 1].number} before it, by"
                " the hash that it carries"
            )
        first, last = lines[known + 1], lines[index - 1]
        which = f"{first}, was" if first is last else f"{first}, and all up to line {last.number} were"
        after = f"line {lines[known].number}" if known >= 0 else "nothing"
        return f"{which} inserted: {line} expects {after} before it, by the hash that it carries"
    if known is not None:
        return (
            f"{line}, is not in its place: the line that was written before it, by the hash that it carries, is now"
            f" {lines[known]}"
        )
    if not index:
        return (
            f"{line}, was not the first: it expects a line of sha256 {line.previous[:SHOWN]} before it, which was"
            " deleted"
        )
    before = lines[index - 1]
    either = f", unless {line} was changed itself" if next_too else ""
    return (
        f"{before}, was changed, or lines after it were deleted: {line} expects sha256 {line.previous[:SHOWN]}"
        f" before it, and line {before.number} has {before.sha256[:SHOWN]}{either}"
    )


def _ask_witnesses(chain: LogChain, heads: Iterable[tuple[str, str]]) -> None:
    reach = -1
    # The line that a witness names may be the one that was changed: the line after it says so.
    carried = {line.previous: index - 1 for index, line in enumerate(chain.lines)}
    missing: list[tuple[str, str]] = []
    for who, sha256 in heads:
        place = chain.places.get(sha256, carried.get(sha256))
        if place is None:
            missing.append((who, sha256))
        else:
            reach = max(reach, place)
    after = (
        f" after {chain.lines[reach]}, which another witness names,"
        if 0 <= reach < len(chain.lines) - 1
        else ""
    )
    total = counted(len(chain.lines), "line")
    for who, sha256 in missing:
        chain.wrong.append(
            f"{who} names a line of sha256 {sha256[:SHOWN]}, and the log of {total} has none: its end was cut off, or a"
            f" line was changed{after} and all later hashes made anew"
        )
    chain.unwitnessed = len(chain.lines) - 1 - reach
