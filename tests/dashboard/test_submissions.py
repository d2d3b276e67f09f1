"""What the service says of a job that it submits, while the cluster does not know the job or does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from serving import settings_in, token

from dashboard.jobs import submission
from dashboard.jobs.live_job import LiveJob
from dashboard.jobs.submission import Submission, Submissions
from dashboard.service.app import create_app
from orchestrator.client.errors import ClusterSilent, JobError, NoSuchJob
from orchestrator.spec.job_spec import Spec

SILENT = ClusterSilent("no job 'new' is known, and the cluster has not answered for 5 s")
UNKNOWN = NoSuchJob("there is no job 'new'; running: none")


@pytest.fixture(params=[UNKNOWN, SILENT], ids=["unknown", "silent"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestClient]:
    """A client of a service that finds no job."""
    settings = settings_in(tmp_path)
    app = create_app(settings)

    async def find(name: str) -> LiveJob:
        error: JobError = request.param
        raise error

    app.state.services.live.find = find
    app.state.services = replace(app.state.services, submissions=Submissions("10.0.0.1:6379"))
    headers = {"Authorization": f"Bearer {token(settings)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client


def submitted(client: TestClient, sent: Submission) -> None:
    client.app.state.services.submissions._known["new"] = sent  # pyright: ignore[reportFunctionMemberAccess]


def test_a_job_that_is_being_submitted(client: TestClient) -> None:
    submitted(client, Submission("new", "runs/new"))
    summary = client.get("/api/v1/jobs/new").json()
    assert (summary["state"], summary["folder"]) == ("submitting", "runs/new")
    assert "being submitted" in client.get("/jobs/new").text


def test_a_job_that_was_refused(client: TestClient) -> None:
    submitted(client, Submission("new", "runs/new", done=True, error="nothing fits the memory"))
    summary = client.get("/api/v1/jobs/new").json()
    assert (summary["state"], summary["trouble"]) == ("refused", "nothing fits the memory")
    assert "nothing fits the memory" in client.get("/jobs/new").text


def test_a_job_that_was_accepted_is_no_submission_any_more(client: TestClient) -> None:
    submitted(client, Submission("new", "runs/new", done=True))
    for path in ("/api/v1/jobs/new", "/jobs/new"):
        assert client.get(path).status_code in (404, 503)


def test_a_job_is_sent_to_the_cluster_of_the_service_whatever_auto_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[str] = []

    async def start(*command: str, **options: object) -> None:
        typed.extend(command)
        raise OSError("no process is started here")

    monkeypatch.setattr(submission, "own_address", {"auto": "10.0.0.9:6379"}.__getitem__)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    async def send() -> None:
        submissions = Submissions("auto")
        tables = {"job": {"name": "sent", "output": str(tmp_path)}}
        sent = await submissions.submit(tables, Spec.model_validate(tables), resume=False)
        await submissions.wait(sent, 30.0)
        assert sent.error == "it could not be started: no process is started here"

    asyncio.run(send())
    assert typed[typed.index("--set") + 1] == "cluster.address=10.0.0.9:6379"
