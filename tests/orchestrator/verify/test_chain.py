"""The chain of hashes through a log: each kind of change is found at its line, whether or not later hashes are made
anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_run import BATCHES, eventful
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.events.log import NO_LINE, EventLog, line_sha256
from orchestrator.events.types import PREVIOUS, Finished, Record, Warned
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import fold
from orchestrator.history.snapshot import position, write_snapshot
from orchestrator.verify.chain import LogChain, read_chain
from orchestrator.verify.verification import verify_run
from workers.checkpoint.folder import checkpoint_folder, write_manifest
from workers.checkpoint.manifest import Manifest
from workers.protocol.reports import CheckpointReport

Lines = list[bytes]
FILE = "events.jsonl"


def written(folder: Path) -> Lines:
    """The lines of a sound log, as `EventLog` wrote it, of a run that keeps no checkpoint."""
    log = EventLog(folder / FILE)
    for record in eventful().records:
        event = record.event
        if isinstance(event, Finished):
            log.append(replace(record, event=replace(event, state_sha256=None)))
        elif not isinstance(event, CheckpointReport):
            log.append(record)
    log.close()
    return (folder / FILE).read_bytes().splitlines(keepends=True)


@pytest.fixture
def sound(tmp_path: Path) -> Lines:
    return written(tmp_path)


def place_of(lines: Lines, kind: str) -> int:
    """Index of the second line of that kind, or else of the only one."""
    places = [index for index, line in enumerate(lines) if json.loads(line)["event"] == kind]
    return places[1] if len(places) > 1 else places[0]


def edited(lines: Lines, index: int, **fields: Any) -> Lines:
    line = json.loads(lines[index])
    assert line.keys() >= fields.keys()
    return [*lines[:index], json.dumps({**line, **fields}).encode() + b"\n", *lines[index + 1 :]]


def with_new_hashes(lines: Lines) -> Lines:
    """`lines` as a forger leaves them who knows of the hashes."""
    before, forged = NO_LINE, []
    for line in lines:
        forged.append(json.dumps({**json.loads(line), PREVIOUS: before}).encode() + b"\n")
        before = line_sha256(forged[-1])
    return forged


def chain(lines: Lines, *heads: str) -> LogChain:
    return read_chain([(FILE, b"".join(lines))], [("a checkpoint", head) for head in heads])


def test_a_sound_log_is_chained_and_its_witness_covers_it(sound: Lines) -> None:
    found = chain(sound, line_sha256(sound[-1]))
    assert found.wrong == found.unproved() == []
    assert found.head == line_sha256(sound[-1])
    open_end = chain(sound, line_sha256(sound[-4]))
    assert open_end.wrong == []
    total = len(sound)
    assert f"lines {total - 2} to {total} are as they were written" in open_end.unproved()[0]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("StepReport", {"loss": 0.5}),
        ("StepReport", {"grad_norm": 0.5}),
        ("StepReport", {"tokens": 1}),
        ("Submitted", {"spec": {"job": {"seed": 8}}}),
        ("RankEnded", {"time_s": 5.0}),
    ],
)
def test_a_changed_line_is_named(sound: Lines, kind: str, fields: dict[str, Any]) -> None:
    index = place_of(sound, kind)
    forged = edited(sound, index, **fields)
    (told,) = chain(forged, line_sha256(sound[-1])).wrong
    was, now = line_sha256(sound[index])[:12], line_sha256(forged[index])[:12]
    assert told == (
        f"{FILE}, line {index + 1}, was changed, or lines after it were deleted: {FILE}, line {index + 2} expects"
        f" sha256 {was} before it, and line {index + 1} has {now}"
    )
    # Whoever makes the later hashes anew contradicts the checkpoint.
    consistent = chain(with_new_hashes(forged), line_sha256(sound[-1]))
    assert len(consistent.wrong) == 1
    assert "a line was changed and all later hashes made anew" in consistent.wrong[0]
    early = line_sha256(sound[0])
    if index:
        told = chain(with_new_hashes(forged), line_sha256(sound[-1]), early).wrong[0]
        assert "changed after events.jsonl, line 1, which another witness names, and" in told
    assert chain(with_new_hashes(forged)).wrong == []


def test_a_changed_last_line_contradicts_its_witness(sound: Lines) -> None:
    forged = edited(sound, len(sound) - 1, state_sha256="0" * 64)
    assert "names a line of sha256" in chain(forged, line_sha256(sound[-1])).wrong[0]
    assert f"lines {len(sound)} to {len(sound)} are" in chain(forged, line_sha256(sound[-2])).unproved()[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda all: [*all[:5], *all[6:]], "line 5, was changed, or lines after it were deleted"),
        (lambda all: all[2:], "line 1, was not the first"),
        (
            lambda all: [*all[:5], all[2], *all[5:]],
            "line 6, was inserted: line 7 expects line 5 before it",
        ),
        (lambda all: [*all[:5], all[6], all[5], *all[7:]], "line 6, is not in its place"),
        (
            lambda all: [*all[:5], b'{"time_s": 1.0, "kind": "Warned", "text": ""}\n', *all[5:]],
            "line 6, was changed",
        ),
        (lambda all: all[:-3], "has none: its end was cut off"),
        (lambda all: [b"{}\n", *all], "line 2 expects nothing before it"),
    ],
)
def test_lines_deleted_inserted_or_moved_are_named(
    sound: Lines, change: Callable[[Lines], Lines], told: str
) -> None:
    found = chain(change(sound), line_sha256(sound[-1]))
    assert told in " ".join(found.wrong)


def test_an_inserted_line_that_carries_the_right_hash_is_named(sound: Lines) -> None:
    line = json.dumps({"time_s": 1.0, "kind": "Warned", "text": "", PREVIOUS: line_sha256(sound[4])}).encode()
    found = chain([*sound[:5], line + b"\n", *sound[5:]])
    assert found.wrong == [
        f"{FILE}, line 6, was inserted: {FILE}, line 7 expects line 5 before it, by the hash that it carries"
    ]


def test_an_old_log_says_what_it_cannot_prove(sound: Lines, tmp_path: Path) -> None:
    old = [
        json.dumps({k: v for k, v in json.loads(line).items() if k != PREVIOUS}).encode() + b"\n"
        for line in sound
    ]
    assert chain(old).wrong == []
    assert "carry no hashes, an older version wrote them" in chain(old).unproved()[0]
    # Hashes taken away do not make it one: its checkpoints know better.
    assert chain(old, line_sha256(sound[-1])).wrong
    # A resumed old log is chained from its last line on.
    path = tmp_path / "resumed" / FILE
    path.parent.mkdir()
    path.write_bytes(b"".join(old))
    log = EventLog(path)
    log.append(Record(time_s=1.0, event=Warned(text="resumed")))
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    found = chain(lines, line_sha256(lines[-1]))
    assert found.wrong == []
    assert [f"lines 1 to {len(old) - 1} are as" in text for text in found.unproved()] == [True]
    assert chain(edited(lines, len(old) - 1, step=3)).wrong


def verified(folder: Path, *options: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["verify", str(folder), *options])
    return done.exit_code, done.stdout.splitlines()


def test_the_command_tells_a_whole_proof_from_a_part_and_from_a_changed_log(tmp_path: Path) -> None:
    """0, 3 and 1; a snapshot, a checkpoint's manifest and --head are witnesses."""
    lines = written(tmp_path)
    path, total = tmp_path / FILE, len(lines)
    code, told = verified(tmp_path)
    assert code == 3
    assert told[0].startswith(f"not proved: that {FILE}, lines 1 to {total} are")
    assert told[-1].startswith("proved in part")
    write_snapshot(
        tmp_path / "view.json", fold(eventful().records).to_json(), position(path, path.stat().st_size)
    )
    code, told = verified(tmp_path)
    assert code == 0, told
    assert told[0].startswith("taken for granted: nobody rewrote the log")
    head = line_sha256(lines[-1])
    assert f"{total} lines of log, with head {head}" in told
    assert told[-1].endswith("no line of the log changed, missing or inserted")
    code, told = verified(tmp_path, "--head", head)
    assert code == 0, told
    assert not [line for line in told if line.startswith("taken for granted: nobody")]
    path.write_bytes(b"".join(with_new_hashes(edited(lines, place_of(lines, "StepReport"), loss=0.5))))
    code, told = verified(tmp_path)
    assert code == 1
    assert [line for line in told if line.startswith("WRONG: view.json was made when events.jsonl had")]
    (tmp_path / "view.json").unlink()
    assert verified(tmp_path)[0] == 3
    code, told = verified(tmp_path, "--head", head)
    assert code == 1
    assert [line for line in told if line.startswith("WRONG: --head names a line of sha256")]
    fields: dict[str, Any] = {"generation": 1, "spec": {}, "plan": {}, "layers": (), "files": {}}
    saved = Manifest(step=4, samples=BATCHES.course.taken(4), log_sha256=head, **fields)
    write_manifest(checkpoint_folder(str(tmp_path), 4, 1), saved)
    code, told = verified(tmp_path)
    assert code == 1
    assert [line for line in told if "WRONG: the manifest of the checkpoint of step 4 names" in line]
    path.write_bytes(b"".join(lines))
    assert verified(tmp_path)[0] == 0


def test_a_line_that_is_no_event_is_named_first(tmp_path: Path) -> None:
    lines = written(tmp_path)
    (tmp_path / FILE).write_bytes(b"".join([*lines[:3], b"no event\n", *lines[4:]]))
    ledger, _ = verify_run(str(tmp_path))
    assert f"{FILE}, line 4, was changed or inserted" in ledger.wrong[0]
    assert [text for text in ledger.wrong if "line 4, is no event" in text]


def test_segments_are_chained_and_lines_that_came_late_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(text: str) -> Record:
        return replace(eventful().records[0], event=Warned(text=text))

    def seen() -> LogChain:
        return read_chain([(path.name, path.read_bytes()) for path in JobFolder(location).log_files()])

    (tmp_path / "bucket").mkdir()
    location = f"file://{tmp_path}/bucket/run"
    monkeypatch.setattr("orchestrator.events.segments.SEGMENT_BYTES", 200)
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    folder = JobFolder(location)
    log = folder.open_log(1)
    for text in "abc":
        log.append(record(text))
    assert folder.durable_head(log.head) is None
    folder.publish_log()
    assert folder.durable_head("newest") == log.head
    log.append(record("not copied"))
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    other = JobFolder(location)
    other.fetch_events()
    again = other.open_log(2)
    again.append(record("later"))
    other.publish_log()
    whole = seen()
    assert len({line.file for line in whole.lines}) == 3
    assert (len(whole.lines), whole.wrong, whole.late) == (4, [], [])
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    late = seen()
    assert (len(late.lines), late.wrong) == (5, [])
    assert [(first.number, last.number) for first, last in late.late] == [(2, 2)]
    assert "came to light after the next controller had begun" in " ".join(late.unproved())
