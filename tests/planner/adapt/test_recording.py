"""What a planner is told and answers survives its recording to the bit, and another planner answers the same."""

from __future__ import annotations

import gzip
import math
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import observed_steps
import pytest
import small_profile

from planner.adapt.live import Heard, LivePlanner, LiveStart, Question
from planner.adapt.past import Past
from planner.adapt.recording import (
    Asked,
    Began,
    Ended,
    Given,
    PlannerAnswered,
    RecordedPlanner,
    RecordingError,
    Took,
    Writer,
    entries,
    entry_of,
    line_of,
    planner_of,
)
from planner.adapt.replaying import Observed, ReplayedDecision, replayed
from planner.features import FeatureSample
from planner.observed import StageTime
from planner.schedule.expand import schedule_of
from planner.search.replan import Replanner
from planner.simulation.slow_links import SlowLink

PROFILE = small_profile.profile(*(small_profile.layer(f"layer{number}") for number in range(4)))
PLAN = small_profile.plan(2, 2)
MEMBERS = (7, 9)
REPLANNER = Replanner(
    first=PLAN,
    schedule=schedule_of(PLAN),
    parameters=(10,) * 4,
    copies=0,
    profile=PROFILE,
    limits=(None, 9_000),
    links=(SlowLink(source=0, target=1, latency_s=0.001, bytes_per_s=1e6),),
)
SAMPLE = FeatureSample(values=(("cpu_busy", 1 / 3),), window_s=0.25)
times = partial(observed_steps.times, PLAN, MEMBERS, halves=True, surroundings=SAMPLE)


def question(step: int, **freezing: Any) -> Question:
    return Question(
        now=PLAN, domains=("a", "b"), members=MEMBERS, step=step, remaining_steps=1000, **freezing
    )


FREEZING: dict[str, Any] = {"ratios": ((0.1, 1 / 3),) * 4, "r_max": 1 / 3}


def live(planner: LivePlanner) -> list[Heard]:
    """A life with a neighbour, garbage, questions, and a rank that leaves."""
    planner.plan_with(REPLANNER)
    heard = [
        planner.observe([times(0, step, 1.0), times(1, step, 3.1 if step > 8 else 1.1)], [PLAN], MEMBERS)
        for step in range(12)
    ]
    mad = replace(
        times(0, 12, 1.0), times=(StageTime(kind="F", stage=0, seconds=math.nan, count=2),), halves=()
    )
    heard.append(planner.observe([mad], [PLAN], MEMBERS))
    assert planner.decide(question(12)).plan is not None
    assert "with its own freeze ratios" in planner.decide(question(12, **FREEZING)).reason
    planner.keep([9])
    heard.append(planner.observe([times(1, 14, 1.0)], [PLAN], MEMBERS))
    return heard


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return tmp_path / "run" / "planner.jsonl.gz"


def test_a_recorded_life_is_repeated_to_the_bit(recording: Path) -> None:
    start = LiveStart(profile=PROFILE, record=str(recording), forest=None)
    silent = LivePlanner(start)
    assert live(planner_of(start)) == live(silent)
    # The next planner's life follows.
    known = silent.observe([], [PLAN], MEMBERS)
    live(planner_of(replace(start, known=known.known, past=known.past)))
    answers = list(replayed(entries(recording)))
    observed = [answer for answer in answers if isinstance(answer, Observed)]
    decided = [answer for answer in answers if isinstance(answer, ReplayedDecision)]
    assert len(observed) > 20
    assert [answer.recorded == answer.decision for answer in decided] == [True] * 4
    assert all(answer.same for answer in observed if not answer.took.heard.ignored)
    assert [answer.heard.changes for answer in observed if answer.heard.changes] == [
        answer.took.heard.changes for answer in observed if answer.took.heard.changes
    ]
    (why,) = {why for answer in observed for _, why in answer.took.heard.ignored}
    assert "took nan s" in why
    assert not [answer for answer in answers if not answer.same]


def test_a_job_that_keeps_snapshots_is_repeated_as_one(recording: Path) -> None:
    planner = planner_of(LiveStart(profile=PROFILE, record=str(recording)))
    planner.plan_with(replace(REPLANNER, limits=(), copies=1, copy_every=5))
    for step in range(12):
        planner.observe([times(0, step, 1.0), times(1, step, 3.1 if step > 4 else 1.1)], [PLAN], MEMBERS)
    moved = planner.decide(question(12)).plan
    assert moved is not None
    assert (moved.snapshot_every, moved.standbys) == (5, ())
    assert any(moved.snapshots)
    (answer,) = [one for one in replayed(entries(recording)) if isinstance(one, ReplayedDecision)]
    assert answer.recorded is not None
    assert answer.recorded.plan == answer.decision.plan == moved


def test_a_recording_keeps_all_that_plans_are_made_with() -> None:
    changed: dict[str, Any] = {
        "parameters": (11,) * 4,
        "copies": 1,
        "copy_every": 5,
        "profile": None,
        "limits": (7, None),
        "links": (),
        "linked": (1, None),
        "divisible": False,
        "first": replace(PLAN, version=9),
        "schedule": replace(REPLANNER.schedule, name="another"),
        "frozen": 2,
        "released": 1,
        "kept": 1,
        "pipelines": 2,
        "frozen_cost": 1 / 6,
        "first_frozen": 1,
    }
    assert set(changed) == {one.name for one in fields(Replanner) if one.init}
    for name, value in changed.items():
        replanner = replace(REPLANNER, **{name: value})
        line = line_of(Given(replanner=replanner)).decode()
        read = entry_of(line)
        assert isinstance(read, Given)
        assert read.replanner == replanner != REPLANNER, name


def test_a_recording_without_the_intervals_of_snapshots_is_read() -> None:
    line = line_of(Given(replanner=REPLANNER)).decode()
    assert line.count('"copy_every":1,') == 1
    old = entry_of(line.replace('"copy_every":1,', ""))
    assert isinstance(old, Given)
    assert old.replanner == REPLANNER


def test_another_answer_than_the_recorded_one_is_noticed(recording: Path) -> None:
    live(planner_of(LiveStart(profile=PROFILE, record=str(recording))))
    changed = [
        replace(entry, decision=replace(entry.decision, plan=None))
        if isinstance(entry, PlannerAnswered)
        else entry
        for entry in entries(recording)
    ]
    assert [type(answer) for answer in replayed(changed) if not answer.same] == [ReplayedDecision] * 2


def test_entries_keep_every_value(recording: Path) -> None:
    forest = bytes(range(256))
    past = Past(
        changed=((0, 3), (7, 9)),
        before=((7, 1 / 3),),
        slow_steps=((4, 1.9), (5, 2.1)),
        fast_steps=((17, 2.0),),
        slower=False,
        links_changed=8,
        watched=((0, 0.1, 40), (7, 1 / 7, 0)),
    )
    start = LiveStart(profile=PROFILE, past=past, forest=forest, factors=((1 / 3, 0.1, 7e-301),))
    began = Began(start=start)
    assert entry_of(line_of(began).decode()) == began
    given = Given(replanner=REPLANNER)
    assert entry_of(line_of(given).decode()) == given
    assert given.replanner == REPLANNER


def test_a_question_recorded_without_a_freeze_program_is_read() -> None:
    asked = Asked(number=1, question=question(12))
    line = line_of(asked).decode()
    assert line.count(',"r_max":null') == 1
    assert entry_of(line.replace(',"r_max":null', "")) == asked


def test_what_a_killed_planner_left_half_written_is_left_out(recording: Path) -> None:
    live(planner_of(LiveStart(profile=PROFILE, record=str(recording))))
    # As lines, since NaN is not equal to itself.
    whole = list(map(line_of, entries(recording)))
    content = recording.read_bytes()
    for lost in (1, 7, 12, 40):
        recording.write_bytes(content[:-lost])
        left = list(map(line_of, entries(recording)))
        assert left == whole[: len(left)]
        assert len(left) >= len(whole) - 3


def test_what_the_next_planner_appends_to_a_half_written_member_is_read(recording: Path) -> None:
    live(planner_of(LiveStart(profile=PROFILE, record=str(recording))))
    whole = list(entries(recording))
    content = recording.read_bytes()
    for lost_bytes in (1, 9, 40):
        recording.write_bytes(content[:-lost_bytes])
        left = sum(1 for _ in entries(recording))
        live(planner_of(LiveStart(profile=PROFILE, record=str(recording))))
        lost: list[int] = []
        found = list(entries(recording, lost.append))
        assert list(map(line_of, found[left:])) == list(map(line_of, whole))
        assert len(lost) == 1
        assert recording.stat().st_size == 2 * len(content) - lost_bytes
        assert all(answer.same for answer in replayed(found))


def test_a_recording_that_gets_too_long_ends_with_a_word(recording: Path) -> None:
    writer = Writer(recording, most_bytes=2000)
    planner = RecordedPlanner(LiveStart(profile=PROFILE), writer)
    warnings: list[str] = []
    for step in range(3000):
        warnings += planner.observe([times(0, step, 1.0 + step / 7e3)], [PLAN], MEMBERS).warnings
    (warning,) = warnings
    assert "would take more than 2,000 bytes and ends here" in warning
    *_, last = entries(recording)
    assert isinstance(last, Ended)
    assert recording.stat().st_size < 2200
    assert all(answer.same for answer in replayed(entries(recording)))


def test_a_recording_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    planner = planner_of(LiveStart(profile=PROFILE, record=str(tmp_path / "file" / "planner.jsonl.gz")))
    first, *others = live(planner)
    assert "the recording" in first.warnings[0]
    assert not any(heard.warnings for heard in others)


def test_lines_wait_for_company_but_not_long(recording: Path) -> None:
    now = [0.0]
    writer = Writer(recording, clock=lambda: now[0])
    planner = RecordedPlanner(LiveStart(profile=PROFILE), writer)
    size = recording.stat().st_size
    planner.observe([times(0, 1, 1.0)], [PLAN], MEMBERS)
    assert recording.stat().st_size == size
    now[0] = 1.5
    planner.observe([times(0, 2, 1.0)], [PLAN], MEMBERS)
    assert [type(entry) for entry in entries(recording)].count(Took) == 2


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gz"
    other.write_bytes(gzip.compress(b'Stranger [{"a": 1}]\n'))
    with pytest.raises(RecordingError, match=r"line 1: .* unknown kind of entry 'Stranger'"):
        list(entries(other))
    other.write_bytes(gzip.compress(b'Took [{"batch": 1}]\n'))
    with pytest.raises(RecordingError, match="not of a planner's recording"):
        list(entries(other))
    other.write_bytes(b"plain text\n")
    with pytest.raises(RecordingError, match="it is no gzipped file"):
        list(entries(other))
    other.write_bytes(b"")
    with pytest.raises(RecordingError, match="it is no gzipped file"):
        list(entries(other))
    other.write_bytes(gzip.compress(b"\xff"))
    with pytest.raises(RecordingError, match="can't decode byte 0xff"):
        list(entries(other))
    newer = replace(Began(start=LiveStart(profile=PROFILE)), format=99)
    other.write_bytes(gzip.compress(line_of(newer)))
    with pytest.raises(RecordingError, match="format 99, and this program reads 2 and 3"):
        list(entries(other))


def test_only_a_sensible_order_is_repeated() -> None:
    kept = list(replayed([Began(start=LiveStart(profile=PROFILE))]))
    assert kept == []
    with pytest.raises(ValueError, match="comes before a planner began"):
        list(replayed([Given(replanner=REPLANNER)]))


def test_a_recording_of_format_2_is_repeated() -> None:
    """Two lives, the second of a job that keeps snapshots, as an earlier version wrote them down."""
    found = list(entries(Path(__file__).with_name("recording-format-2.jsonl.gz")))
    assert [entry.format for entry in found if isinstance(entry, Began)] == [2, 2]
    snapshots = replace(REPLANNER, limits=(), copies=1, copy_every=5)
    assert [entry.replanner for entry in found if isinstance(entry, Given)] == [REPLANNER, snapshots]
    answers = list(replayed(found))
    assert [type(answer) for answer in answers].count(ReplayedDecision) == 3
    assert all(answer.same for answer in answers)
    for wrong in ("[]", "{}", "[{}]", '[{"schedule": 1, "stages": 1, "programs": []}]'):
        with pytest.raises(ValueError, match="it lacks a replanner's schedule"):
            entry_of(f"PlansWith {wrong}")
