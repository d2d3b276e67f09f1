"""The log of a job whose folder is a URI: segments only grow, and readers see the union of both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.events import segments
from orchestrator.events.log import read_log
from orchestrator.events.types import Record, Warned
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import load_folder
from orchestrator.history.job_view import fold
from orchestrator.history.snapshot import position, write_snapshot


def record(text: str) -> Record:
    return Record(time_s=1.0, event=Warned(text=text))


def texts(folder: JobFolder) -> list[str]:
    read = [record.event for record in read_log(folder.fetch_events())]
    return [event.text for event in read if isinstance(event, Warned)]


@pytest.fixture
def location(tmp_path: Path) -> str:
    (tmp_path / "bucket").mkdir()
    # pyarrow's own scheme for local files stands for any store.
    return f"file://{tmp_path}/bucket/run"


def on(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch to another machine, whose disk has its own cache."""
    monkeypatch.setenv("HOME", str(machine))


def test_a_log_is_never_replaced_by_an_older_copy(
    tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(tmp_path / "a", monkeypatch)
    folder = JobFolder(location)
    log = folder.open_log(1)
    log.append(record("one"))
    folder.publish_log()
    log.append(record("two"))
    # For example a verify, a timeline or a second start on the controller's machine.
    assert texts(JobFolder(location)) == ["one", "two"]
    log.append(record("three"))
    assert texts(JobFolder(location)) == ["one", "two", "three"]
    on(tmp_path / "b", monkeypatch)
    assert texts(JobFolder(location)) == ["one"]
    # A machine with a shorter copy removes nothing from the store either.
    on(tmp_path / "a", monkeypatch)
    folder.publish_log()
    on(tmp_path / "b", monkeypatch)
    held = JobFolder(location)
    (path,) = (tmp_path / "b").rglob("000001-*.jsonl")
    path.write_bytes(path.read_bytes()[:10])
    held.publish_log()
    assert texts(JobFolder(location)) == ["one", "two", "three"]


def test_a_lost_node_costs_what_was_not_yet_copied(
    tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(tmp_path / "a", monkeypatch)
    folder = JobFolder(location)
    log = folder.open_log(1)
    log.append(record("copied"))
    folder.publish_log()
    log.append(record("lost"))
    on(tmp_path / "b", monkeypatch)
    other = JobFolder(location)
    again = other.open_log(2)
    again.append(record("later"))
    other.publish_log()
    assert texts(other) == ["copied", "later"]
    # The first machine comes back with its copy: the union has all events, in order.
    on(tmp_path / "a", monkeypatch)
    assert texts(JobFolder(location)) == ["copied", "lost", "later"]
    JobFolder(location).publish_log()
    on(tmp_path / "c", monkeypatch)
    assert texts(JobFolder(location)) == ["copied", "lost", "later"]


def test_what_a_killed_controller_left_is_copied_by_the_next_one(
    tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(tmp_path / "a", monkeypatch)
    log = JobFolder(location).open_log(1)
    log.append(record("left"))
    with log.path.open("ab") as file:
        file.write(b'{"time_s": 1.0, "ki')
    again = JobFolder(location)
    again.open_log(2).append(record("next"))
    again.publish_log()
    on(tmp_path / "b", monkeypatch)
    assert texts(JobFolder(location)) == ["left", "next"]


def test_a_long_log_is_copied_in_pieces(
    tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(tmp_path / "a", monkeypatch)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 200)
    folder = JobFolder(location)
    log = folder.open_log(1)
    for number in range(12):
        log.append(record(str(number)))
        folder.publish_log()
    store = tmp_path / "bucket" / "run" / segments.FOLDER
    sizes = [path.stat().st_size for path in sorted(store.glob("*.jsonl"))]
    assert len(sizes) > 2
    assert all(size >= 200 for size in sizes[:-1])
    folder.add(record("after the end"))
    on(tmp_path / "b", monkeypatch)
    assert texts(JobFolder(location)) == [*map(str, range(12)), "after the end"]


def test_the_view_is_copied_with_the_log_and_the_newer_one_counts(
    tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(folder: JobFolder, log: segments.SegmentedLog, text: str) -> None:
        log.append(record(text))
        view = fold(map(record, ["start", text])).to_json()
        write_snapshot(folder.snapshot_path, view, position(log.path, log.size))

    on(tmp_path / "a", monkeypatch)
    folder = JobFolder(location)
    log = folder.open_log(1)
    log.append(record("start"))
    keep(folder, log, "copied")
    folder.publish_log()
    log.append(record("tail"))
    folder.publish_log()
    on(tmp_path / "b", monkeypatch)
    found = load_folder(JobFolder(location))
    assert (found.from_snapshot, found.folded, found.view.events) == (True, 1, 3)
    # This machine's snapshot is newer than the store's, so it stays.
    on(tmp_path / "a", monkeypatch)
    keep(folder, log, "kept here")
    mine = folder.snapshot_path.read_bytes()
    assert JobFolder(location).fetch_snapshot().read_bytes() == mine
