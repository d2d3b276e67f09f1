"""Jobs that clients submit over HTTP to clusters started with `ray start --head`, whose Python has no Freshet: with and
without token authentication, several at a time, stopped and resumed."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import ray
from command_line import freshet_here
from pace import patient
from ray.job_submission import JobSubmissionClient
from ray_heads import Head, command, python_without_freshet, ray_head
from ray_jobs import state_sha256
from tiny_jobs import tiny, write_spec

from orchestrator.cli.exit_codes import DONE, INTERRUPTED, PROVED_IN_PART, USER_ERROR
from orchestrator.client.page_address import announce, page_address, withdraw
from orchestrator.cluster.actor_names import NAMESPACE
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.report.page import REPORT_NAME
from workers.protocol.reports import StepReport

ROOT = Path(__file__).resolve().parents[3]
STEPS = 400
"""Eight minutes for what happens before the job is stopped: two took too little beside twenty busy loops."""
SMALL = ("job.sample_tokens=0", "pipeline.ranks=1", "pipeline.partition=parameter", "cluster.wait_s=240")
(AS_TYPED,) = (
    shlex.split(line)[3:]
    for line in (ROOT / "docs" / "guides" / "cluster.md").read_text().splitlines()
    if line.startswith("ray job submit ")
)
"""What the guide has users type after `ray job submit`."""
PAGE = "http://127.0.0.1:8420"


def settings(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def emulated(layer_s: float) -> list[str]:
    """Settings that make each layer of each microbatch take `layer_s`, forward and backward."""
    times = ("forward_s", "input_grad_s", "weight_grad_s")
    return settings("cluster.device=emulated", *(f"cluster.emulated.{name}={layer_s / 3}" for name in times))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clusters' Python."""
    bin = python_without_freshet(tmp_path_factory.mktemp("clean") / "venv")
    tried = subprocess.run([bin / "python", "-c", "import ray, orchestrator"], capture_output=True, cwd="/")
    assert b"No module named 'orchestrator'" in tried.stderr
    return bin


@contextmanager
def client(head: Head, *arguments: str | Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A client of `head` in another process and `folder`."""
    process = subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env={**head.environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As in a terminal, also where the tests themselves were started with interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def output_of(head: Head, *arguments: str | Path, folder: Path, code: int = DONE) -> str:
    """What a client prints; it ends with `code`."""
    with client(head, *arguments, folder=folder) as process:
        output, _ = process.communicate(timeout=patient(240))
    assert process.returncode == code, output
    return output


def stop(head: Head, id: str) -> None:
    """Ask for the stop of what was submitted as `id`."""
    asked = ("job", "stop", id, "--no-wait", "--address", head.url)
    output_of(head, "ray.scripts.scripts", *asked, folder=ROOT)


def steps(run: Path) -> int:
    """The last step in the log of `run`."""
    return max((event.step for event in logged(run) if isinstance(event, StepReport)), default=0)


def logged(run: Path) -> list[events.Event]:
    log = run / "events.jsonl"
    return [record.event for record in read_log(log)] if log.exists() else []


def finished(run: Path) -> events.Finished:
    """The end of `run`, once it is there."""
    wait_until(lambda: any(isinstance(event, events.Finished) for event in logged(run)[-1:]))
    end = logged(run)[-1]
    assert isinstance(end, events.Finished)
    return end


def ranks(run: Path) -> list[int]:
    """The process ids of the ranks of `run`."""
    return [event.pid for event in logged(run) if isinstance(event, events.RankStarted)]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(120)
    while not true():
        assert time.monotonic() < deadline, "it did not happen within two minutes"
        time.sleep(0.2)


@dataclass(frozen=True)
class Meanwhile:
    """A job of another cluster, which asks for no token."""

    client: subprocess.Popen[str]
    url: str
    run: Path


@pytest.fixture(scope="module")
def meanwhile(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meanwhile]:
    folder = tmp_path_factory.mktemp("open")
    spec, run = write_spec(folder, "open"), folder / "run"
    with ray_head(python, RAY_AUTH_MODE="disabled") as head:
        here = replace(head, environment={**head.environment, "RAY_ADDRESS": head.gcs})
        mine = settings(*SMALL, "job.steps=3", "data.path=text.txt", f"job.output={run}")
        submit = ("orchestrator", "submit", spec.name, "--name=renamed", "--follow", *mine)
        with client(here, *submit, folder=folder) as process:
            yield Meanwhile(process, head.url, run)


def test_two_jobs_of_a_cluster_that_asks_for_a_token(
    tmp_path: Path, python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user, one, two = tmp_path / "user", tmp_path / "one", tmp_path / "two"
    user.mkdir()
    spec = write_spec(user, "one")
    mine = settings(*SMALL, f"job.steps={STEPS}", "data.path=text.txt", f"job.output={one}")
    quick = settings(*SMALL, "model.width=16", "model.context=16", "job.name=two", f"job.output={two}")
    with ray_head(python, RAY_AUTH_MODE="token") as head:
        submit = ("orchestrator", "submit", spec.name, "--address", head.url, *mine)
        as_announced(head)
        stranger = replace(head, environment={**head.environment, "RAY_AUTH_TOKEN": "0" * 32})
        refused = output_of(stranger, *submit, folder=user, code=USER_ERROR)
        assert f"the cluster at {head.url} asks for its token" in refused

        # Ray's own command, as the guide has it, in a clone of this repository.
        options = ("--no-wait", "--address", head.url, "--submission-id=second")
        raw = ("ray.scripts.scripts", "job", "submit", *options, *AS_TYPED, *quick, *emulated(0.07))
        said = output_of(head, *raw, folder=ROOT)
        assert "'second' submitted successfully" in said
        with client(head, *submit, *emulated(0.05), "--follow", folder=user) as following:
            assert following.stdout is not None
            seen = ""
            while not re.search(r"^step +\d", seen, re.MULTILINE):
                line = following.stdout.readline()
                assert line, seen
                seen += line
            (id,) = re.findall(rf"^job one is submitted to {head.url} as (\S+)$", seen, re.MULTILINE)
            assert f"stop, with a checkpoint: ray job stop {id} --address {head.url}\n" in seen
            assert f"page: {PAGE}\n" in seen
            following.send_signal(signal.SIGINT)
            rest, _ = following.communicate(timeout=patient(60))
            assert following.returncode == INTERRUPTED, rest
            assert f"no longer following {id}, which goes on" in rest

        other = settings(f"job.output={tmp_path / 'other'}")
        refused = output_of(head, *submit, *other, "--follow", folder=user, code=USER_ERROR)
        assert "a job 'one' is running in this cluster" in refused
        assert "freshet cancel one" in refused

        wait_until(lambda: steps(two) > 0)
        before = steps(one)
        stop(head, id)
        end = finished(one)
        assert end.stopped
        assert before < end.step < STEPS
        wait_until(lambda: not any(map(psutil.pid_exists, ranks(one))))

        assert len(ranks(two)) == 1
        assert psutil.pid_exists(ranks(two)[0])

        # Its next step takes longer than Ray lets its driver live.
        went_on = steps(two)
        wait_until(lambda: steps(two) > went_on)
        assert JobSubmissionClient(head.url).stop_job("second")
        resumed = output_of(head, *submit, "--resume", "--follow", folder=user)
        assert f"/checkpoints/step-{end.step:08d}-gen-1\n" in resumed
        assert finished(one).state_sha256 == state_sha256(
            tiny(user, "one", job={"steps": STEPS, "sample_tokens": 0}, pipeline={"ranks": 1})
        )
        assert finished(two).stopped
        assert (one / REPORT_NAME).exists()
        assert not (two / REPORT_NAME).exists()
    assert freshet_here("verify", str(one)) == PROVED_IN_PART, (
        "its text went with the folder that was submitted"
    )
    assert freshet_here("verify", str(two)) == DONE
    assert "proved" in capsys.readouterr().out


def as_announced(head: Head) -> None:
    """Have a service announce its page."""
    ray.init(head.gcs, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    try:
        announce(PAGE)
        withdraw("http://another")
        assert page_address() == page_address(head.gcs) == page_address(head.url) == PAGE
    finally:
        ray.shutdown()
    assert page_address(head.url) == PAGE


@pytest.mark.soak
def test_a_job_of_a_cluster_that_asks_for_none(meanwhile: Meanwhile) -> None:
    said, _ = meanwhile.client.communicate(timeout=patient(240))
    assert meanwhile.client.returncode == DONE, said
    assert f"job renamed is submitted to {meanwhile.url} as renamed-" in said
    assert "done: 3 steps" in said
    assert "page:" not in said
    assert (meanwhile.run / REPORT_NAME).exists()
