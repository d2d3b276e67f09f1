"""A sweep as users run it: real jobs, each a process; what fails leaves the others alone, and what is done stays."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pace import patient
from tiny_jobs import write_spec
from typer.testing import CliRunner

from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED, USER_ERROR
from orchestrator.cli.main import app
from orchestrator.events.log import read_log
from orchestrator.events.types import Submitted
from workers.protocol.reports import StepReport

ROOT = Path(__file__).resolve().parents[3]


def command(folder: Path, *options: str) -> list[str]:
    """A sweep of jobs of one rank on clusters of their own."""
    spec = folder / "tiny.toml"
    if not spec.exists():
        write_spec(folder, "tiny")
    settings = ("pipeline.ranks=1", "cluster.address=local", "job.sample_tokens=0", "freeze.method=prefix")
    sets = [part for setting in settings for part in ("--set", setting)]
    return ["sweep", str(spec), *sets, "--out", str(folder / "out"), *options]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *command(folder, *options)],
        env={**environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_sweep_goes_on_past_a_job_that_fails_and_again_from_what_is_done(tmp_path: Path) -> None:
    grid = ("--grid", "freeze.prefix=2,99")
    process = start(tmp_path, *grid)
    output, _ = process.communicate(timeout=patient(300))
    assert process.returncode == FAILED, output
    assert "prefix=2: done" in output
    assert "prefix=99: freeze.prefix freezes 99 layers, and the model has 6" in output
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").open()))
    assert [row["freeze.prefix"] for row in rows] == ["2", "99"]
    assert float(rows[0]["loss"]) > 0
    assert float(rows[0]["frozen"]) > 0
    assert "freezes 99 layers" in rows[1]["error"]
    page = (tmp_path / "out" / "sweep.html").read_text()
    assert "Sweep of tiny" in page
    assert "1 not done: freeze.prefix freezes 99 layers" in page
    log = tmp_path / "out" / "prefix=2" / "job" / "events.jsonl"
    before = log.read_bytes()
    again = CliRunner().invoke(app, command(tmp_path, "--grid", "freeze.prefix=2"))
    assert "prefix=2: done" in again.output
    assert log.read_bytes() == before, "it was trained again"

    # Its folder is for the same jobs only.
    other = CliRunner().invoke(app, command(tmp_path, *grid, "--set", "job.steps=9"))
    assert other.exit_code == USER_ERROR or other.exception is not None
    assert "another spec or other settings: give a new folder" in str(other.output) + str(other.exception)


@pytest.mark.parametrize(("number", "steps"), [(signal.SIGINT, 800), (signal.SIGTERM, 100_000)])
def test_a_signal_stops_the_job_that_runs_with_a_checkpoint_and_begins_no_other(
    tmp_path: Path, number: signal.Signals, steps: int
) -> None:
    asked = ("--grid", "freeze.prefix=1,2", "--set", f"job.steps={steps}")
    process = start(tmp_path, *asked)
    log = tmp_path / "out" / "prefix=1" / "job" / "events.jsonl"
    deadline = time.monotonic() + patient(200)
    while not (log.exists() and '"event": "StepReport"' in log.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=patient(200))
    assert process.returncode == INTERRUPTED, output
    assert "prefix=1: stopped, with a checkpoint: the same command goes on" in output
    assert list((log.parent / "checkpoints").glob("step-*"))
    assert not (tmp_path / "out" / "prefix=2" / "job").exists()
    if steps < 1000:
        assert_the_same_command_goes_on_with_both_jobs_side_by_side(tmp_path, asked)


def assert_the_same_command_goes_on_with_both_jobs_side_by_side(folder: Path, asked: tuple[str, ...]) -> None:
    process = start(folder, *asked, "--beside", "2")
    output, _ = process.communicate(timeout=patient(300))
    assert process.returncode == DONE, output
    stopped, new = (
        [*read_log(folder / "out" / f"prefix={number}" / "job" / "events.jsonl")] for number in (1, 2)
    )
    begun = [record for record in stopped if isinstance(record.event, Submitted)]
    assert [record.event.resume for record in begun] == [False, True]
    steps = [record.event.step for record in stopped if isinstance(record.event, StepReport)]
    assert steps == list(range(1, 801)), "what was done before is trained again"
    # Each began before the other one ended.
    assert begun[1].time_s < new[-1].time_s
    assert new[0].time_s < stopped[-1].time_s


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--grid", "freeze.refix=1"), "refix"),
        (("--grid", "freeze.prefix=-1"), "prefix"),
        (("--grid", "freeze.prefix"), "give a key and its values"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(
    tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    result = CliRunner().invoke(app, command(tmp_path, *options))
    assert result.exit_code != 0
    assert why in str(result.output) + str(result.exception)
    assert not (tmp_path / "out").exists()
