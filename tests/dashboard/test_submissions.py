"""What the service says of a job that it submits, while the cluster does not know the job or does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from httpx import Response
from serving import live_job, settings_in, show, token

from dashboard.app import create_app
from dashboard.jobs import submission
from dashboard.jobs.live_job import LiveJob
from dashboard.jobs.live_jobs import LiveJobs
from dashboard.jobs.submission import PendingSubmission, Submissions
from orchestrator.client.errors import ClusterSilent, JobError, NoSuchJob
from orchestrator.client.job_client import JobClient
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


def submitted(client: TestClient, sent: PendingSubmission) -> None:
    client.app.state.services.submissions._known["new"] = sent  # pyright: ignore[reportFunctionMemberAccess]


def test_a_job_that_is_being_submitted(client: TestClient) -> None:
    submitted(client, PendingSubmission("new", "runs/new"))
    summary = client.get("/api/v1/jobs/new").json()
    assert (summary["state"], summary["folder"]) == ("submitting", "runs/new")
    assert "being submitted" in client.get("/jobs/new").text


def test_a_job_that_was_refused(client: TestClient) -> None:
    submitted(client, PendingSubmission("new", "runs/new", done=True, error="nothing fits the memory"))
    summary = client.get("/api/v1/jobs/new").json()
    assert (summary["state"], summary["trouble"]) == ("refused", "nothing fits the memory")
    assert "nothing fits the memory" in client.get("/jobs/new").text


def test_a_job_that_was_accepted_is_no_submission_any_more(client: TestClient) -> None:
    submitted(client, PendingSubmission("new", "runs/new", done=True))
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


class Deciding(Submissions):
    """Decides a submission as soon as the test says so."""

    def __init__(self) -> None:
        super().__init__("10.0.0.1:6379")
        self.started: list[bool] = []
        self.refusal = ""
        self.decide = asyncio.Event()

    async def _start(self, file: Path, resume: bool) -> str:
        self.started.append(resume)
        await self.decide.wait()
        return self.refusal


Service = tuple[TestClient, LiveJob, Deciding]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A client of a service that still shows the job `gpt`, which has ended, and its submissions."""
    settings = replace(settings_in(tmp_path), trust_specs=True)
    app, job, submissions = create_app(settings), live_job(), Deciding()
    app.state.services = replace(app.state.services, submissions=submissions)
    show(app, job)
    app.state.services.live.known = lambda name: job if name == job.name else None
    headers = {"Authorization": f"Bearer {token(settings)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client, job, submissions


def submit(client: TestClient, wait_s: float = 0.0, key: str | None = None, steps: int = 3) -> Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    body = {"spec": {"job": {"name": "gpt", "steps": steps}}, "resume": True}
    return client.post("/api/v1/jobs", params={"wait_s": wait_s}, json=body, headers=headers)


def states(client: TestClient) -> list[str]:
    """The state of `gpt` by itself, in the list, and on its page."""
    (listed,) = client.get("/api/v1/jobs").json()["jobs"]
    page = client.get("/jobs/gpt").text
    shown = [word for word in ("being submitted", "refused") if f">{word}</span>" in page]
    return [client.get("/api/v1/jobs/gpt").json()["state"], listed["state"], *shown]


def test_a_job_that_is_submitted_again_is_not_shown_as_its_earlier_run_ended(service: Service) -> None:
    client, _, submissions = service
    assert states(client) == ["finished", "finished"]
    assert not submit(client, key="k").json()["accepted"]
    assert states(client) == ["submitting", "submitting", "being submitted"]
    submissions.refusal = "nothing fits the memory"
    submissions.decide.set()
    assert submit(client, wait_s=10.0, key="k").status_code == 422
    assert states(client) == ["refused", "refused", "refused"]
    # A newer run, which began without the service, is not hidden.
    newer = live_job()
    show(client.app, newer)  # pyright: ignore[reportArgumentType]
    assert states(client) == ["finished", "finished"]


def test_a_name_that_is_taken_is_refused_at_once(service: Service) -> None:
    client, job, submissions = service
    job.gone, job.view.outcome = False, None
    answer = submit(client)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:freshet:refused")
    assert "a job 'gpt' is running (step " in answer.json()["detail"]
    assert not submissions.started


def test_a_key_is_answered_as_before_while_its_job_runs(service: Service) -> None:
    client, job, submissions = service
    first = submit(client, key="k")
    job.gone, job.view.outcome = False, None
    assert (submit(client, key="k").json(), first.status_code) == (first.json(), 202)
    submissions.decide.set()


def test_a_job_that_began_meanwhile_tells_of_the_refusal_until_it_ends(service: Service) -> None:
    client, job, submissions = service
    submit(client, key="k")
    outcome, job.gone, job.view.outcome = job.view.outcome, False, None
    job._notify()
    submissions.refusal = "job 'gpt' is running"
    submissions.decide.set()
    assert submit(client, wait_s=10.0, key="k").status_code == 422
    (listed,) = client.get("/api/v1/jobs").json()["jobs"]
    for summary in (listed, client.get("/api/v1/jobs/gpt").json()):
        assert (summary["state"], summary["ended_s"]) == ("finished", None)
        assert summary["trouble"] == "a job submitted under this name was refused: job 'gpt' is running"
    job.gone, job.view.outcome = True, outcome
    job._notify()
    assert "refused" not in states(client)
    ended = client.get("/api/v1/jobs/gpt").json()
    assert (ended["trouble"], ended["ended_s"]) == ("", job.view.last_s)


def test_an_accepted_job_is_looked_for_before_it_counts_as_accepted() -> None:
    """Until then the service may show its earlier run, which has ended."""

    class Cluster(JobClient):
        async def jobs(self) -> tuple[str, ...]:
            return ("gpt",)

    async def decide() -> None:
        jobs = LiveJobs(Cluster())
        submissions, tables = Deciding(), {"job": {"name": "gpt"}}
        submissions.decide.set()
        seen: list[object] = []

        async def decided(submission: PendingSubmission) -> None:
            await jobs.look()
            seen.extend([submission.done, jobs.known("gpt") is not None])

        sent = await submissions.submit(tables, Spec.model_validate(tables), resume=False, decided=decided)
        await submissions.wait(sent, 10.0)
        await jobs.close()
        assert sent.done
        assert seen == [False, True]

    asyncio.run(decide())


@pytest.mark.parametrize("refusal", ["", "nothing fits the memory"], ids=["accepted", "refused"])
def test_a_submission_that_is_sent_again_with_its_key_is_answered_as_the_first(
    service: Service, refusal: str
) -> None:
    client, _, submissions = service
    first = submit(client, key="k")
    assert (first.status_code, first.json()["accepted"]) == (202, False)
    assert submit(client).json()["detail"].startswith("a job 'gpt' is being submitted already")
    assert submit(client, key="k").json() == first.json()
    submissions.refusal = refusal
    submissions.decide.set()
    for _ in range(2):
        again = submit(client, wait_s=10.0, key="k")
        if refusal:
            assert (again.status_code, again.json()["detail"]) == (422, refusal)
        else:
            assert (again.status_code, again.json()) == (202, first.json() | {"accepted": True})
    assert submissions.started == [True]
    other = submit(client, key="k", steps=4)
    assert (other.status_code, other.json()["type"]) == (409, "urn:freshet:command-id-reused")
    assert submit(client, wait_s=10.0, key="other").status_code == (422 if refusal else 202)
    assert submissions.started == [True, True]
