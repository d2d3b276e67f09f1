"""The one fold of the log: bounded, the same after a round trip, and with one rule for undone steps."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from synthetic_run import records

from orchestrator.events import types as events
from orchestrator.history.job_view import JobView, fold
from orchestrator.history.recap import recap
from orchestrator.history.thinning import EVERY, KEPT, RECENT, Grid, thin
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import ActionSpan, FreezeReport, FrozenAction, StepReport, TimelineReport

RANKS = 4
PARAMETERS = 12
LAYERS = 6


def step_report(step: int, generation: int = 1) -> StepReport:
    return StepReport(
        generation=generation,
        step=step,
        loss=3.14159265358979 / step,
        grad_norm=1.23456789012345,
        lr=1.2345678e-4,
        samples=32,
        tokens=32_768,
        step_s=0.123456789,
        bubble=0.123456789,
        skipped=False,
        gradient_energy=1.23456789,
        effective_update=0.912345678,
        committed_s=1.7e9 + step,
        samples_digest="0123456789abcdef",
    )


def freeze_report(step: int, rank: int) -> FreezeReport:
    actions = tuple(
        FrozenAction(stage=rank, microbatch=microbatch, planned=0.5, actual=0.25, parameters=0.125)
        for microbatch in range(8)
    )
    counts = tuple((rank * LAYERS + layer, (step % 2,) * PARAMETERS) for layer in range(LAYERS))
    return FreezeReport(step=step, rank=rank, actions=actions, passes=8, counts=counts)


def timeline(step: int, rank: int) -> TimelineReport:
    spans = tuple(
        ActionSpan(action=f"{rank}{kind}{microbatch}", start_s=0.123456789, end_s=0.234567891)
        for kind in "FIW"
        for microbatch in range(8)
    )
    return TimelineReport(step=step, rank=rank, step_s=0.5, spans=spans, memory_bytes=0)


def generation(number: int) -> Generation:
    return Generation(
        number=number, epoch=1, members=(0, 1, 2, 3), store_host="h", store_port=1, timeout_s=1.0
    )


def take(view: JobView, *logged: events.Event) -> None:
    for event in logged:
        view.fold(events.Record(time_s=view.last_s + 1, event=event))


def begun() -> JobView:
    """The view of a synthetic run that has not begun to train."""
    view = JobView()
    for record in records(steps=1):
        view.fold(record)
        if isinstance(record.event, events.Formed):
            break
    return view


def back_to(step: int, number: int = 2) -> events.Formed:
    return events.Formed(generation=generation(number), start=CheckpointRef(path="c", step=step), step=step)


def trained(view: JobView, first: int, last: int, number: int = 1) -> None:
    for step in range(first, last + 1):
        take(view, step_report(step, number))
        take(view, *(freeze_report(step, rank) for rank in range(RANKS)))
        if step % 50 == 0:
            take(view, *(timeline(step, rank) for rank in range(RANKS)))


def test_a_round_trip_changes_nothing() -> None:
    view = fold(records(steps=60))
    trained(view, 61, 80)
    take(view, back_to(70))
    take(view, replace(step_report(71, 2), loss=float("inf")))
    again = JobView.from_json(view.to_json())
    assert again == view
    take(view, step_report(72, 2))
    take(again, step_report(72, 2))
    assert again == view


@pytest.mark.parametrize("text", [b"", b"[]", b"[{}, 1]", b'[{"step": "many"}]', b"\xff"])
def test_a_snapshot_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        JobView.from_json(text)


@pytest.mark.parametrize("last", [25_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_many_steps_fit(last: int) -> None:
    """The view takes less than 2 MB, and less than 50 ms to serialize."""
    view = begun()
    for step in range(1, last + 1):
        view.fold(events.Record(time_s=1.7e9 + step, event=step_report(step)))
        if step % 100 == 0 or step > last - 300:
            for rank in range(RANKS):
                view.fold(events.Record(time_s=1.7e9 + step, event=freeze_report(step, rank)))
        if step % 1000 == 0:
            for rank in range(RANKS):
                view.fold(events.Record(time_s=1.7e9 + step, event=timeline(step, rank)))
    text = view.to_json()
    taken_s = []
    for _ in range(5):
        began_s = time.process_time()
        view.to_json()
        taken_s.append(time.process_time() - began_s)
    assert len(text) < 2_000_000
    assert min(taken_s) < 0.05
    assert (view.step, min(view.steps), max(view.steps)) == (last, 1, last)
    assert KEPT <= len(view.steps) < KEPT + EVERY


def test_the_newest_steps_stay_whole_and_older_ones_evenly() -> None:
    series = thin({step: step for step in range(1, 30_001)}, Grid.at(30_000))
    assert [step for step in series if step > 29_000] == [*range(29_001, 30_001)]
    older = [step for step in series if 1 < step <= 28_000]
    assert {after - before for before, after in pairwise(older)} == {8}
    assert 1 in series
    assert abs(len(series) - KEPT) <= 2


@pytest.mark.parametrize("newest", [1, KEPT, KEPT + 1, 9_000, 9_001, 20_000, 33_000, 33_001, 10**6])
def test_as_many_steps_as_there_is_room_for_are_kept(newest: int) -> None:
    grid = Grid.at(newest)
    entries = -(-grid.whole // grid.stride) + newest - grid.whole
    assert abs(entries - min(newest, KEPT)) <= 2
    assert newest - grid.whole >= min(newest, RECENT)


def test_steps_that_are_taken_back_leave_no_trace_but_their_time() -> None:
    view, other = begun(), begun()
    trained(view, 1, 80)
    take(view, back_to(60))
    trained(other, 1, 60)
    assert view.step == 60
    for part in ("steps", "validations", "measured", "curvature"):
        assert getattr(view, part) == getattr(other, part), part
    assert (view.freeze.steps, view.freeze.counted) == (other.freeze.steps, other.freeze.counted)
    assert [commit.step for commit in view.recovery.commits if commit.voided_by is not None] == [
        *range(61, 81)
    ]


def test_a_return_far_back_in_a_long_run_keeps_what_is_known() -> None:
    view = begun()
    trained(view, 1, 4000)
    counted = view.frozen_counts()
    assert counted is not None
    assert (counted.steps, counted.whole) == (4000, 4000)
    assert counted.layers[0].counts == [2000] * PARAMETERS
    assert view.freeze.average_ratio(view.step) == pytest.approx(0.125)
    take(view, back_to(1000))
    assert (view.step, max(view.steps)) == (1000, 1000)
    counted = view.frozen_counts()
    assert counted is not None
    assert counted.steps == 1000
    assert 850 <= counted.whole <= 1000
    trained(view, 1001, 1010, 2)
    stretches = list(view.recovery.stretches())
    assert [stretch.stands for stretch in stretches] == [True, False, True]
    assert sum(commit.steps for commit in view.recovery.commits) == 4010


def scale(id: str, ranks: int | None, spares: int | None) -> events.Commanded:
    return events.Commanded(id=id, name="scale", arguments={"ranks": ranks, "spares": spares})


def requested_sizes(view: JobView) -> list[events.Scaled]:
    return [event for event in recap(JobView.from_json(view.to_json())) if isinstance(event, events.Scaled)]


def test_a_number_of_ranks_stays_requested_until_it_has_its_answer() -> None:
    view = begun()
    take(view, scale("a", 6, None), events.Scaled(ranks=6, spares=0, places=6, id="a"))
    take(view, scale("b", None, 2), events.Scaled(ranks=6, spares=2, places=6, id="b"))
    take(view, events.Answered(id="b", done=True, step=0, text="keeps 2 spare ranks from now on"))
    newest = events.Scaled(ranks=6, spares=2, places=6, id="b")
    assert requested_sizes(view) == [replace(newest, id="a"), newest]
    # A command that the controller had not checked when it was killed changed nothing.
    take(view, scale("c", 7, None))
    assert requested_sizes(view) == [replace(newest, id="a"), newest]
    take(view, events.Answered(id="a", done=True, step=0, text="trains on with 6 ranks"))
    assert requested_sizes(view) == [newest]


def test_a_size_that_came_to_nothing_is_not_requested_any_more() -> None:
    view = begun()
    take(view, scale("a", 6, None), events.Scaled(ranks=6, spares=0, places=6, id="a"))
    kept = events.Scaled(ranks=4, spares=0, places=4)
    take(view, kept)
    assert requested_sizes(view) == [kept]
