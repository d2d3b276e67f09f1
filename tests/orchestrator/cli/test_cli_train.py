"""`freshet train` as users run it: a cluster of its own, exit codes, Ctrl-C, no process left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from command_line import freshet_here
from guide_pages import ROOT, SMALL, TYPED, write_files
from pace import patient
from resolving import resolve_spec
from safetensors.torch import load_file
from tiny_jobs import STEPS, write_spec

from benchmarks.parts.rank_threads import run_threads
from dashboard.service.access import Role, open_tokens
from orchestrator.cli.exit_codes import DONE, INTERRUPTED, USER_ERROR
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.spec.job_spec import load
from workers.launch.ranks import LaunchedJob

KEYS = {
    "name",
    "steps",
    "first_loss",
    "final_loss",
    "validation_loss",
    "metrics",
    "best",
    "time_to_target_s",
    "why",
    "epochs",
    "tokens_per_s",
    "samples_per_hour",
    "flops_per_s",
    "mfu",
    "step_time_s",
    "first_step_after_s",
    "state_sha256",
    "partition",
    "events",
}


@contextmanager
def freshet(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running `freshet` with its own process group and home directory."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=folder,
        env={**environment, "HOME": str(folder), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """The lines up to the first that begins with `start`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return lines
    raise AssertionError(f"no line {start!r} in:\n{''.join(lines)}")


def assert_ends(process: subprocess.Popen[str], code: int) -> str:
    """Wait until `process` ends with `code` and none of its processes is left. Returns what it printed."""
    family = psutil.Process(process.pid).children(recursive=True)
    output, _ = process.communicate(timeout=patient(240))
    assert process.returncode == code, output
    _, alive = psutil.wait_procs(family, timeout=patient(60))
    assert alive == []
    return output


def test_the_first_job_runs_as_typed_is_exported_and_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job of the guide, a small one, then the guide's commands on its folder."""
    write_files(tmp_path)
    small = [*SMALL, f"job.steps={STEPS}", "job.sample_tokens=8"]
    sets = [f"--set={each}" for each in small]
    with freshet(tmp_path, "train", "my.toml", "--summary", "summary.json", *sets) as process:
        lines = read_until(process, f"step {STEPS}/{STEPS}")
        output = "".join(lines) + assert_ends(process, DONE)
    assert "starting 2 ranks" in output
    assert "training: 2 ranks on 1 host, from initial weights" in output
    assert "sample: " in output
    assert f"done: {STEPS} steps" in output

    run = tmp_path / "runs" / "mine"
    assert {"report.html", "events.jsonl", "job.json", "checkpoints"} <= {file.name for file in run.iterdir()}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() == KEYS
    monkeypatch.chdir(tmp_path)
    alone = ("pipeline.ranks=1", "pipeline.schedule=1f1b", "job.output=reference")
    reference = absolute(load(Path("my.toml"), [*small, *alone]))
    resolved = resolve_spec(reference, outline_model(reference), {}, epoch=1)
    plain = run_threads(LaunchedJob(resolved.config, resolved.plan, resolved.schedule))
    assert summary["state_sha256"] == plain.state_sha256
    assert sum(summary["partition"]) == 8
    assert len(summary["partition"]) == 4, "two stages for each rank"
    assert summary["steps"] == STEPS
    assert summary["final_loss"] < summary["first_loss"]
    assert Path(summary["events"]) == run / "events.jsonl"
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((run / "job.json").read_text())["spec"]["cluster"]["device"] == "cpu"

    typed = [
        line for line in TYPED if re.match(r"freshet (verify|timeline|report|logs|export) runs/mine", line)
    ]
    assert len(typed) == 7
    for line in (*typed, *(line for line in TYPED if line.startswith("freshet schedule"))):
        assert freshet_here(*shlex.split(line)[1:]) in (DONE, None), line
    assert "proved" in capsys.readouterr().out
    assert {"step.svg", "mine.safetensors", "1f1b.csv"} <= {file.name for file in tmp_path.iterdir()}
    assert any(key.startswith("embed") for key in load_file(tmp_path / "mine.safetensors"))

    log = (run / "events.jsonl").read_bytes()
    assert freshet_here("train", "my.toml", "--set", f"job.output={run}") == USER_ERROR
    assert "--resume (in Python: resume=True), or choose another job.output" in capsys.readouterr().err
    assert (run / "events.jsonl").read_bytes() == log


def test_a_signal_to_the_process_group_stops_with_a_checkpoint_and_takes_the_page_along(
    tmp_path: Path,
) -> None:
    """A batch system sends SIGTERM so, and Ray's own processes would end at once."""
    spec = write_spec(tmp_path, "long")
    endless = ("--set", "job.steps=100000", "--set", "pipeline.ranks=1")
    slow = ("--set", "cluster.device=emulated", "--set", "cluster.emulated.forward_s=0.02")
    with freshet(tmp_path, "train", str(spec), *endless, *slow, "--dashboard") as process:
        address = read_until(process, "dashboard: ")[-1].split()[1]
        bearer = {"Authorization": f"Bearer {open_tokens(tmp_path / '.freshet/tokens.json')[Role.READ]}"}
        page = httpx.Client(base_url=address, headers=bearer, timeout=patient(30), trust_env=False)
        read_until(process, "step ")
        assert page.get("/api/v1/jobs/long").json()["state"] == "training"
        os.killpg(process.pid, signal.SIGTERM)
        output = assert_ends(process, INTERRUPTED)
    assert "stopping after this step, with a checkpoint" in output
    assert "FAILED" not in output
    run = tmp_path / "runs" / "long"
    ended = [record.event for record in read_log(run / "events.jsonl")][-1]
    assert isinstance(ended, events.Finished)
    assert ended.stopped
    assert f"stopped at step {ended.step} of 100000; go on with --resume" in output
    assert (run / "checkpoints" / f"step-{ended.step:08d}-gen-1" / "manifest.json").exists()
    assert (run / "report.html").exists()
    with pytest.raises(httpx.ConnectError):
        page.get("/healthz")


@pytest.mark.soak  # signals are counted in `client/test_following.py`; the page goes with the command above
def test_a_second_ctrl_c_ends_at_once_and_takes_the_page_along(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "stuck")
    # Steps take about five seconds, so the second signal comes before the job can stop.
    slow = ("--set", "cluster.device=emulated", "--set", "cluster.emulated.forward_s=0.2")
    with freshet(tmp_path, "train", str(spec), *slow, "--set", "pipeline.ranks=1", "--dashboard") as process:
        address = read_until(process, "dashboard: ")[-1].split()[1]
        bearer = {"Authorization": f"Bearer {open_tokens(tmp_path / '.freshet/tokens.json')[Role.READ]}"}
        page = httpx.Client(base_url=address, headers=bearer, timeout=patient(30), trust_env=False)
        read_until(process, "step ")
        assert page.get("/api/v1/jobs/stuck").json()["state"] == "training"
        os.killpg(process.pid, signal.SIGINT)
        read_until(process, "stopping after this step")
        assert page.get("/healthz").status_code == 200, "it shows the job to its end"
        process.terminate()  # as good as a second Ctrl-C
        output = assert_ends(process, INTERRUPTED)
    assert "cancelled at once, on request" in output
    with pytest.raises(httpx.ConnectError):
        page.get("/healthz")


def test_ctrl_c_before_the_job_runs(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "early")
    with freshet(tmp_path, "train", str(spec)) as process:
        while not psutil.Process(process.pid).children():  # Ray's own processes: it is being started
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        output = assert_ends(process, INTERRUPTED)
    assert "interrupted before the job was running" in output
    assert not (tmp_path / "runs" / "early" / "job.json").exists()


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("[job\n", (), "is not TOML"),
        ("[job]\nname = 'a'\n[model]\nwidht = 3", (), "[model] has no key 'widht'; did you mean 'width'?"),
        ("[job]\nname = 'a'", ("job.steps=soon",), "--set job.steps: job.steps = 'soon'"),
        ("[job]\nname = 'a'", ("pipeline.schedule=2f2b",), "unknown schedule '2f2b'"),
        ("[job]\nname = 'a'", ("pipeline.ranks=3", "pipeline.replicas=2"), "not divisible by"),
        ("[job]\nname = 'a'\noutput = '{here}/used'", (), "and no run: choose an empty folder"),
        ("[job]\nname = 'a'\noutput = '{here}/job.toml'", (), "cannot be used: Not a directory"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    overrides: tuple[str, ...],
    expected: str,
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").write_text("dear")
    spec = tmp_path / "job.toml"
    spec.write_text(text.replace("{here}", str(tmp_path)))
    options = [part for override in overrides for part in ("--set", override)]
    assert freshet_here("train", str(spec), *options) == USER_ERROR
    told = capsys.readouterr().err
    assert told.startswith("freshet: ")
    assert expected in told
    assert "Traceback" not in told


def test_a_run_without_a_checkpoint_cannot_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert freshet_here("export", str(tmp_path), "--out", str(tmp_path / "m")) == USER_ERROR
    assert "holds no checkpoint" in capsys.readouterr().err


def test_the_command_line_loads_neither_torch_nor_ray_nor_the_types_of_events() -> None:
    slow = {"torch", "ray", "pandas", "orchestrator.events.types"}
    code = f"import sys, orchestrator.cli.main; sys.exit(bool({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
