"""A trace played against fake nodes that only record what is done to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from elastic_run import ElasticRun
from pace import patient

from orchestrator.events.rehearsed import NodeLife
from orchestrator.events.types import Event, Failed, Record, Requested
from orchestrator.rehearsal.trace_player import WARM_STEPS, Script, TracePlayer, acts
from orchestrator.rehearsal.traces import parse
from workers.protocol.errors import JobError

TRACE = parse("0,add,a\n0,add,b\n1000,remove,a\n1000,add,c\n2000,remove,c\n2500,add,d\n", "t.csv")
NODE = {"CPU": 1.0}


class WrittenDown:
    """Fake nodes that record every call."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.changed = threading.Condition()

    def _write(self, what: str, name: str) -> None:
        with self.changed:
            self.done.append((what, name))
            self.changed.notify_all()

    def add(self, name: str, resources: Mapping[str, float]) -> None:
        assert resources == NODE
        self._write("add", name)

    def kill(self, name: str) -> None:
        self._write("kill", name)

    def notice(self, name: str, gone_s: float) -> None:
        self._write("notice", name)

    def lives(self) -> tuple[NodeLife, ...]:
        return ()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.done) >= count, patient(30))


def script(speedup: float | None = 100.0, **fields: object) -> Script:
    made = Script(trace=TRACE, source="t.csv", speedup=speedup, grace_s=None, resources=NODE, steps=1000)
    return replace(made, **fields)  # pyright: ignore[reportArgumentType]


def job(steps: int) -> list[Record]:
    run = ElasticRun()
    run.submit()
    run.form((0, 1))
    run.train(steps)
    return run.records


def training_on(
    script: Script, nodes: WrittenDown, say: Callable[[str], None] = lambda text: None
) -> TracePlayer:
    """The player for a job that goes on after the trace."""
    return TracePlayer(script, nodes, say, lambda: None, goes_on=True)


def test_a_trace_is_played_in_order_and_the_job_is_stopped_at_its_end() -> None:
    nodes, stopped = WrittenDown(), threading.Event()
    player = TracePlayer(script(), nodes, lambda text: None, stopped.set)
    player.start()
    assert nodes.done == []
    for record in job(WARM_STEPS):
        player.observe(record)
    assert stopped.wait(30)
    assert nodes.done == [("kill", "a"), ("add", "c"), ("kill", "c"), ("add", "d")]
    player.end()
    rehearsed = player.rehearsed()
    assert rehearsed is not None
    assert (rehearsed.trace, rehearsed.speedup, rehearsed.grace_s) == ("t.csv", 100, None)
    assert rehearsed.ended_s - rehearsed.began_s >= 0.025


def test_without_commits_nothing_is_played() -> None:
    nodes = WrittenDown()
    player = training_on(script(), nodes)
    player.start()
    for record in job(WARM_STEPS - 1):
        player.observe(record)
    player.end()
    assert nodes.done == []
    assert player.rehearsed() is None


class Lost(WrittenDown):
    """Nodes to which none can be added."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def add(self, name: str, resources: Mapping[str, float]) -> None:
        raise self._error


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    ("error", "told"),
    [(JobError("the keeper is gone"), "the keeper is gone"), (OSError("no route"), "OSError: no route")],
)
def test_whatever_goes_wrong_with_the_nodes_ends_the_trace_and_the_job(
    error: Exception, told: str, goes_on: bool
) -> None:
    nodes, stopped, said = Lost(error), threading.Event(), list[str]()
    player = TracePlayer(script(), nodes, said.append, stopped.set, goes_on=goes_on)
    player.start()
    for record in job(WARM_STEPS):
        player.observe(record)
    assert stopped.wait(30)
    player.end()
    assert nodes.done == [("kill", "a")]
    assert player.cut_short == told
    assert said[-1] == f"the trace ends early: {told}"
    assert player.rehearsed() is not None


def test_nodes_of_the_start_alone_go_before_the_clock_starts() -> None:
    nodes = WrittenDown()
    player = training_on(script(extra=("start-0", "start-1")), nodes)
    player.start()
    run = ElasticRun()
    run.submit()
    run.form((0, 1, 2, 3))
    run.train(WARM_STEPS)
    for rank in (3, 2):
        for record in run.records:
            player.observe(record)
        nodes.wait(4 - rank)
        assert nodes.done[-1] == ("kill", f"start-{3 - rank}")
        run.records.clear()
        run.regroup(run.members[:-1], lost=(rank,))
        run.train(WARM_STEPS)
    assert player.rehearsed() is None
    for record in run.records:
        player.observe(record)
    nodes.wait(6)
    player.end()
    assert nodes.done[2:] == [("kill", "a"), ("add", "c"), ("kill", "c"), ("add", "d")]


@pytest.mark.parametrize("end", [Failed(reason="x", user_error=False), Requested(request="stop")])
def test_a_job_that_ends_or_is_stopped_ends_the_rehearsal(end: Event) -> None:
    nodes, began = WrittenDown(), threading.Event()
    player = training_on(script(speedup=0.001), nodes, lambda text: began.set())
    player.start()
    for record in job(WARM_STEPS):
        player.observe(record)
    assert began.wait(30)
    player.observe(Record(time_s=5e9, event=end))
    player.end()
    rehearsed = player.rehearsed()
    assert rehearsed is not None
    assert rehearsed.ended_s == 5e9
    assert nodes.done == []


def test_an_unset_speed_fits_the_trace_into_the_job() -> None:
    began = threading.Event()
    player = training_on(script(speedup=None, steps=WARM_STEPS + 1), WrittenDown(), lambda text: began.set())
    player.start()
    for record in job(WARM_STEPS):
        player.observe(record)
    assert began.wait(30)
    player.end()
    rehearsed = player.rehearsed()
    assert rehearsed is not None
    # The trace of 2.5 s has to fit into 0.8 of one more step of 1 s.
    assert rehearsed.speedup == 2.5 / 0.8


def test_a_notice_comes_ahead_but_not_before_its_node() -> None:
    planned = [(act.at_s, act.what, act.node) for act in acts(TRACE, 2.0, 0.6)]
    assert planned == [
        (0.2, "notice", "a"),
        (0.5, "remove", "a"),
        (0.5, "add", "c"),
        (0.7, "notice", "c"),
        (1.0, "remove", "c"),
        (1.25, "add", "d"),
    ]
    early = [(act.at_s, act.what, act.node) for act in acts(TRACE, 1.0, 10)]
    assert early[:4] == [(0, "notice", "a"), (1, "remove", "a"), (1, "add", "c"), (1, "notice", "c")]
