"""Controls that name the plan that their sender saw: sent while the job has it, refused once it has another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx import Response
from page_runs import moving, training
from serving import Made, settings_in, show, token

from dashboard.service.app import create_app
from orchestrator.client.job_client import JobClient
from orchestrator.client.jobs import Command
from orchestrator.events.types import Commanded
from orchestrator.history.job_view import JobView

BODIES: dict[str, dict[str, Any]] = {
    "move": {"layers": "3", "rank": 0},
    "scale": {"ranks": 2},
    "freeze": {"r_max": 0.5},
    "drain": {"node": "5f0c"},
}


class Sent(JobClient):
    """A client that notes what it is to send."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    async def _send(self, job: str, name: str, arguments: object, id: str | None, by: str) -> Command:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.names.append(name)
        return Command(job=job, id=id or "made", text="sent")


@pytest.fixture
def job() -> Made:
    """A job that has plan 1.1."""
    made = Made("gpt")
    made.view = training()
    return made


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def client(tmp_path: Path, job: Made, sent: Sent) -> Iterator[TestClient]:
    settings = settings_in(tmp_path)
    app = create_app(settings)
    show(app, job)
    app.state.services.live.client = sent
    headers = {"Authorization": f"Bearer {token(settings)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client


def ask(client: TestClient, name: str, match: str, key: str = "1") -> Response:
    headers = {"If-Match": match, "Idempotency-Key": key}
    return client.post(f"/api/v1/jobs/gpt/{name}", json=BODIES[name], headers=headers)


@pytest.mark.parametrize("name", BODIES)
def test_a_control_is_for_the_plan_that_it_names(
    client: TestClient, job: Made, sent: Sent, name: str
) -> None:
    for match in ("1.1", '"1.1"'):
        assert ask(client, name, match).status_code == 202
    job.view = moving()
    refused = ask(client, name, "1.1")
    problem = refused.json()
    assert (refused.status_code, problem["type"], problem["version"]) == (
        409,
        "urn:freshet:plan-changed",
        "1.2",
    )
    assert "plan 1.1 is not the newest one any more: that is 1.2" in problem["detail"]
    assert problem["action"].endswith("decide again, with If-Match: 1.2.")
    assert ask(client, name, "1.2").status_code == 202
    assert sent.names == [name] * 3


def test_a_control_that_comes_again_is_not_refused_for_the_plan_that_it_led_to(
    client: TestClient, job: Made, sent: Sent
) -> None:
    job.view = moving()
    job.view.commands.take(Commanded(id="first", name="move", arguments=BODIES["move"], by=""))
    assert ask(client, "move", "1.1", key="first").status_code == 202
    assert ask(client, "move", "1.1", key="second").status_code == 409


def test_a_job_without_a_plan_has_none_to_match(client: TestClient, job: Made, sent: Sent) -> None:
    job.view = JobView(job="gpt", state="starting")
    refused = ask(client, "move", "1.1")
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        "job 'gpt' has no plan yet: it is starting",
    )
    assert client.post("/api/v1/jobs/gpt/move", json=BODIES["move"]).status_code == 202
    assert ask(client, "move", "newest").status_code == 422
    assert sent.names == ["move"]
