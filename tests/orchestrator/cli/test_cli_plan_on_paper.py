"""`freshet plan --on`: plans for devices that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import freshet_here
from tiny_jobs import write_spec

from orchestrator.cli.exit_codes import DONE, USER_ERROR
from planner.accelerators import ACCELERATORS

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


def test_devices_of_one_machine_have_their_makers_link(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("plan", str(job), *CUDA, "--on", "4xb200", "--network", "link") == DONE
    told = " ".join(capsys.readouterr().out.split())
    assert "4 x NVIDIA B200 SXM 180 GB in one machine, 7200 Gbit/s between any two" in told


def test_a_device_without_bfloat16_says_so(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("t4", "v100"):
        half = ("--on", f"4x{device}", "--set", "job.precision=bfloat16")
        assert freshet_here("plan", str(job), *CUDA, *half) == USER_ERROR
        told = capsys.readouterr().err
        assert "does not compute in bfloat16" in told
        assert 'job.precision = "float16" or "float32"' in told
    assert planned(capsys, job, "--on", "4xt4", "--set", "job.precision=float16")["ranks"] == 4


def test_the_guide_has_the_table_of_known_devices() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "planning.md").read_text()

    def tera(flops: float | None) -> str:
        return "none" if flops is None else f"{flops / 1e12:,.4g}"

    rows = [
        f"| `{key}` | {each.name} | {each.memory_bytes / 1e9:g} GB | {tera(each.float32_flops)} |"
        f" {tera(each.tf32_flops)} | {tera(each.half_flops)}{'' if each.bfloat16 else ' (float16 alone)'} |"
        f" {each.bytes_per_s / 1e9:,.4g} GB/s | {each.link_bytes_per_s / 1e9:g} GB/s |"
        for key, each in ACCELERATORS.items()
    ]
    assert "\n".join(rows) in guide


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
            "write how many of what, such as 8xh100; known are a10, a100, a100-40g, a10g",
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
