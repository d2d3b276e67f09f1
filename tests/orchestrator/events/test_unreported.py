"""What ranks leave when no controller takes their reports: read as part of the log, and taken into it once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_run

from orchestrator.events.log import EventLog, read_log
from orchestrator.events.types import Record
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import view_without_controller
from orchestrator.history.unreported import take_in, unreported
from workers.checkpoint.left_behind import FOLDER, NOTE, clear, leave_note, leave_reports, left_reports
from workers.protocol.errors import JobError
from workers.protocol.reports import CheckpointReport, Rescued, StepReport, WarningReport

RESCUED = Rescued(step=8, lost_s=1000.0, ends_s=1060.0, seconds=0.5)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    """A run whose log ends after step 5, without an end: its controller was lost."""
    log = EventLog(tmp_path / "events.jsonl")
    for record in synthetic_run.records():
        if isinstance(record.event, StepReport) and record.event.step > 5:
            break
        log.append(record)
    log.close()
    return JobFolder(str(tmp_path))


def logged(folder: JobFolder) -> list[Record]:
    return list(read_log(folder.events_path))


def later(folder: JobFolder, *steps: int) -> list[tuple[float, StepReport]]:
    """Reports of `steps`, in the same generation as the newest one."""
    newest = [record.event for record in logged(folder) if isinstance(record.event, StepReport)][-1]
    return [(2000.0 + step, replace(newest, step=step)) for step in steps]


def leave(folder: JobFolder) -> None:
    """What two ranks leave, the first of which does not know that its step 5 has arrived."""
    checkpoint = CheckpointReport(step=8, path=f"{folder.location}/c", bytes=3, seconds=0.5)
    first = [*later(folder, 5, 6, 7, 8), (2008.5, checkpoint), (2009.0, RESCUED)]
    first[0] = (2005.0, [r.event for r in logged(folder) if isinstance(r.event, StepReport)][-1])
    leave_reports(folder.location, 0, first)
    leave_reports(folder.location, 3, [(2007.0, WarningReport(rank=3, text="warm"))])


def test_reports_come_back_as_they_were_made(tmp_path: Path) -> None:
    told = [(1.5, RESCUED), (2.0, WarningReport(rank=1, text="x\ny"))]
    step = StepReport(
        generation=1,
        step=3,
        loss=float("nan"),
        grad_norm=float("inf"),
        lr=0.1,
        samples=8,
        tokens=0,
        step_s=0.5,
        bubble=0.0,
        skipped=True,
    )
    leave_reports(str(tmp_path), 1, [*told, (1.0, step)])
    found = list(left_reports(str(tmp_path)))
    assert found[1:] == told
    assert repr(found[0]) == repr((1.0, step))
    leave_reports(str(tmp_path), 1, [])
    assert list(left_reports(str(tmp_path))) == []


def test_the_log_and_what_was_left_are_one_history(folder: JobFolder) -> None:
    leave(folder)
    found = unreported(folder.location, logged(folder))
    assert [record.event.step for record in found if isinstance(record.event, StepReport)] == [6, 7, 8]
    assert len(found) == 3 + 3
    trouble = view_without_controller(folder).trouble
    assert "lost with the cluster's head after step 8, and --resume goes on" in trouble


def test_a_resumed_job_takes_it_into_the_log_once(folder: JobFolder) -> None:
    before = len(logged(folder))
    leave(folder)
    leave_note(folder.location, RESCUED, "10.0.0.1:6379")
    assert take_in(folder) == 6
    assert folder.steps() == 8
    assert len(logged(folder)) == before + 6
    assert not (Path(folder.location) / FOLDER).exists()
    assert take_in(folder) == 0
    leave(folder)  # once more: all of it is known
    assert take_in(folder) == 0
    assert len(logged(folder)) == before + 6


def test_steps_that_do_not_follow_on_are_left_out(folder: JobFolder) -> None:
    leave_reports(folder.location, 0, later(folder, 7, 8))
    assert unreported(folder.location, logged(folder)) == []


def test_a_torn_or_strange_line_is_left_out(folder: JobFolder) -> None:
    leave(folder)
    file = Path(folder.location) / FOLDER / "rank-3.jsonl"
    strange = [{"time_s": 1, "report": "Popen", "fields": {}}, {"report": "Rescued"}, [1], "x"]
    file.write_text("".join(json.dumps(line) + "\n" for line in strange) + file.read_text()[:30])
    assert len(unreported(folder.location, logged(folder))) == 5


def test_a_folder_at_work_is_left_alone(folder: JobFolder) -> None:
    leave(folder)
    lock = folder.lock()
    assert lock is not None
    with lock, pytest.raises(JobError, match="another run is at work"):
        take_in(folder)
    assert (Path(folder.location) / FOLDER).exists()


def test_the_note_says_how_to_resume(tmp_path: Path) -> None:
    leave_note(str(tmp_path), RESCUED, "10.0.0.1:6379")
    text = (tmp_path / FOLDER / NOTE).read_text()
    assert "10.0.0.1:6379, has not answered since 1970-01-01 00:16:40 UTC" in text
    assert "wrote a checkpoint of step 8 since" in text
    assert "freshet train SPEC --resume" in text
    leave_note(str(tmp_path), replace(RESCUED, error="disk full"), "10.0.0.1:6379")
    assert "could not write a checkpoint of step 8: disk full" in (tmp_path / FOLDER / NOTE).read_text()
    clear(str(tmp_path))
    assert not (tmp_path / FOLDER).exists()
    clear(str(tmp_path))
