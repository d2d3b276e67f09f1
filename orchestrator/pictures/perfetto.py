"""Timelines as a trace in Chrome's JSON format, which Perfetto and chrome://tracing open.

Knows only lanes of named spans, simulated or measured, and counters: no cost, no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.pictures.heat_map import Shares
from orchestrator.pictures.memory_use import USES, present, used
from orchestrator.pictures.spans import Timeline
from planner.ir import FREEZABLE, Action
from planner.simulation.memory import OverTime
from planner.simulation.simulate import Simulation


@dataclass(frozen=True, kw_only=True)
class TraceSpan:
    """One box of a lane."""

    name: str
    start_s: float
    end_s: float
    category: str
    """Category of the span: Perfetto filters by it."""
    arguments: Mapping[str, float | str] = field(default_factory=dict)
    """Shown when the box is selected."""


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """One row of the picture; its spans do not overlap."""

    group: str
    """Lanes of one group are shown together, e.g. `predicted`."""
    name: str
    """E.g. `rank 0`."""
    spans: tuple[TraceSpan, ...]


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A row of values over time."""

    group: str
    name: str
    """Unique in the group."""
    values: tuple[tuple[float, Mapping[str, float]], ...]
    """(time_s, the value of each part from then on)."""


def chrome_trace(lanes: Iterable[TraceRow], counters: Iterable[Counter] = ()) -> str:
    """The JSON text of a trace.

    It has a process per group, a thread per lane, complete events (`ph` X) in microseconds, and counters
    (`ph` C), each in a group that has lanes.
    """
    groups: dict[str, int] = {}
    events: list[dict[str, object]] = []
    for thread, lane in enumerate(lanes):
        if lane.group not in groups:
            groups[lane.group] = len(groups)
            events.append(_name("process_name", groups[lane.group], thread, lane.group))
        process = groups[lane.group]
        events.append(_name("thread_name", process, thread, lane.name))
        events.append(
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": process,
                "tid": thread,
                "args": {"sort_index": thread},
            }
        )
        events += (
            {
                "name": span.name,
                "cat": span.category,
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "pid": process,
                "tid": thread,
                "args": dict(span.arguments),
            }
            for span in lane.spans
        )
    for counter in counters:
        events += (
            {
                "name": counter.name,
                "ph": "C",
                "ts": time_s * 1e6,
                "pid": groups[counter.group],
                "args": dict(parts),
            }
            for time_s, parts in counter.values
        )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False)


def action_lanes(group: str, timeline: Timeline, frozen: Shares = ()) -> tuple[TraceRow, ...]:
    """A lane per rank with the actions that it computed.

    Args:
        frozen: (stage, microbatch, planned share of weight-gradient time that is frozen), shown with the
            actions that compute those weight gradients.
    """
    shares = {(stage, microbatch): share for stage, microbatch, share in frozen}
    lanes: list[TraceRow] = []
    for rank, spans in enumerate(timeline):
        boxes: list[TraceSpan] = []
        for span in spans:
            action = span.action if isinstance(span.action, Action) else Action.parse(span.action)
            arguments: dict[str, float | str] = {"stage": action.stage, "microbatch": action.index}
            share = shares.get((action.stage, action.index))
            if share is not None and action.kind in FREEZABLE:
                arguments["planned_freeze_ratio"] = share
            boxes.append(
                TraceSpan(
                    name=str(action),
                    start_s=span.start_s,
                    end_s=span.end_s,
                    category=action.kind.name.lower(),
                    arguments=arguments,
                )
            )
        lanes.append(TraceRow(group=group, name=f"rank {rank}", spans=tuple(boxes)))
    return tuple(lanes)


def link_lanes(group: str, simulation: Simulation) -> tuple[TraceRow, ...]:
    """A lane per ordered pair of ranks, showing when each message occupied the link."""
    links: dict[tuple[int, int], list[TraceSpan]] = {}
    for transfer in simulation.transfers:
        links.setdefault((transfer.source, transfer.target), []).append(
            TraceSpan(
                name=f"output of {transfer.action}",
                start_s=transfer.start_s,
                end_s=transfer.end_s,
                category="message",
                arguments={"arrival_s": transfer.arrival_s},
            )
        )
    return tuple(
        TraceRow(group=group, name=f"link {source} to {target}", spans=tuple(spans))
        for (source, target), spans in sorted(links.items())
    )


def memory_counters(group: str, ranks: Sequence[OverTime]) -> tuple[Counter, ...]:
    """Two counters per rank, in bytes: its memory by use, and in total."""
    levels = [used(rank) for rank in ranks]
    shown = present(levels)
    counters: list[Counter] = []
    for rank, own in enumerate(levels):
        parts = tuple((time_s, {USES[n].name: sizes[n] for n in shown}) for time_s, sizes in own)
        whole = tuple((time_s, {"bytes": sum(sizes)}) for time_s, sizes in own)
        counters.append(Counter(group=group, name=f"rank {rank} memory", values=parts))
        counters.append(Counter(group=group, name=f"rank {rank} memory, all", values=whole))
    return tuple(counters)


def _name(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
