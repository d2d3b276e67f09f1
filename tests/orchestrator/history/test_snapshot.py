"""A takeover loads snapshot plus tail: the result equals the fold of the entire log, and a snapshot that does
not fit is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_run import records

from orchestrator.events.log import DamagedLogError, EventLog
from orchestrator.history import snapshot
from orchestrator.history.job_view import JobView, fold
from orchestrator.history.snapshot import SNAPSHOT, load, position, write_snapshot

RUN = records(steps=120)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with a snapshot in its middle."""
    path = tmp_path / "events.jsonl"
    writer = EventLog(path)
    for record in RUN[:90]:
        writer.append(record)
    view = fold(RUN[:90]).to_json()
    write_snapshot(path.with_name(SNAPSHOT), view, position(path, writer.size))
    for record in RUN[90:]:
        writer.append(record)
    writer.close()
    return path


def loaded(log: Path) -> snapshot.LoadedLog:
    return load([log], log.with_name(SNAPSHOT))


def test_snapshot_and_tail_are_the_whole_log(log: Path) -> None:
    found = loaded(log)
    assert (found.view, found.from_snapshot, found.folded) == (fold(RUN), True, len(RUN) - 90)
    assert list(found.recent) == RUN
    assert found.torn_bytes == 0


def test_without_a_snapshot_all_is_folded(log: Path) -> None:
    log.with_name(SNAPSHOT).unlink()
    found = loaded(log)
    assert (found.view, found.from_snapshot, found.folded) == (fold(RUN), False, len(RUN))


@pytest.mark.parametrize("harm", ["version", "view", "cut", "empty"])
def test_a_snapshot_that_cannot_be_used_is_not(log: Path, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log.with_name(SNAPSHOT)
    content = path.read_bytes()
    if harm == "version":
        monkeypatch.setattr(snapshot, "VERSION", snapshot.VERSION + 1)
    elif harm == "view":
        path.write_bytes(content.partition(b"\n")[0] + b"\n[{]")
    else:
        path.write_bytes(content[: len(content) // 2] if harm == "cut" else b"")
    found = loaded(log)
    assert (found.view, found.from_snapshot) == (fold(RUN), False)


def test_a_log_that_was_mended_by_hand_is_folded_from_its_beginning(log: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    del lines[80]
    log.write_bytes(b"".join(lines))
    found = loaded(log)
    assert (found.view, found.from_snapshot) == (fold([*RUN[:80], *RUN[81:]]), False)


def test_a_torn_last_line_is_left_out_and_told(log: Path) -> None:
    with log.open("ab") as file:
        file.write(b'{"time_s": 12.')
    found = loaded(log)
    assert (found.view, found.torn_bytes) == (fold(RUN), 14)
    assert EventLog(log).size == log.stat().st_size
    assert loaded(log).torn_bytes == 0


def test_damage_before_the_snapshot_costs_nothing(log: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    lines[3] = b"?" * (len(lines[3]) - 1) + b"\n"
    log.write_bytes(b"".join(lines))
    assert loaded(log).view == fold(RUN)


def test_damage_after_it_is_named(log: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    lines[100] = b"?" * (len(lines[100]) - 1) + b"\n"
    log.write_bytes(b"".join(lines))
    found = loaded(log)
    assert isinstance(found.damage, DamagedLogError)
    assert f"{log}, line 101, is no event" in str(found.damage)
    assert found.view == fold(RUN[:100])


def test_a_log_in_pieces_is_read_as_one(tmp_path: Path) -> None:
    pieces = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, path in enumerate(pieces):
        writer = EventLog(path)
        for record in RUN[number * 50 : (number + 1) * 50 if number < 2 else None]:
            writer.append(record)
        if number == 1:
            view = fold(RUN[:100]).to_json()
            write_snapshot(tmp_path / SNAPSHOT, view, position(path, writer.size))
        writer.close()
    with pieces[0].open("ab") as file:
        file.write(b"torn")
    found = load(pieces, tmp_path / SNAPSHOT)
    assert (found.view, found.folded) == (fold(RUN), len(RUN) - 100)
    assert JobView.from_json(found.view.to_json()) == found.view
