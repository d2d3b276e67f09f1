"""A job as its folder shows it, where the log is whole, torn, damaged, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_run import records

from orchestrator.events.types import Finished
from orchestrator.history.folder import EVENTS, JobFolder
from orchestrator.history.folder_view import view_in, view_without_controller
from orchestrator.history.job_view import fold
from orchestrator.history.snapshot import SNAPSHOT, position, write_snapshot
from workers.protocol.errors import JobError

RUN = [record for record in records(steps=30) if not isinstance(record.event, Finished)]
TORN = b'{"time_s": 12.5, "kind": "st'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a job that was lost before its end."""
    lines = (record.to_json() for record in RUN)
    (tmp_path / EVENTS).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def snapshot_at(run: Path, lines: int) -> None:
    """Put a snapshot of the first `lines` of the log beside it."""
    log = run / EVENTS
    size = len(b"".join(log.read_bytes().splitlines(keepends=True)[:lines]))
    write_snapshot(run / SNAPSHOT, fold(RUN[:lines]).to_json(), position(log, size))


def damage(run: Path, line: int) -> None:
    """Write over a line of the log, counted from 1."""
    log = run / EVENTS
    lines = log.read_bytes().splitlines(keepends=True)
    lines[line - 1] = b"?" * (len(lines[line - 1]) - 1) + b"\n"
    log.write_bytes(b"".join(lines))


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_torn_last_line_costs_that_line_alone(run: Path, snapshot: bool) -> None:
    if snapshot:
        snapshot_at(run, 20)
    with (run / EVENTS).open("ab") as file:
        file.write(TORN)
    before = (run / EVENTS).read_bytes()
    assert view_in(JobFolder(str(run))) == fold(RUN)
    assert (run / EVENTS).read_bytes() == before, "a reader mends nothing: a writer may be at work"
    lost = view_without_controller(JobFolder(str(run)))
    assert lost.step == 30
    assert "it has no controller" in lost.trouble


def test_a_log_that_breaks_off_anywhere_shows_its_whole_lines(run: Path) -> None:
    content = (run / EVENTS).read_bytes()
    first = content.index(b"\n") + 1
    for kept in range(first, len(content), len(content) // 25):
        (run / EVENTS).write_bytes(content[:kept])
        assert view_in(JobFolder(str(run))) == fold(RUN[: content[:kept].count(b"\n")])


def test_damage_in_the_middle_is_named_by_file_and_line(run: Path) -> None:
    damage(run, 12)
    for read in (view_in, view_without_controller):
        with pytest.raises(JobError, match=f"{EVENTS}, line 12, is no event"):
            read(JobFolder(str(run)))


def test_damage_before_a_snapshot_hides_nothing_and_after_it_is_named(run: Path) -> None:
    # The snapshot checks only the last bytes before its place.
    snapshot_at(run, 30)
    damage(run, 2)
    assert view_in(JobFolder(str(run))) == fold(RUN)
    damage(run, 33)
    with pytest.raises(JobError, match="line 33, is no event"):
        view_in(JobFolder(str(run)))


@pytest.mark.parametrize("content", [None, b"", TORN])
def test_a_folder_without_a_whole_line_holds_no_log(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / EVENTS).write_bytes(content)
    with pytest.raises(JobError, match="event log"):
        view_in(JobFolder(str(tmp_path)))


def test_a_job_that_has_ended_is_in_no_trouble(run: Path) -> None:
    end = records(steps=30)[-1]
    with (run / EVENTS).open("a") as file:
        file.write(end.to_json() + "\n")
    view = view_without_controller(JobFolder(str(run)))
    assert (view.outcome, view.trouble) == (end.event, "")
