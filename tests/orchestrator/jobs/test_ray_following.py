"""Drivers that come and go while a job runs on a real Ray cluster; another driver follows it to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from pace import patient
from ray_jobs import assert_nothing_left, controller_pid, job_of
from ray_jobs import wait_for as wait_until
from test_ray_recovery import DRIVER, ONE, job, logged, wait_for

from benchmarks.parts.rank_threads import run_threads
from orchestrator.cli.exit_codes import DONE, INTERRUPTED
from orchestrator.cli.jobs import status_lines
from orchestrator.cli.steering import reap_job, steer
from orchestrator.cli.training import follow_command
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.errors import Refused
from orchestrator.client.submit import Submission
from orchestrator.cluster import connection as cluster
from orchestrator.cluster.actor_names import living_ranks
from orchestrator.commands.cancel import Cancel
from orchestrator.commands.command import JobCommand
from orchestrator.commands.fault import InjectFault
from orchestrator.commands.move import Move
from orchestrator.commands.pause import Pause
from orchestrator.commands.resume import Resume
from orchestrator.events import types as events
from orchestrator.history.command_table import CommandIdReused
from orchestrator.history.folder import JobFolder
from orchestrator.report.page import REPORT_NAME
from orchestrator.trainer import PipelineTrainer
from workers.protocol.errors import JobError
from workers.protocol.reports import CheckpointReport, StepReport

STEPS = 120
LONG = {"forward_s": 0.004, "input_grad_s": 0.004, "weight_grad_s": 0.004}
"""Long enough for three drivers to connect, one after the other."""


pytestmark = pytest.mark.usefixtures("two_nodes")


@contextmanager
def driver(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Another driver of this cluster, as a process."""
    address = ray.get_runtime_context().gcs_address
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(cluster.import_paths())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def steps_of(log: Path) -> list[int]:
    return [event.step for event in logged(log) if isinstance(event, StepReport)]


def test_another_driver_follows_a_job_whose_own_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tmp_path, "led", job={"steps": STEPS}, pipeline=ONE, cluster={"emulated": LONG})
    file, log = tmp_path / "spec.json", tmp_path / "led" / "events.jsonl"
    file.write_text(spec.model_dump_json())
    with driver("-c", DRIVER, str(file)) as own:
        wait_for(log, lambda seen: any(isinstance(event, StepReport) and event.step >= 3 for event in seen))
        own.kill()

    with pytest.raises(JobError, match=r"'led' is running in this cluster \(step .*`freshet follow led`"):
        PipelineTrainer(spec, resume=True).fit()
    with monkeypatch.context() as patched:
        # This acts like a driver that looked before the job existed.
        patched.setattr("orchestrator.client.submit._make_way", lambda name: None)
        with pytest.raises(JobError, match="a job 'led' has been started in this cluster just now"):
            PipelineTrainer(job(tmp_path / "other", "led", pipeline=ONE)).fit()
    with pytest.raises(JobError, match=r"no job 'lead' is running at [0-9.:]+; did you mean 'led'"):
        follow_command("lead", "auto")

    # Ctrl-C ends the follow command, not the job.
    with driver("-m", "orchestrator", "follow", "led") as other:
        assert other.stdout is not None
        while not (line := other.stdout.readline()).startswith("step "):
            assert line, "it ended"
        before = steps_of(log)[-1]
        other.send_signal(signal.SIGINT)
        output, _ = other.communicate(timeout=patient(120))
        assert other.returncode == INTERRUPTED, output
        assert "no longer following led, which goes on; end it with freshet cancel led" in output

    # Two drivers follow at a time; the one that learns of the end later reads it in the log.
    with driver("-m", "orchestrator", "follow", "led") as other:
        assert follow_command("led", "auto") == DONE
        beside, _ = other.communicate(timeout=patient(120))
        assert other.returncode == DONE, beside
    told = capsys.readouterr().out
    joined, _, beside = beside.partition("\n")
    assert joined.startswith(f"joined the Ray cluster at {ray.get_runtime_context().gcs_address}, started ")
    assert joined.endswith(", which RAY_ADDRESS names")
    report = tmp_path / "led" / REPORT_NAME
    assert report.read_text().startswith("<!doctype html>")
    for text in (told, beside):
        assert text.startswith("following led in ")
        assert f"step {STEPS}/{STEPS}" in text
        assert f"done: {STEPS} steps" in text
        assert f"report: {report}" in text
    assert before < STEPS
    assert steps_of(log) == list(range(1, STEPS + 1))
    assert len([event for event in logged(log) if isinstance(event, events.Formed)]) == 1
    assert_nothing_left()


def test_a_command_is_done_once_whichever_controller_hears_it_and_a_paused_job_stays_paused(
    tmp_path: Path,
) -> None:
    spec = job(tmp_path, "told", job={"steps": 100_000}, pipeline=ONE)
    client = BlockingJobClient()
    submitted = client.submit(spec)
    assert (submitted.name, submitted.folder, submitted.end) == ("told", str(tmp_path / "told"), None)
    assert submitted.spec.pipeline.partition != "auto"
    log = tmp_path / "told" / "events.jsonl"
    wait_for(log, lambda seen: any(isinstance(event, StepReport) for event in seen))
    done = client.outcome(client.checkpoint("told", id="save"), timeout_s=60)
    assert done.text.startswith(f"checkpoint of step {done.step} in ")
    with pytest.raises(CommandIdReused, match="'save' was used for checkpoint"):
        client.stop("told", id="save")
    with pytest.raises(Refused, match="rank 7"):
        client.move("told", "1", 7, id="move")

    assert steer("auto", "told", Pause(), wait=True).startswith("paused at step ")
    (line,) = status_lines("auto")
    assert line.startswith("told: paused, step ")
    assert "ranks" not in line
    with pytest.raises(Refused, match="there is nothing to pause"):
        client.pause("told")
    paused_at = client.view("told").step

    wait_until(lambda: not living_ranks("told"))
    before = controller_pid("told")
    os.kill(before, signal.SIGKILL)
    # The next controller knows from the log of the command, and that the job is paused.
    assert client.checkpoint("told", id="save").text == done.text
    assert controller_pid("told") != before
    (line,) = status_lines("auto")
    assert line.startswith("told: paused, step ")
    assert f"goes on from the checkpoint of step {paused_at}" in steer("auto", "told", Resume(), wait=False)
    wait_until(lambda: client.view("told").step > paused_at)
    assert client.outcome(client.stop("told"), timeout_s=120).text.startswith("stopped at step ")
    told = [item.event for item in client.events("told") if isinstance(item, events.Record)]
    saved = [event for event in told if isinstance(event, CheckpointReport)]
    assert len(saved) == 3, "that of the command, that of the pause, and that of the stop"
    assert len([event for event in told if isinstance(event, events.Submitted)]) == 2
    (paused,) = [event for event in told if isinstance(event, events.Paused)]
    assert paused.requested
    (regrouped,) = [event for event in told if isinstance(event, events.Regrouped)]
    assert (regrouped.cause, regrouped.step, regrouped.steps_lost) == ("resume", paused_at, 0)
    end = told[-1]
    assert isinstance(end, events.Finished)
    assert steps_of(log) == list(range(1, end.step + 1))
    still = {"emulated": dict.fromkeys(LONG, 0.0)}
    quiet = job(tmp_path, "quiet", job={"steps": 100_000}, pipeline=ONE, cluster=still)
    assert end.state_sha256 == run_threads(replace(job_of(quiet), stop_at=end.step)).state_sha256
    reap_job("told", "auto", force=False)
    assert client.view("told", folder=submitted.folder).state == "stopped"
    assert_nothing_left()


def test_a_driver_that_is_stopped_while_its_job_starts_leaves_none(tmp_path: Path) -> None:
    spec = job(tmp_path, "early", pipeline={**ONE, "partition": "parameter"})

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Submission(spec, resume=False, say=print).send(about_to_start=stopped)
    assert JobFolder(spec.job.folder).marker() is None, "no folder was claimed"
    with pytest.raises(KeyboardInterrupt):
        Submission(spec, resume=False, say=print).send(interrupted=lambda: True)
    assert_nothing_left()
    Submission(spec, resume=False, say=print)  # its folder is free


def sent(command: JobCommand) -> Callable[[], str]:
    """Sends `command` to the hung job."""
    return lambda: steer("auto", "hung", command, wait=False)


def test_a_controller_that_hangs_keeps_nobody_waiting_and_what_is_left_is_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A controller that is silent for long counts as gone, which a slow machine must not cause.
    monkeypatch.setattr("orchestrator.client.job_client.ANSWER_S", 60.0)
    spec = job(tmp_path, "hung", job={"steps": 100_000}, pipeline=ONE)
    file, log = tmp_path / "spec.json", tmp_path / "hung" / "events.jsonl"
    file.write_text(spec.model_dump_json())
    with driver("-c", DRIVER, str(file)) as own:
        seen = wait_for(log, lambda seen: any(isinstance(event, StepReport) for event in seen))
        training = r"job 'hung' is training, at step \d+ of 100000: end it with freshet cancel"
        with pytest.raises(JobError, match=training):
            reap_job("hung", "auto", force=False)
        with pytest.raises(JobError, match=r"nothing of a job 'hugn' is at [0-9.:]+; there is hung"):
            reap_job("hugn", "auto", force=False)

        ranks = [event.pid for event in seen if isinstance(event, events.RankStarted)]
        pid = controller_pid("hung")
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr("orchestrator.client.asking.ANSWER_S", 2.0)
        monkeypatch.setattr("orchestrator.client.job_client.ANSWER_S", 2.0)
        way_out = "'hung' has not answered for 2 s: .*`freshet reap hung --force`"
        for ask in (
            sent(Cancel()),
            sent(Cancel(abort=True)),
            sent(Move(layers="1", rank=0)),
            sent(InjectFault(drill={"rank": 0, "fault": {"kind": "kill"}})),
            lambda: reap_job("hung", "auto", force=False),
            lambda: PipelineTrainer(spec, resume=True).fit(),
            lambda: follow_command("hung", "auto"),
        ):
            with pytest.raises(JobError, match=way_out):
                ask()
        marker = (tmp_path / "hung" / "job.json").read_bytes()
        assert list(status_lines("auto")) == [
            "hung: its controller does not answer: being started again, or hung; 1 rank there"
        ]
        assert all(psutil.pid_exists(pid) for pid in ranks)
        assert reap_job("hung", "auto", force=True).startswith("hung: 1 rank and its controller cleared away")
        assert (tmp_path / "hung" / "job.json").read_bytes() == marker
        said, _ = own.communicate(timeout=patient(120))
        assert "the controller died" in said
    assert list(status_lines("auto")) == ["no job is running"]
    assert_nothing_left()
    deadline = time.monotonic() + patient(60)
    while any(psutil.pid_exists(pid) for pid in (*ranks, pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
