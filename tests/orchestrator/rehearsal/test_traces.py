"""Traces: what is refused and with which message; slots, windows and speed; properties of any trace."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.rehearsal.synthetic_trace import Preemption, synthetic
from orchestrator.rehearsal.traces import (
    NodeChange,
    NodeChangeKind,
    NodeTrace,
    faster,
    keep,
    parse,
    slots_of,
    to_csv,
    window,
)
from workers.protocol.errors import JobError

SMALL = "0,add,a\n0,add,b\n100,remove,a\n100,add,c\n250,remove,b\n"


@st.composite
def traces(draw: st.DrawFn) -> NodeTrace:
    """Any trace: at each time some nodes leave and some come up."""
    live: list[str] = []
    changes: list[NodeChange] = []
    time_ms = 0
    for number in range(draw(st.integers(1, 30))):
        time_ms += draw(st.integers(0, 400))
        if live and draw(st.booleans()):
            node = live.pop(draw(st.integers(0, len(live) - 1)))
            changes.append(NodeChange(time_ms=time_ms, kind=NodeChangeKind.REMOVE, node=node))
        else:
            live.append(f"n{number}")
            changes.append(NodeChange(time_ms=time_ms, kind=NodeChangeKind.ADD, node=live[-1]))
    return NodeTrace(changes=tuple(changes), end_ms=time_ms)


def live_at(trace: NodeTrace, time_ms: int) -> set[str]:
    live: set[str] = set()
    for change in trace.changes:
        if change.time_ms <= time_ms:
            (live.add if change.kind is NodeChangeKind.ADD else live.remove)(change.node)
    return live


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("0,add\n", "line 1: 2 fields where there must be 3"),
        ("0;add;a\n", "line 1: 1 fields"),
        ("0,add,a,b\n", "line 1: 4 fields"),
        ("time_ms,kind,node\n0,add,a\n", "line 1: the time 'time_ms' is not a whole number"),
        ("0,add,a\n1.5,remove,a\n", "line 2: the time '1.5'"),
        ("-1,add,a\n", "line 1: the time '-1'"),
        ("²,add,a\n", "line 1: the time"),
        ("0,add,a\n\n7,remove,b\n", "line 3: node b is removed, but it was never added"),
        ("0,add,a\n5,remove,a\n6,remove,a\n", "line 3: node a is removed, but it was removed before"),
        ("0,add,a\n5,add,a\n", "line 2: node a is added, but it is there already"),
        ("0,add,a\n5,remove,a\n9,add,a\n", "line 3: node a is added again after it was removed"),
        ("9,add,a\n5,add,b\n", "line 2: time 5 comes after 9: sort the lines"),
        ("0,join,a\n", "line 1: 'join' is neither add nor remove"),
        ("0,add, \n", "line 1: the node has no name"),
        ('0,add,"a\n', "is not CSV"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(text: str, said: str) -> None:
    with pytest.raises(JobError, match=r"trace t\.csv") as refused:
        parse(text, "t.csv")
    assert said in str(refused.value)


def test_a_trace_is_read_as_it_stands() -> None:
    trace = parse(" 0, add ,a\r\n10,remove,a\r\n", "t.csv")
    assert trace.changes == (
        NodeChange(time_ms=0, kind=NodeChangeKind.ADD, node="a"),
        NodeChange(time_ms=10, kind=NodeChangeKind.REMOVE, node="a"),
    )
    assert (trace.end_ms, trace.losses, trace.most) == (10, 1, 1)


def test_an_added_node_takes_the_lowest_free_slot() -> None:
    text = "0,add,a\n0,add,b\n0,add,c\n1,remove,b\n1,remove,a\n2,add,d\n3,add,e\n3,add,f\n"
    assert slots_of(parse(text, "t")) == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 1, "f": 3}


def test_kept_slots_are_evenly_spread_and_keep_their_lifetimes() -> None:
    text = "".join(f"0,add,n{number}\n" for number in range(30)) + "9,remove,n3\n12,add,x\n"
    kept = keep(parse(text, "t"), 8)
    assert kept.at_start() == tuple(f"n{number}" for number in (0, 3, 7, 11, 15, 18, 22, 26))
    # x took slot 3, the only free one.
    assert [change.node for change in kept.changes[8:]] == ["n3", "x"]
    with pytest.raises(JobError, match=r"--nodes 31: the trace has between 1 and 30 nodes"):
        keep(parse(text, "t"), 31)


def test_a_window_begins_with_who_is_there() -> None:
    cut = window(parse(SMALL, "t"), 100, 200)
    assert to_csv(cut) == "0,add,b\n0,add,c\n"
    assert cut.end_ms == 100
    assert (
        to_csv(window(parse(SMALL, "t"), 50, 250))
        == "0,add,a\n0,add,b\n50,remove,a\n50,add,c\n200,remove,b\n"
    )
    for first, last in ((100, 100), (0, 251), (-1, 5)):
        with pytest.raises(JobError, match="--window"):
            window(parse(SMALL, "t"), first, last)
    with pytest.raises(JobError, match="no node lives then"):
        window(parse("5,add,a\n6,remove,a\n9,add,b\n", "t"), 6, 8)


@given(traces())
def test_a_trace_survives_its_csv(trace: NodeTrace) -> None:
    assert parse(to_csv(trace), "t") == trace


@given(traces(), st.data())
def test_slots_hold_one_node_at_a_time_and_kept_ones_lose_nothing(
    trace: NodeTrace, data: st.DataObject
) -> None:
    slots = slots_of(trace)
    assert max(slots.values()) < trace.most
    held: dict[int, str] = {}
    for change in trace.changes:
        if change.kind is NodeChangeKind.ADD:
            assert slots[change.node] not in held
            held[slots[change.node]] = change.node
        else:
            assert held.pop(slots[change.node]) == change.node
    assert keep(trace, trace.most) == trace
    fewer = keep(trace, data.draw(st.integers(1, trace.most)))
    nodes = {change.node for change in fewer.changes}
    assert fewer.changes == tuple(change for change in trace.changes if change.node in nodes)


@given(traces(), st.data())
def test_a_window_shows_who_is_live_at_any_time_in_it(trace: NodeTrace, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, trace.end_ms))
    last = data.draw(st.integers(0, trace.end_ms))
    try:
        cut = window(trace, first, last)
    except JobError:
        assert first >= last or not any(live_at(trace, time) for time in range(first, last + 1))
        return
    parse(to_csv(cut), "t")
    for time in range(first, last + 1, max(1, (last - first) // 20)):
        assert live_at(cut, time - first) == live_at(trace, time)


@given(traces(), st.floats(0.1, 100))
def test_a_faster_trace_has_the_same_changes_in_the_same_order(trace: NodeTrace, speedup: float) -> None:
    quick = faster(trace, speedup)
    assert [(c.kind, c.node) for c in quick.changes] == [(c.kind, c.node) for c in trace.changes]
    assert all(
        abs(fast.time_ms * speedup - slow.time_ms) <= speedup / 2 + 1e-6
        for fast, slow in zip(quick.changes, trace.changes, strict=True)
    )
    parse(to_csv(quick), "t")


@given(
    st.integers(1, 12),
    st.floats(0, 1),
    st.floats(0.5, 60),
    st.one_of(st.none(), st.floats(0.5, 60)),
    st.floats(0, 240),
    st.integers(0, 9),
)
@example(1, 0.75, 0.609375, 0.609375, 4.0, 0)
def test_a_synthetic_trace_is_a_trace_that_its_seed_decides(
    nodes: int, probability: float, every_min: float, back_min: float | None, length_min: float, seed: int
) -> None:
    preemption = Preemption(probability=probability, every_min=every_min, back_min=back_min)
    trace = synthetic(nodes, preemption, length_min, seed)
    assert trace == synthetic(nodes, preemption, length_min, seed)
    read = parse(to_csv(trace), "t")
    assert read.changes == trace.changes
    assert len(trace.at_start()) == trace.most == nodes
    assert trace.end_ms >= read.end_ms
    if probability == 0:
        assert trace.losses == 0
    for change in trace.changes:
        if change.kind is NodeChangeKind.REMOVE:
            ticks = change.time_ms / (every_min * 60_000)
            assert abs(ticks - round(ticks)) * every_min * 60_000 <= 0.5 + 1e-6
    if back_min is None:
        assert len(trace.changes) == nodes + trace.losses


def test_preemptions_are_as_frequent_as_asked() -> None:
    trace = synthetic(50, Preemption(probability=0.2, every_min=10, back_min=1), 2000, seed=3)
    assert trace.losses / (50 * 200) == pytest.approx(0.2, abs=0.015)


@pytest.mark.parametrize(
    "text", ["", "0.1", "0.1:10:2:3", "x:10", "1.5:10", "0.1:0", "0.1:10:0", "0.1:inf", "nan:1"]
)
def test_what_is_no_preemption_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--synthetic"):
        Preemption.parse(text)


def test_preemptions_are_read() -> None:
    assert Preemption.parse("0.1:10") == Preemption(probability=0.1, every_min=10, back_min=10)
    assert Preemption.parse("0.1:10:never").back_min is None
    assert Preemption.parse("1:2:0.5").back_min == 0.5
