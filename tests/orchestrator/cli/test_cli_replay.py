"""`freshet adapt replay`: what it says of a recording, and of one that another planner answers otherwise."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import small_profile

from orchestrator.cli.replaying import replay_command
from orchestrator.history.folder import PLANNER
from planner.adapt.live import LiveStart
from planner.adapt.recording import Entry, Took, entries, line_of, planner_of
from planner.observed import LinkTime, StageTime, StepTimes
from planner.profile import Link
from workers.protocol.errors import JobError

PROFILE = small_profile.profile(
    *(small_profile.layer(f"layer{number}") for number in range(4)),
    link=Link(latency_s=0.0, bytes_per_s=1e12),
)
PLAN = small_profile.plan(2, 2)
SLOW_FROM = 8


def times(step: int) -> StepTimes:
    """Of rank 0, which becomes slow, as does its link: F takes 1 s per layer and microbatch, B 6 s."""
    slow = step >= SLOW_FROM
    return StepTimes(
        rank=0,
        place=0,
        step=step,
        plan=PLAN.key,
        times=tuple(
            StageTime(kind=kind, stage=0, seconds=2 * 2 * pass_s * (3.0 if slow else 1.0), count=2)
            for kind, pass_s in (("F", 1.0), ("B", 6.0))
        ),
        frozen=False,
        links=(
            LinkTime(target=1, size_bytes=0, seconds=0.0, at_least=True, round_trip_s=100.0 if slow else 0.0),
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder with a recording."""
    planner = planner_of(LiveStart(profile=PROFILE, record=str(tmp_path / PLANNER)))
    for step in range(1, SLOW_FROM + 4):
        planner.observe([times(step)], [PLAN], (0, 1))
    planner.keep([0, 1])
    return tmp_path


def rewritten(folder: Path, changed: Sequence[Entry]) -> Path:
    path = folder / "changed.gz"
    path.write_bytes(gzip.compress(b"".join(map(line_of, changed))))
    return path


def test_changes_of_ranks_and_links_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_command(folder)
    told = capsys.readouterr().out
    assert "rank 0 is 3.00 times slower" in told
    assert "the link from rank 0 to rank 1" in told
    assert told.endswith("all answers are as recorded\n")


def test_an_answer_that_differs_is_named_and_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = list(entries(folder / PLANNER))
    other = [
        replace(entry, heard=replace(entry.heard, age=99))
        if isinstance(entry, Took) and entry.batch[0].step == 3
        else entry
        for entry in known
    ]
    with pytest.raises(JobError, match=r"1 answer of the planner differs from those recorded$"):
        replay_command(rewritten(folder, other))
    assert "step 3: DIFFERS: in age\n" in capsys.readouterr().out
    silent = [
        replace(entry, heard=replace(entry.heard, changes=())) if isinstance(entry, Took) else entry
        for entry in known
    ]
    with pytest.raises(JobError):
        replay_command(rewritten(folder, silent))
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert "DIFFERS: recorded the link from" in told
    assert "now rank 0 is 3.00 times slower" in told


WAY_OUT = r"\[adapt\] record = true has a job write one, planner\.\S+ in its folder$"


def test_a_job_without_a_recording_is_told_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=rf"No such file or directory; {WAY_OUT}"):
        replay_command(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"step,loss\n", "is no recording: it is no gzipped file"),
        (gzip.compress(b"step,loss\n"), "line 1: not of a planner's recording: .*"),
    ],
    ids=["text", "something else, gzipped"],
)
def test_a_file_that_is_no_recording_is_refused_with_how_to_make_one(
    tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(JobError, match=f"{said}; {WAY_OUT}"):
        replay_command(file)
