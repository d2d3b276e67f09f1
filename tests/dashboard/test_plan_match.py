"""Controls that name the plan that their sender saw: sent with it, so that the job's controller decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx import Response
from page_runs import training
from report_page import Page
from serving import Made, settings_in, show, token

from dashboard.app import create_app
from orchestrator.client.errors import PlanChanged
from orchestrator.client.job_client import JobClient
from orchestrator.client.jobs import Command
from orchestrator.commands.command import JobCommand

BODIES: dict[str, dict[str, Any]] = {
    "move": {"layers": "3", "rank": 0},
    "scale": {"ranks": 2},
    "freeze": {"method": "timelyfreeze", "r_max": 0.5},
    "drain": {"node": "5f0c"},
}


class Sent(JobClient):
    """A client that notes what it is to send to a job that has plan 1.2.

    Args:
        moving: whether a move is about to replace that plan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bases: list[object] = []
        self.moving = False

    async def send(self, job: str, command: JobCommand) -> Command:
        base = command.arguments().get("base")
        self.bases.append(base)
        if base is not None and (base != [1, 2] or self.moving):
            raise PlanChanged("plan 1.2 is the one to look at", 1, 2)
        return Command(job=job, id=command.id or "made", text="sent")


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def client(tmp_path: Path, sent: Sent) -> Iterator[TestClient]:
    """A client of a service that has heard of no plan after 1.1."""
    settings, job = settings_in(tmp_path), Made("gpt")
    job.view = training()
    app = create_app(settings)
    show(app, job)
    app.state.services.live.client = sent
    headers = {"Authorization": f"Bearer {token(settings)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client


def ask(client: TestClient, name: str, match: str | None = None, version: str | None = None) -> Response:
    headers = {} if match is None else {"If-Match": match}
    body = BODIES[name] | ({} if version is None else {"version": version})
    return client.post(f"/api/v1/jobs/gpt/{name}", json=body, headers=headers)


@pytest.mark.parametrize("name", BODIES)
def test_a_control_is_for_the_plan_that_it_names(client: TestClient, sent: Sent, name: str) -> None:
    for accepted in (
        ask(client, name, "1.2"),
        ask(client, name, '"1.2"'),
        ask(client, name, version="1.2"),
        ask(client, name),
    ):
        assert accepted.status_code == 202
    assert sent.bases == [[1, 2], [1, 2], [1, 2], None]
    refused = ask(client, name, "1.1")
    problem = refused.json()
    assert (refused.status_code, problem["type"], problem["version"]) == (
        409,
        "urn:freshet:plan-changed",
        "1.2",
    )
    assert problem["action"].endswith("decide again, with If-Match: 1.2.")
    sent.moving = True
    assert ask(client, name, "1.2").json()["action"].startswith("Ask again once its layers have moved")
    assert ask(client, name, "newest").status_code == 422
    assert "name different plans" in ask(client, name, "1.1", "1.2").json()["detail"]


@pytest.mark.parametrize("name", BODIES)
def test_a_form_is_for_the_plan_that_it_was_simulated_on(client: TestClient, sent: Sent, name: str) -> None:
    path = f"/jobs/gpt/controls/{name}"

    def fields(answer: Response) -> dict[str, str]:
        return {each["name"]: each["value"] for each in Page(answer.text).all("input") if "value" in each}

    form = fields(client.get(path, params=BODIES[name]))
    assert form["version"] == "1.1"
    refused = client.post(path, data=form)
    assert refused.status_code == 409
    assert "The button now asks to replace plan 1.2." in refused.text
    assert client.post(path, data=fields(refused), follow_redirects=False).status_code == 303
    assert sent.bases == [[1, 1], [1, 2]]
