"""`freshet plan --on`: plans for devices that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import freshet_here
from tiny_jobs import write_spec

from orchestrator.cli.exit_codes import DONE, USER_ERROR

CUDA = ("--set", "cluster.device=cuda")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_spec(tmp_path, "tiny")


def planned(capsys: pytest.CaptureFixture[str], job: Path, *options: str) -> dict[str, Any]:
    assert freshet_here("plan", str(job), "--json", *CUDA, *options) == DONE
    return json.loads(capsys.readouterr().out)


def test_a_slower_device_and_a_slower_network_make_longer_steps(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = planned(capsys, job, "--on", "4xh100")
    assert fast["ranks"] == 4
    assert planned(capsys, job, "--on", "4xl4")["predicted_step_s"] > fast["predicted_step_s"]
    slow = planned(capsys, job, "--on", "4xh100", "--network", "0.1")
    assert slow["predicted_step_s"] > fast["predicted_step_s"]
    assert slow["redundancy"]["seconds_per_step"] > fast["redundancy"]["seconds_per_step"] > 0


def test_it_says_that_nothing_was_measured(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("plan", str(job), *CUDA, "--on", "8xA100", "--network", "25") == DONE
    told = capsys.readouterr().out
    assert "profile: on paper, from shapes and data sheets, for 4 x NVIDIA A100 SXM 80 GB, 25 Gbit/s" in told
    assert "matrix products at 60.0 % of the published rate" in told


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ("--on", "h100", *CUDA),
            "write how many of what, such as 8xh100; known are a10, a100, h100, h200, l4",
        ),
        (("--on", "0xh100", *CUDA), "write how many of what"),
        (("--on", "4xtpu", *CUDA), "no data sheet of 'tpu' is known"),
        (("--on", "4xh100", "--network", "0", *CUDA), "a network carries more than 0 Gbit/s"),
        (("--on", "4xh100", "--network", "nan", *CUDA), "a network carries more than 0 Gbit/s"),
        (
            ("--on", "2xh100", *CUDA),
            "the job needs 4 ranks at least, and --on has 2 devices: plan on 4, or lower pipeline.ranks",
        ),
        (("--on", "4xh100", "--profile", "p.json"), "both say what to plan with"),
        (("--network", "25"), "--network goes with --on"),
        (("--on", "4xh100", "--set", "cluster.device=cpu"), "add --set cluster.device=cuda"),
        (
            ("--on", "4xh100", "--set", "job.precision=bfloat16-autocast", *CUDA),
            "autocast needs a device: plan with job.precision",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], why: str
) -> None:
    assert freshet_here("plan", str(job), *options) == USER_ERROR
    assert why in " ".join(capsys.readouterr().err.split())
