"""The service on a real cluster: it takes a job, one that comes late shows the same, and killing one costs nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import synthetic_run
from pace import patient
from ray.cluster_utils import Cluster
from ray_jobs import assert_nothing_left, driver_of, job_of
from ray_nodes import start_head
from serving import write_run
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from dashboard.service.access import Role, open_tokens
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import view_in
from orchestrator.history.job_view import JobView
from orchestrator.spec.job_spec import Spec

JOB = "served"
RAY_LOST_S = 60
"""How long a process goes on without its cluster, unless Ray is told otherwise."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node with room for a rank."""
    nodes = start_head(1)
    try:
        with driver_of(nodes):
            yield nodes
            assert_nothing_left()
    finally:
        nodes.shutdown()


class Service:
    """A process of `freshet dashboard`."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        address: str | None = None,
        freshet: Sequence[str] = ("-m", "orchestrator"),
    ) -> None:
        tokens = folder / "tokens.json"
        address = address or ray.get_runtime_context().gcs_address
        command = [sys.executable, *freshet, "dashboard", "--address", address, "--port", "0"]
        command += ["--token-file", str(tokens), "--audit-log", str(folder / "audit.jsonl"), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("dashboard: http://127.0.0.1:"), line
        self.address = line.split()[1].rstrip("/")
        bearer = {"Authorization": f"Bearer {open_tokens(tokens)[Role.CONTROL]}"}
        self.client = httpx.Client(base_url=f"{self.address}/api/v1", headers=bearer, timeout=patient(60))

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def view(self) -> JobView:
        """All that the service knows of the job."""
        answer = self.client.get(f"/jobs/{JOB}/view")
        assert answer.status_code == 200, answer.text
        return JobView.from_json(answer.content)


@contextmanager
def service(folder: Path, *options: str, **how: Any) -> Iterator[Service]:
    made = Service(folder, *options, **how)
    try:
        yield made
    finally:
        made.client.close()
        made.process.terminate()
        made.process.wait(20)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(120)
    while not true():
        assert time.monotonic() < deadline, "it did not happen within two minutes"
        time.sleep(0.05)


def job(folder: Path, times_s: float = 0.003) -> Spec:
    """A job of an emulated rank, longer than the test."""
    return tiny(
        folder,
        JOB,
        job={"steps": 100_000, "timeline_every": 5, "sample_tokens": 0},
        pipeline={"ranks": 1, "microbatches": 2},
        cluster={
            "device": "emulated",
            "emulated": dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), times_s),
            "resources_per_rank": {"CPU": 1.0},
        },
    )


def seen(view: JobView) -> dict[str, Any]:
    """What a view shows, as JSON values."""
    return json.loads(view.to_json())[0] | {"pid": None}


@pytest.mark.usefixtures("cluster")
def test_a_service_takes_a_job_shows_it_and_may_die(tmp_path: Path) -> None:
    spec = job(tmp_path)
    with service(tmp_path, "--root", str(tmp_path)) as first:
        sent = {"spec": spec.model_dump(mode="json", exclude_defaults=True)}
        wrong = {"spec": {"job": {"name": "x", "stepz": 1}}}
        refused = first.client.post("/jobs", json=wrong)
        assert refused.status_code == 422
        assert "did you mean 'steps'" in refused.json()["detail"]
        untrusted = first.client.post("/jobs", json={"spec": {"job": {"name": "x", "output": "/elsewhere"}}})
        assert "lies outside the folders" in untrusted.json()["detail"]
        accepted = first.client.post("/jobs", json=sent, params={"wait_s": 60})
        assert accepted.status_code == 202, accepted.text
        assert accepted.json()["page"] == f"/jobs/{JOB}"
        again = first.client.post("/jobs", json=sent, params={"wait_s": 60})
        assert again.status_code == 409
        # Which of the two is found first depends on whether it has trained a step.
        assert re.search("a job 'served' is running|holds a run of 'served'", again.json()["detail"])
        until(lambda: first.get(f"/jobs/{JOB}")["step"] > 12)

        with service(tmp_path, "--root", str(tmp_path)) as late:
            # Both follow the job: what the late one shows once it is as far is what the first one showed.
            for _ in range(200):
                one, other = seen(first.view()), seen(late.view())
                if one["events"] == other["events"]:
                    break
            assert one["events"] == other["events"]
            assert one == other
            for path in ("", "/plan", "/plans", "/telemetry", "/checkpoints", "/timeline", "/events"):
                assert late.get(f"/jobs/{JOB}{path}")
            cluster = late.get("/cluster")
            assert [user for node in cluster["nodes"] for user in node["users"]] == [
                {"job": JOB, "ranks": [0], "leaving": False, "deadline_s": None}
            ]
            assert "freshet_step" in late.client.get(f"{late.address}/metrics").text

            killed_at = late.get(f"/jobs/{JOB}")["step"]
            os.kill(first.process.pid, signal.SIGKILL)
            assert first.process.wait() == -signal.SIGKILL
            until(lambda: late.get(f"/jobs/{JOB}")["step"] > killed_at + 10)
            answer = late.client.post(f"/jobs/{JOB}/cancel", params={"wait_s": 60})
            assert answer.json()["done"] is True, answer.text
            until(lambda: late.get(f"/jobs/{JOB}")["state"] == "stopped")
            shown = seen(late.view())
            folder = JobFolder(str(tmp_path / JOB))
            assert shown == seen(view_in(folder))

            # It goes on from its checkpoint, until an abort ends it at once.
            resumed = late.client.post("/jobs", json=sent | {"resume": True}, params={"wait_s": 60})
            assert resumed.status_code == 202, resumed.text
            until(lambda: late.get(f"/jobs/{JOB}")["step"] > shown["step"])
            aborted = late.client.post(f"/jobs/{JOB}/cancel", json={"abort": True}, params={"wait_s": 60})
            assert (aborted.status_code, aborted.json()["done"]) == (202, True), aborted.text
            assert "cancelled at once, on request" in aborted.json()["text"]
            until(lambda: late.get(f"/jobs/{JOB}")["state"] == "failed")
            (entry,) = late.view().commands.entries.values()
        assert late.process.returncode == 0

    assert (entry.command.name, entry.command.by) == ("abort", "control from 127.0.0.1")
    step, sha256 = shown["outcome"]["step"], shown["outcome"]["state_sha256"]
    assert run_threads(replace(job_of(job(tmp_path / "again", 0.0)), stop_at=step)).state_sha256 == sha256
    audit = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["status"] for line in audit if line["method"] == "POST"] == [
        422,
        422,
        202,
        409,
        202,
        202,
        202,
    ]
    assert shown["commands"]["entries"].popitem()[1]["command"]["by"] == "control from 127.0.0.1"
    BlockingJobClient().dismiss(JOB)


HEAD = """
import sys
from ray_nodes import start_head

nodes = start_head(0)
print(nodes.address, flush=True)
sys.stdin.read()
"""


IMPATIENT = """
from orchestrator.cli.main import main
from orchestrator.cluster import connection

connection.CLUSTER_LOST_S = 1
main()
"""
"""The command `freshet`, whose service goes on for a second without its cluster."""


@contextmanager
def mortal_cluster() -> Iterator[tuple[str, psutil.Process]]:
    """The address of a cluster that a process of its own has started, and that process: no driver is here."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    family: list[psutil.Process] = []
    try:
        address = process.stdout.readline().strip()
        family = psutil.Process(process.pid).children(recursive=True)
        yield address, psutil.Process(process.pid)
    finally:
        process.kill()
        process.communicate()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def end_cluster(head: psutil.Process) -> None:
    """Kill the control store and the raylet."""
    for process in head.children(recursive=True):
        if process.name() in ("gcs_server", "raylet"):
            process.kill()


def test_a_service_outlives_its_cluster_for_as_long_as_it_chooses(tmp_path: Path) -> None:
    """More requests need the cluster than there are threads; others are answered before those give up. Ray's own choice
    is a minute: a service that ends sooner has made Ray take another one."""
    (tmp_path / "impatient").mkdir()
    write_run(tmp_path / "runs" / "gpt", synthetic_run.records())
    with (
        mortal_cluster() as (address, head),
        service(tmp_path, "--runs", str(tmp_path / "runs"), address=address) as served,
        service(tmp_path / "impatient", address=address, freshet=("-c", IMPATIENT)) as impatient,
    ):
        assert len(served.get("/cluster")["nodes"]) == len(impatient.get("/cluster")["nodes"]) == 1
        end_cluster(head)
        ended_s = time.monotonic()
        with ThreadPoolExecutor(40) as pool:
            needing = [pool.submit(served.client.get, "/cluster") for _ in range(40)]
            time.sleep(0.5)
            for path in ("/healthz", "/metrics", "/runs/gpt", "/api/v1/runs/gpt/telemetry", "/api/v1/jobs"):
                answer = served.client.get(f"{served.address}{path}")
                assert answer.status_code == 200, answer.text
            assert not any(each.done() for each in needing)
            served.process.terminate()
            assert served.process.wait(15) == 0
        assert impatient.process.wait(max(0.1, ended_s + RAY_LOST_S / 2 - time.monotonic()))
