"""Traces of when nodes come and go, as lines of `time_ms, add|remove, node`: parsed strictly, cut, sped up, written.

Pure: text in, values out. Knows no cluster; who replays a trace is in `trace_player.py`, who makes one up in
`synthetic_trace.py`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from workers.protocol.errors import JobError


class NodeChangeKind(StrEnum):
    """Kind of a node's change."""

    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, kw_only=True)
class NodeChange:
    """A node comes or goes."""

    time_ms: int
    """From the beginning of the trace."""
    kind: NodeChangeKind
    node: str
    """Its name; a node that went does not come back, another one comes."""


@dataclass(frozen=True, kw_only=True)
class NodeTrace:
    """Changes in order of time; those of one time in the order in which they happen."""

    changes: tuple[NodeChange, ...]
    end_ms: int
    """Length of the trace: at least the time of the last change."""

    @property
    def losses(self) -> int:
        """Number of nodes that go."""
        return sum(change.kind is NodeChangeKind.REMOVE for change in self.changes)

    @property
    def most(self) -> int:
        """Largest number of nodes at a time."""
        live = most = 0
        for change in self.changes:
            live += 1 if change.kind is NodeChangeKind.ADD else -1
            most = max(most, live)
        return most

    def at_start(self) -> tuple[str, ...]:
        """The nodes that are there from time 0."""
        live = {
            change.node: None
            for change in self.changes
            if change.time_ms == 0 and change.kind is NodeChangeKind.ADD
        }
        for change in self.changes:
            if change.time_ms == 0 and change.kind is NodeChangeKind.REMOVE:
                del live[change.node]
        return tuple(live)


def parse(text: str, source: str) -> NodeTrace:
    """The trace in `text`, which came from `source` (for messages); it ends with its last change.

    Raises:
        JobError: not three fields, no whole number of milliseconds, times out of order, another word than add or
            remove, a node that is added while it is there or for a second time, removed while it is not, or no line
            at all. Names the line.
    """
    changes: list[NodeChange] = []
    live: set[str] = set()
    gone: set[str] = set()

    def refuse(line: int, problem: str) -> JobError:
        return JobError(f"trace {source}, line {line}: {problem}")

    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise JobError(f"trace {source} is not CSV: {error}; a line is time_ms, add|remove, node") from error
    for line, row in enumerate(rows, 1):
        if not row:
            continue
        fields = [field.strip() for field in row]
        if len(fields) != 3:
            raise refuse(line, f"{len(fields)} fields where there must be 3: time_ms, add|remove, node")
        time, kind, node = fields
        if not (time.isascii() and time.isdigit()):
            raise refuse(line, f"the time {time[:40]!r} is not a whole number of milliseconds")
        time_ms = int(time)
        if changes and time_ms < changes[-1].time_ms:
            raise refuse(line, f"time {time_ms} comes after {changes[-1].time_ms}: sort the lines by time")
        if kind not in {*NodeChangeKind}:
            raise refuse(line, f"{kind[:40]!r} is neither add nor remove")
        if not node:
            raise refuse(line, "the node has no name")
        if kind == NodeChangeKind.ADD:
            if node in live:
                raise refuse(line, f"node {node} is added, but it is there already")
            if node in gone:
                raise refuse(line, f"node {node} is added again after it was removed: give it another name")
            live.add(node)
        else:
            if node not in live:
                how = "was removed before" if node in gone else "was never added"
                raise refuse(line, f"node {node} is removed, but it {how}")
            live.remove(node)
            gone.add(node)
        changes.append(NodeChange(time_ms=time_ms, kind=NodeChangeKind(kind), node=node))
    if not changes:
        raise JobError(f"trace {source} is empty: it needs lines of time_ms, add|remove, node")
    return NodeTrace(changes=tuple(changes), end_ms=changes[-1].time_ms)


def to_csv(trace: NodeTrace) -> str:
    """The lines that `parse` reads. Where the trace ends after its last change is not in them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows((change.time_ms, change.kind.value, change.node) for change in trace.changes)
    return text.getvalue()


def slots_of(trace: NodeTrace) -> dict[str, int]:
    """Node -> slot: a node that is added takes the lowest slot that is free."""
    slots: dict[str, int] = {}
    held: set[int] = set()
    for change in trace.changes:
        if change.kind is NodeChangeKind.REMOVE:
            held.remove(slots[change.node])
            continue
        slot = next(number for number in range(len(held) + 1) if number not in held)
        slots[change.node] = slot
        held.add(slot)
    return slots


def keep(trace: NodeTrace, nodes: int) -> NodeTrace:
    """`trace` with only the nodes of `nodes` of its slots, evenly spread, each with its own lifetime.

    Raises:
        JobError: it has fewer slots.
    """
    slots = trace.most
    if not 1 <= nodes <= slots:
        raise JobError(f"--nodes {nodes}: the trace has between 1 and {slots} nodes at a time")
    kept = {index * slots // nodes for index in range(nodes)}
    slot = slots_of(trace)
    return replace(trace, changes=tuple(change for change in trace.changes if slot[change.node] in kept))


def window(trace: NodeTrace, first_ms: int, last_ms: int) -> NodeTrace:
    """Part of `trace` after `first_ms` and until `last_ms`; the nodes that are there at `first_ms` are added at 0.

    Raises:
        JobError: the window is empty, reaches beyond the trace, or no node ever lives in it.
    """
    if not 0 <= first_ms < last_ms <= trace.end_ms:
        raise JobError(
            f"--window {_minutes(first_ms)}-{_minutes(last_ms)}: the trace goes from minute 0 to"
            f" {_minutes(trace.end_ms)}"
        )
    live: dict[str, None] = {}
    inside: list[NodeChange] = []
    for change in trace.changes:
        if change.time_ms > last_ms:
            break
        if change.time_ms > first_ms:
            inside.append(replace(change, time_ms=change.time_ms - first_ms))
        elif change.kind is NodeChangeKind.ADD:
            live[change.node] = None
        else:
            del live[change.node]
    there = (NodeChange(time_ms=0, kind=NodeChangeKind.ADD, node=node) for node in live)
    changes = (*there, *inside)
    if not changes:
        raise JobError(f"--window {_minutes(first_ms)}-{_minutes(last_ms)}: no node lives then")
    return NodeTrace(changes=changes, end_ms=last_ms - first_ms)


def faster(trace: NodeTrace, speedup: float) -> NodeTrace:
    """`trace` with all times divided by `speedup`, which is above 0."""
    return NodeTrace(
        changes=tuple(replace(change, time_ms=round(change.time_ms / speedup)) for change in trace.changes),
        end_ms=round(trace.end_ms / speedup),
    )


def ordered(changes: Iterable[NodeChange]) -> tuple[NodeChange, ...]:
    """`changes` by time; what goes at a time goes before what comes."""
    return tuple(sorted(changes, key=lambda change: (change.time_ms, change.kind is NodeChangeKind.ADD)))


def _minutes(time_ms: int) -> str:
    return f"{time_ms / 60_000:g}"
