"""A command is carried out once per id, and the job's own events decide its outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_jobs import checkpoint_report, step_report

from orchestrator.events.types import (
    Answered,
    Commanded,
    Event,
    Failed,
    Finished,
    FreezeChanged,
    Migrated,
    Paused,
    Record,
    Regrouped,
)
from orchestrator.history import command_table
from orchestrator.history.command_table import CommandIdReused, CommandTable
from orchestrator.history.job_view import JobView, fold
from planner.freezing import FreezePlan
from workers.protocol.reports import FreezeStarted


def command(id: str, name: str, **arguments: object) -> Commanded:
    return Commanded(id=id, name=name, arguments=arguments)


def answers(*told: Event) -> dict[str, tuple[bool, str]]:
    """For each id, whether the command was done, and the answer's text."""
    table, found = CommandTable(), dict[str, tuple[bool, str]]()
    for event in told:
        for answer in table.decided(event):
            found[answer.id] = answer.done, answer.text
        table.fold(event)
    return found


def moved(step: int) -> Migrated:
    return Migrated(
        version=2,
        layers=(1,),
        source=(0,),
        target=(1,),
        mode="live",
        bytes=1,
        seconds=1.0,
        steps=1,
        stall_s=0.0,
        step=step,
    )


def regrouped(cause: str) -> Regrouped:
    times = dict.fromkeys(("detect_s", "settle_s", "plan_s", "move_s", "resume_s"), 0.1)
    return Regrouped(
        generation=2,
        cause=cause,
        reason="rank 1 was lost",
        lost=(1,),
        joined=(),
        step=4,
        rerun=0,
        steps_lost=0,
        **times,
    )


def test_a_command_that_comes_twice_is_found_and_a_used_id_is_refused() -> None:
    table = CommandTable()
    assert table.find("a", "stop", {}) is None
    table.fold(command("a", "move", layers="3", rank=1))
    assert table.find("a", "move", {"layers": "3", "rank": 1}) is not None
    for name, arguments in (("stop", {}), ("move", {"layers": "3", "rank": 2})):
        with pytest.raises(CommandIdReused, match=r"'a' was used for move .* cannot be used for"):
            table.find("a", name, arguments)


def test_a_checkpoint_is_done_by_one_that_is_no_older() -> None:
    asked = (step_report(5), command("c", "checkpoint"))
    assert answers(*asked, checkpoint_report(4)) == {}
    assert answers(*asked, checkpoint_report(6)) == {"c": (True, "checkpoint of step 6 in /out/6")}
    ended = Finished(step=9, stopped=False, state_sha256=None)
    assert answers(*asked, ended) == {"c": (False, "the job ended first: trained to its last step, 9")}
    reached = Finished(step=7, stopped=False, state_sha256=None, reached="f1 0.9")
    assert answers(*asked, reached) == {"c": (False, "the job ended first: reached f1 0.9 at step 7")}
    plateau = Finished(step=7, stopped=False, state_sha256=None, plateau="no better than loss 1 of step 5")
    text = "the job ended first: done at step 7, no better than loss 1 of step 5"
    assert answers(*asked, plateau) == {"c": (False, text)}


def test_a_stop_is_done_by_the_end_and_refused_by_a_failure() -> None:
    stop, abort = command("s", "stop"), command("a", "abort")
    assert answers(stop, Finished(step=7, stopped=True, state_sha256=None)) == {
        "s": (True, "stopped at step 7")
    }
    failed = Failed(reason="no room", user_error=False)
    assert answers(stop, abort, failed) == {
        "s": (False, "the job failed: no room"),
        "a": (True, "the job failed: no room"),
    }


def test_a_move_is_decided_by_the_answer_that_the_lifecycle_logs_and_by_the_end_of_the_job() -> None:
    asked = command("1", "move", layers="1", rank=1)
    assert answers(asked, moved(4), regrouped("loss")) == {}
    answered = Answered(id="1", done=True, step=4, text="moved")
    table = CommandTable()
    for event in (asked, answered, Failed(reason="no room", user_error=False)):
        table.fold(event)
    entry = table.get("1")
    assert entry is not None
    assert entry.answer == answered
    assert answers(asked, Failed(reason="no room", user_error=False)) == {
        "1": (False, "the job failed: no room")
    }


def test_the_log_brings_the_table_back() -> None:
    told = [
        step_report(3),
        command("a", "checkpoint"),
        Answered(id="a", done=True, step=4, text="checkpoint of step 4 in /out/4"),
        checkpoint_report(4),
        command("b", "stop"),
    ]
    lines = [Record(time_s=0.0, event=event).to_json() for event in told]
    view = fold(map(Record.from_json, lines))
    table = JobView.from_json(view.to_json()).commands
    entry = table.get("a")
    assert entry is not None
    assert entry.answer == told[2]
    assert [pending.command.id for pending in table.pending()] == ["b"]


def test_old_commands_are_forgotten_once_they_have_their_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_table, "KEPT", 2)
    table = CommandTable()
    for id in "abc":
        table.fold(command(id, "stop"))
    assert [entry.command.id for entry in table.pending()] == ["a", "b", "c"]
    table.fold(Answered(id="b", done=True, step=0, text="done"))
    table.fold(command("d", "stop"))
    assert [*table.entries] == ["a", "c", "d"]


def test_a_pause_is_done_when_the_job_has_paused_and_a_resume_when_it_trains() -> None:
    wait = Paused(reason="2 ranks left", step=4)
    paused = replace(wait, reason="on request", requested=True)
    told = (command("a", "pause"), command("b", "resume"))
    assert answers(*told, wait) == {}
    assert answers(*told[:1], paused) == {"a": (True, "paused at step 4")}
    # A resume that a pause overtakes does not count as done by a later one.
    late = (command("c", "checkpoint"), paused, command("d", "resume"), regrouped("resume"))
    assert answers(*told, *late) == {
        "a": (True, "paused at step 4"),
        "b": (False, "paused again at step 4"),
        "c": (True, "paused with a checkpoint of step 4"),
        "d": (True, "trains on from step 4"),
    }
    assert answers(*told, regrouped("resume")) == {"b": (True, "trains on from step 4")}


def freeze_plan(version: int, **more: Any) -> FreezePlan:
    return FreezePlan(epoch=1, version=version, ratios=(), **more)


def changed(id: str, version: int) -> FreezeChanged:
    return FreezeChanged(from_step=1, method="none", r_max=0.5, by="", plan=freeze_plan(version), id=id)


def test_a_freeze_request_is_answered_once_the_ranks_follow_its_plan() -> None:
    """Whatever it asks for: `c` asks for the same settings as `a`."""
    asked = [command(id, "freeze", method="none", r_max=None) for id in "abcd"]
    found = answers(
        *asked,
        FreezeStarted(plan=freeze_plan(1, start=3)),
        changed("a", 2),
        changed("b", 3),
        FreezeStarted(plan=freeze_plan(2, start=7)),
        changed("c", 4),
        FreezeStarted(plan=freeze_plan(4, start=9)),
    )
    assert found == {
        "a": (True, "all ranks follow it from step 7 on"),
        "b": (False, "another freeze request took its place"),
        "c": (True, "all ranks follow it from step 9 on"),
    }


NAMES = ("stop", "abort", "checkpoint", "pause", "resume", "move", "scale", "drain", "freeze", "fault")
IDS = "abcdef"
HAPPENINGS: st.SearchStrategy[Event] = st.one_of(
    st.builds(command, st.sampled_from(IDS), st.sampled_from(NAMES)),
    # From the lifecycle, and from the controller once a command has failed: perhaps both.
    st.builds(Answered, id=st.sampled_from(IDS), done=st.booleans(), step=st.just(1), text=st.just("")),
    st.builds(changed, st.sampled_from(IDS), st.integers(1, 4)),
    st.builds(lambda version: FreezeStarted(plan=freeze_plan(version, start=9)), st.integers(1, 4)),
    st.builds(step_report, st.integers(1, 9)),
    st.builds(checkpoint_report, st.integers(1, 9)),
    st.builds(Paused, reason=st.just(""), step=st.integers(1, 9), requested=st.booleans()),
    st.builds(regrouped, st.sampled_from(["loss", "resume"])),
)
ENDS: st.SearchStrategy[Event] = st.sampled_from(
    [Finished(step=9, stopped=True, state_sha256=None), Failed(reason="no room", user_error=False)]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(happenings=st.lists(HAPPENINGS, max_size=30), end=ENDS, late=st.lists(HAPPENINGS, max_size=5))
def test_whatever_happens_each_command_has_one_answer_in_the_log(
    happenings: list[Event], end: Event, late: list[Event]
) -> None:
    log, table, known = list[Event](), CommandTable(), set[str]()
    # The controller takes no command twice, and none once its job has ended.
    late = [event for event in late if isinstance(event, Answered)]
    for event in (*happenings, end, *late):
        if isinstance(event, Commanded):
            if event.id in known:
                continue
            known.add(event.id)
        for each in table.logged(event):
            log.append(each)
            table.fold(each)
    answered = [event.id for event in log if isinstance(event, Answered)]
    assert sorted(answered) == sorted(known)
    assert table.pending() == ()
    assert log[-1] == end
