"""A rehearsal as users run it: real Ray nodes come and die, the bits are as usual, nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pace import patient
from ray_jobs import state_sha256
from tiny_jobs import tiny, write_spec

from orchestrator.cli.exit_codes import INTERRUPTED
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.events.rehearsed import Rehearsed
from orchestrator.report.page import REPORT_NAME
from orchestrator.verify.verification import verify_run

STEPS = 60
SETTINGS = (
    *("--set", f"job.steps={STEPS}", "--set", "job.sample_tokens=0", "--set", "checkpoint.every_steps=5"),
    # Longer on a busy machine: the job is to last until its driver has seen steps and the trace takes a node away.
    *("--set", "cluster.device=emulated", "--set", f"cluster.emulated.forward_s={patient(0.01):.3g}"),
    *("--set", "pipeline.ranks=2", "--set", "cluster.wait_s=200"),
)


def start(folder: Path, trace: str, *options: str) -> subprocess.Popen[str]:
    spec = write_spec(folder, "job")
    (folder / "trace.csv").write_text(trace)
    command = [
        sys.executable,
        "-m",
        "orchestrator",
        "rehearse",
        str(spec),
        "--trace",
        str(folder / "trace.csv"),
    ]
    return subprocess.Popen(
        [*command, "--out", str(folder / "out"), *SETTINGS, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=patient(60))
    assert alive == []


def test_a_job_whose_nodes_die_and_come_ends_with_the_bits_of_a_quiet_one(tmp_path: Path) -> None:
    trace = "0,add,a\n0,add,b\n2000,remove,b\n6000,add,d\n"
    driver = start(tmp_path, trace, "--speedup", "1", "--finish", "--json")
    output, errors = driver.communicate(timeout=patient(600))
    assert driver.returncode == 0, errors
    numbers = json.loads(output)
    found = numbers["rehearsal"]
    assert found["emulated"]
    # On a busy machine a recovery may last until the trace is over: then none of its time ends in a committed step.
    assert 0 <= found["ratio"] < 1
    assert found["losses"] >= 1
    logged = [record.event for record in read_log(tmp_path / "out" / "events.jsonl")]
    (b,) = [
        life.node
        for event in logged
        if isinstance(event, Rehearsed)
        for life in event.lives
        if life.name == "b"
    ]
    on_b = {event.rank for event in logged if isinstance(event, events.RankStarted) and event.node == b}
    # Where recovering takes longer than the next node to come, no generation without b has a step, nor a cost.
    assert any(on_b.intersection(event.lost) for event in logged if isinstance(event, events.Regrouped))
    assert [(each["copies"], each["losses"], each["last_holders"]) for each in found["copies"]] == [
        (0, 1, 1),
        (1, 1, 0),
        (2, 1, 0),
    ]
    assert sum(found["node_seconds"].values()) == found["live_node_seconds"]
    quiet = tiny(
        tmp_path,
        "quiet",
        job={"steps": STEPS, "sample_tokens": 0},
        pipeline={"ranks": 1},
        cluster={"device": "emulated", "emulated": {"forward_s": 0, "input_grad_s": 0, "weight_grad_s": 0}},
    )
    assert numbers["state_sha256"] == state_sha256(quiet)
    ledger, lines = verify_run(str(tmp_path / "out"))
    assert ledger.wrong == []
    assert ledger.proved_samples == ledger.steps == STEPS
    assert "no sample used twice or skipped" in lines[-1]
    assert "Effective training time ratio" in (tmp_path / "out" / REPORT_NAME).read_text()


@pytest.mark.soak
def test_ctrl_c_stops_the_job_and_leaves_no_process(tmp_path: Path) -> None:
    one = ("--set", "pipeline.ranks=1")
    driver = start(tmp_path, "0,add,a\n600000,remove,a\n", "--speedup", "1", *one)
    log = tmp_path / "out" / "events.jsonl"
    deadline = time.monotonic() + patient(300)
    while not (log.exists() and '"event": "StepReport"' in log.read_text()):
        assert time.monotonic() < deadline
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.2)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len([process for process in family if process.name() == "raylet"]) == 2
    driver.send_signal(signal.SIGINT)
    output, errors = driver.communicate(timeout=patient(300))
    assert driver.returncode == INTERRUPTED, output + errors
    assert "stopping after this step" in output
    assert_gone(family)
    ledger, _ = verify_run(str(tmp_path / "out"))
    assert ledger.wrong == []
