"""What `freshet status`, `events` and `plan --job` say of a job, from values that were made up."""

from __future__ import annotations

import re

import pytest
from elastic_run import eventful
from synthetic_run import freezing_records, records

from orchestrator.cli.job_events import event_line
from orchestrator.cli.plan_of_job import parse_partition, proposal_lines
from orchestrator.cli.text.job_details import detail_lines, details
from orchestrator.events import types as events
from orchestrator.events.level import LONGEST
from orchestrator.events.types import Record
from orchestrator.history.job_view import fold
from orchestrator.history.proposal import Proposal
from planner.shards import Piece, Shard
from workers.protocol.errors import JobError, MemoryShortage
from workers.protocol.reports import CopiedAhead, LayersChecked, MemoryLow, StandbyReport

PROPOSAL = Proposal(
    partition=(3, 1),
    current_partition=(2, 2),
    base=(1, 4),
    problem=None,
    moved_layers=(2,),
    predicted_step_s=0.2,
    current_predicted_step_s=0.25,
)


def test_every_event_is_one_line() -> None:
    log = [*records(steps=20), *freezing_records(), *eventful().records]
    assert len({type(record.event) for record in log}) > 12
    for number, record in enumerate(log, 1):
        line = event_line(number, record)
        kind = type(record.event).__name__
        assert re.match(rf" *{number}  \d\d:\d\d:\d\d  {kind}\b", line)
        assert "\n" not in line
        assert len(line) <= LONGEST + 200


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            StandbyReport(step=9, rank=2, layers=(4, 5), bytes=0, seconds=0.0, given_up=True),
            "the copies in place 2 are given up at step 9, for want of host memory: layers 4, 5",
        ),
        (
            StandbyReport(
                step=9,
                rank=2,
                layers=(4,),
                bytes=0,
                seconds=0.0,
                shards=(Piece(4, Shard(0, 2)), Piece(4, Shard(1, 2))),
            ),
            "the copies in place 2 are up to date at step 9: layers 4 (shard 0 of 2), 4 (shard 1 of 2)",
        ),
        (
            StandbyReport(step=9, rank=2, layers=(4,), bytes=0, seconds=0.0, built=False),
            "the copies in place 2 are up to date at step 9: layer 4; it still builds what it owns in the next"
            " generation",
        ),
        (
            StandbyReport(step=9, rank=2, layers=(), bytes=0, seconds=0.0),
            "place 2 has built at step 9 what it owns in the next generation",
        ),
        (
            events.OutOfMemory(
                rank=4,
                place=1,
                plan=(1, 2),
                step=7,
                shortage=MemoryShortage(needed_bytes=4_000_000, held_bytes=80_000_000),
            ),
            "rank 4 ran out of memory (4.00 MB asked for, 80.0 MB held by its tensors) under plan 1.2, after step 7:"
            " the step is run again under a smaller plan",
        ),
        (
            MemoryLow(
                rank=4,
                place=1,
                plan=(1, 2),
                step=8,
                left_bytes=100,
                reserve_bytes=900_000,
                seen_s=1_700_000_000.5,
            ),
            "the device of rank 4 has 100 B left beside what step 8 takes of it, less than the reserve of 900 kB",
        ),
        (
            LayersChecked(
                rank=1, layers=("a", "b"), whole={"b": "it takes gradients in its forward pass"}, seconds=0.25
            ),
            "rank 1 compared 2 layers with plain autograd in 250 ms: the same numbers; b is left to it, as it takes"
            " gradients in its forward pass",
        ),
        (
            events.Adapted(
                step=7, moves=True, reason="it pays", now_s=0.5, then_s=0.3, cost_s=0.1, layers=(1, 3)
            ),
            "the plan changes: it pays",
        ),
        (
            events.Paused(reason="no rank is left", step=7),
            "waiting for capacity: no rank is left",
        ),
        (events.Placing(ranks=(0, 1)), "the cluster is asked for 2 ranks: ranks 0, 1"),
        (events.Dismissed(ranks=(5,)), "rank 5 released: the job needs no more spares"),
        (
            CopiedAhead(
                rank=4,
                epoch=1,
                change=2,
                step=7,
                layers=(2, 3),
                bytes=1024,
                seconds=0.5,
                error="its owner is gone",
            ),
            "rank 4 copies no layers ahead: its owner is gone",
        ),
    ],
    ids=lambda given: type(given).__name__,
)
def test_an_event_is_told_in_words(event: events.Event, said: str) -> None:
    assert event_line(1, Record(time_s=0.0, event=event)).endswith(f"  {said}")


def test_a_command_says_who_sent_it_and_what_came_of_it() -> None:
    sent = events.Commanded(id="x", name="scale", arguments={"ranks": 2}, by="control from 10.0.0.5")
    assert event_line(7, Record(time_s=0.0, event=sent)).endswith(
        'scale {"ranks": 2}, id x, by control from 10.0.0.5'
    )
    answered = events.Answered(id="x", done=False, step=3, text="there is no room")
    assert event_line(8, Record(time_s=0.0, event=answered)).endswith("not done: there is no room, id x")


def test_a_job_in_detail() -> None:
    sent = Record(time_s=0.0, event=events.Commanded(id="x", name="pause", arguments={}))
    view = fold([*records(steps=20)[:-1], sent])
    told, lines = details(view), list(detail_lines(view))
    assert [each["rank"] for each in told["nodes"]] == sorted(view.ranks.alive)
    placed = [stage for each in told["nodes"] for stage in each["stages"]]
    assert view.plan is not None
    assert sorted(placed) == list(range(view.plan.stages))
    assert sum(told["partition"]) == view.plan.layers[-1][1]
    assert told["pending"] == [{"id": "x", "name": "pause", "arguments": {}}]
    assert "under way: pause" in lines
    assert lines[0].startswith(f"{view.job}: {view.state}, step ")


def test_a_proposal_says_what_it_would_bring() -> None:
    assert list(proposal_lines(PROPOSAL)) == [
        "plan 1.4: layers per stage [2, 2]",
        "proposed: [3, 1], 1 layer (2) to other ranks; predicted step: 250 ms -> 200 ms, 20.0 % shorter",
    ]
    same = Proposal(partition=(2, 2), current_partition=(2, 2), base=(1, 4), problem=None)
    assert list(proposal_lines(same))[1] == "proposed: the same"
    bad = Proposal(partition=(4,), current_partition=(2, 2), base=(1, 4), problem="1 stage for 2 ranks")
    assert list(proposal_lines(bad))[1] == "[4] cannot be applied: 1 stage for 2 ranks"


@pytest.mark.parametrize("text", ["3,1,2,2", "3 1 2 2", "[3, 1, 2, 2]"])
def test_a_partition_is_typed_with_commas_or_spaces(text: str) -> None:
    assert parse_partition(text) == (3, 1, 2, 2)


@pytest.mark.parametrize("text", ["", "3,-1", "3;1", "a", "0"])
def test_what_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="expected the layers per stage, such as 3,1,2,2"):
        parse_partition(text)
