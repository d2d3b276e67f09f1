"""Errors of the REST interface and of the pages: what each advises, and the headers that it comes with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from serving import live_job, settings_in, show, token

from dashboard.app import create_app
from dashboard.jobs.live_job import LiveJob
from orchestrator.client.errors import ControllerSilent, JobError, PlanChanged
from orchestrator.client.job_client import Command, JobClient
from orchestrator.commands.command import JobCommand

PAGE = {"Accept": "text/html"}
SILENT = ControllerSilent("the controller has not answered for 90 s")


class Failing(JobClient):
    """A client whose every move and cut fails with `error`."""

    def __init__(self, error: JobError) -> None:
        super().__init__()
        self._error = error

    async def send(self, job: str, command: JobCommand) -> Command:
        raise self._error


@pytest.fixture
def service(tmp_path: Path) -> Callable[[JobError], AbstractContextManager[TestClient]]:
    """Makes a client of a service of one job, whose controls fail with an error."""
    settings = settings_in(tmp_path)

    def made(error: JobError) -> TestClient:
        app = create_app(settings)
        show(app, live_job())
        app.state.services.live.client = Failing(error)
        headers = {"Authorization": f"Bearer {token(settings)}"}
        return TestClient(app, base_url="http://127.0.0.1:8270", headers=headers)

    return made


Service = Callable[[JobError], AbstractContextManager[TestClient]]


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        ("1.2", "Ask again once its layers have moved"),
        ("1.1", "Read plan 1.2 with GET /api/v1/jobs/JOB/plan, then decide again, with If-Match: 1.2."),
    ],
)
def test_a_changed_plan_and_one_that_is_about_to_change(service: Service, asked: str, advice: str) -> None:
    """The plan that a move is about to change is the newest one: to ask for it again would be refused again."""
    with service(PlanChanged("as the controller says", 1, 2)) as client:
        body = {"partition": [3, 3, 3, 1]}
        answer = client.post("/api/v1/jobs/gpt/plan", json=body, headers={"If-Match": asked})
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (409, "urn:freshet:plan-changed")
        assert (problem["detail"], problem["version"]) == ("as the controller says", "1.2")
        assert problem["action"].startswith(advice)


def test_pages_come_with_the_headers_of_their_errors(service: Service) -> None:
    with service(SILENT) as client:
        refused = client.post("/jobs/gpt/controls/move", data={"key": "1", "layers": "7", "rank": "2"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")

        async def find(name: str) -> LiveJob:
            raise SILENT

        client.app.state.services.live.find = find  # pyright: ignore[reportFunctionMemberAccess]
        silent = client.get("/jobs/gpt", headers=PAGE)
        assert (silent.status_code, silent.headers["Retry-After"]) == (503, "5")
        wrong = client.get("/logout", headers=PAGE)
        assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")
        assert {answer.headers["Content-Type"] for answer in (refused, silent, wrong)} == {
            "text/html; charset=utf-8"
        }


@pytest.mark.parametrize("path", ["/jobs/nope", "/runs/nope", "/nowhere", "/logout"])
def test_pages_advise_people_and_problems_programs(service: Service, path: str) -> None:
    with service(SILENT) as client:
        assert "The start page lists the jobs" in client.get(path, headers=PAGE).text
        if path.endswith("nope"):
            assert "GET /api/v1/jobs" in client.get(f"/api/v1{path}").json()["action"]
