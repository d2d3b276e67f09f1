"""Folders of runs that someone else has filled: each bad run is listed by name, and hides or stops nothing else."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from serving import made_runs, service_process, settings_in, write_run
from synthetic_run import records

from dashboard.jobs import past_runs
from orchestrator.events.types import Finished
from orchestrator.history import snapshot

LINES = [record.to_json() for record in records(steps=20)]
DEEP = '{"time_s": 1, "kind": "StepReport", "loss": ' + "[" * 100_000 + "]" * 100_000 + "}"
ENDS_S = 90


def deep(run: Path) -> str:
    (run / "events.jsonl").write_text("\n".join([*LINES[:5], DEEP, *LINES[5:]]) + "\n")
    return "line 6, is no event: it is nested too deeply"


def pipe(run: Path) -> str:
    os.mkfifo(run / "events.jsonl")
    return "events.jsonl is not a regular file"


def folder_as_log(run: Path) -> str:
    (run / "events.jsonl").mkdir()
    return "events.jsonl"


def unix_socket(run: Path) -> str:
    with socket.socket(socket.AF_UNIX) as listener:
        os.symlink(run, link := f"/tmp/freshet-{os.getpid()}")  # such an address has at most 107 characters
        listener.bind(f"{link}/events.jsonl")
        os.unlink(link)
    return "cannot read the event log"


def zeros(run: Path) -> str:
    with (run / "events.jsonl").open("wb") as file:
        file.truncate(200 << 30)
    return "line 1, is no event: it has more than"


def time_as_text(run: Path) -> str:
    (run / "events.jsonl").write_text(LINES[0].replace('"time_s": ', '"time_s": "x", "was": ', 1) + "\n")
    return "line 1, is no event: its time is no number"


def spec_of_numbers(run: Path) -> str:
    line = json.loads(LINES[0])
    (run / "events.jsonl").write_text(json.dumps(line | {"spec": {"job": 7}}) + "\n")
    return "cannot be understood"


def steps_as_text(run: Path) -> str:
    line = json.loads(LINES[0])
    (run / "events.jsonl").write_text(json.dumps(line | {"spec": {"job": {"steps": "many"}}}) + "\n")
    return "cannot be understood"


def link_out(run: Path) -> str:
    outside = run.parents[1] / "outside.jsonl"
    outside.write_text("a secret\n")
    (run / "events.jsonl").symlink_to(outside)
    return "its events.jsonl is a link that leads out of"


def profile_out(run: Path) -> str:
    (run / "events.jsonl").write_text("\n".join(LINES) + "\n")
    (run / "profile.json").symlink_to("/etc/hostname")
    return "its profile.json is a link that leads out of"


def link_to_itself(run: Path) -> str:
    (run / "events.jsonl").symlink_to(run / "events.jsonl")
    return "cannot be read"


BAD: tuple[Callable[[Path], str], ...] = (
    deep,
    pipe,
    folder_as_log,
    unix_socket,
    zeros,
    time_as_text,
    spec_of_numbers,
    steps_as_text,
    link_out,
    profile_out,
    link_to_itself,
)


def well_but_for_what_is_beside(runs: Path) -> None:
    """A run whose snapshot and profile are pipes, and one whose snapshot is nested too deeply."""
    lines = "\n".join(LINES) + "\n"
    for name in ("piped", "nested"):
        (runs / name).mkdir()
        (runs / name / "events.jsonl").write_text(lines)
    os.mkfifo(runs / "piped" / "view.json")
    os.mkfifo(runs / "piped" / "profile.json")
    (runs / "nested" / "view.json").write_text("[" * 100_000)
    (runs / "nested" / "profile.json").write_text("[" * 100_000)


def links(runs: Path, outside: Path) -> None:
    """Links to runs that are listed already, to one that is not, and out of the folder."""
    write_run(outside / "foreign", records(steps=3))
    write_run(runs / "a" / "b" / "deep", records(steps=3))
    (runs / "self").symlink_to(runs)
    (runs / "again").symlink_to(runs / "gpt")
    (runs / "down").symlink_to(runs / "a" / "b" / "deep")
    (runs / "out").symlink_to(outside)
    (runs / "other").symlink_to(outside / "foreign")
    (runs / "a" / "up").symlink_to(outside.parent)
    (runs / "loop").symlink_to(runs / "loop")


STUCK = """
import threading
import dashboard.jobs.past_runs as past_runs
real = past_runs.placed_view_in
def read(folder, known):
    return threading.Event().wait() if folder.location.endswith("stuck") else real(folder, known)
past_runs.placed_view_in = read
"""
"""Reading the run `stuck` never ends."""


def test_bad_runs_are_named_and_hide_or_stop_nothing_else(tmp_path: Path) -> None:
    runs = made_runs(tmp_path / "runs")
    problems = {"half": "no event log yet"}
    for make in BAD:
        run = runs / make.__name__
        run.mkdir()
        (run / "job.json").write_text("{}")
        problems[run.name] = make(run)
    well_but_for_what_is_beside(runs)
    links(runs, tmp_path / "outside")
    with service_process(tmp_path, patch=STUCK) as (client, process):
        for _ in range(2):  # read, and as it is kept
            answer = client.get("/api/v1/runs")
            assert answer.status_code == 200, answer.text
            listed = {run["run"]: run for run in answer.json()["runs"]}
            assert len(listed) == len(answer.json()["runs"])
            for name, problem in problems.items():
                assert problem in listed[name]["problem"], (name, listed[name])
                assert "secret" not in listed[name]["problem"]
            assert listed.keys() - problems.keys() == {"gpt", "frozen", "piped", "nested", "down"}
            assert all(not run["problem"] for name, run in listed.items() if name not in problems)
        assert all(name in client.get("/runs").text for name in problems)
        for name in ("piped", "nested"):
            assert client.get(f"/runs/{name}").status_code == 200
            assert client.get(f"/api/v1/runs/{name}/profile").status_code == 404
        assert client.get("/api/v1/runs/profile_out/profile").status_code == 422
        for name in ("self~gpt", "out~foreign", "other", "again", "a~up~outside"):
            assert client.get(f"/api/v1/runs/{name}").status_code == 404
        write_run(runs / "stuck", records(steps=3))
        with pytest.raises(httpx.ReadTimeout):
            client.get("/api/v1/runs/stuck", timeout=1)
        assert client.get("/healthz").status_code == 200
        process.terminate()
        _, said = process.communicate(timeout=ENDS_S)
        assert process.returncode == 0, said
    assert said.count(f"{runs}/other is a link that leads out of {runs}") == 1


def test_a_log_that_grew_is_read_from_where_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        line
        for record, line in zip(records(steps=20), LINES, strict=True)
        if not isinstance(record.event, Finished)
    ]
    settings = settings_in(tmp_path)
    log = write_run(tmp_path / "runs" / "growing", []) / "events.jsonl"
    log.write_text("\n".join(lines[:-5]) + "\n")
    parsed: list[int] = []
    real = snapshot.parse_line
    monkeypatch.setattr(snapshot, "parse_line", lambda *a: parsed.append(1) or real(*a))
    past = past_runs.PastRuns(settings.runs)
    run = past.find("growing")

    def read() -> tuple[int, int]:
        parsed.clear()
        step = past.cached(run, lambda view: view.step)
        assert isinstance(step, int)
        return step, len(parsed)

    first, count = read()
    assert count == len(lines) - 5
    assert read() == (first, 0)
    kept = past.view(run)
    before = kept.step
    with log.open("a") as file:
        file.write("\n".join(lines[-5:]) + "\n")
    assert read() == (20, 5)
    assert kept.step == before  # whoever looks at it keeps what they see
    assert past.view(run) == past_runs.PastRuns(settings.runs).view(run)
    # A shorter log in its place is read from its beginning.
    log.write_text("\n".join(lines[:-5]) + "\n")
    assert read() == (first, len(lines) - 5)
