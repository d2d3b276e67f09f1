"""Runs whose log is cut off, damaged or still written, through the service: shown as far as they go, or why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from report_page import Page
from serving import settings_in, token
from synthetic_run import records

from dashboard.app import create_app
from dashboard.service.access import Role
from orchestrator.events.types import Finished

LINES = [record.to_json() for record in records(steps=40) if not isinstance(record.event, Finished)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    settings = settings_in(tmp_path)
    headers = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client


def write(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text(text)


def test_a_log_that_is_cut_off_is_shown_up_to_there(client: TestClient, runs: Path) -> None:
    """Its writer died, or has not finished the line. What is written later is shown then."""
    cut = next(
        number
        for number, line in enumerate(LINES)
        if '"event": "StepReport"' in line and '"step": 31' in line
    )
    write(runs / "torn", "\n".join([*LINES[:cut], LINES[cut][: len(LINES[cut]) // 2]]))
    summary = client.get("/api/v1/runs/torn").json()
    assert (summary["state"], summary["step"], summary["last_step"]) == ("lost", 30, 200)
    page = Page(client.get("/runs/torn").text)
    assert page.all("progress")[0]["value"] == "30"
    assert client.get("/api/v1/runs/torn/telemetry", params={"last": 1}).json()["step"] == [30]
    write(runs / "torn", "\n".join(LINES) + "\n")
    assert client.get("/api/v1/runs/torn").json()["step"] == 40


def test_a_damaged_log_is_named_with_its_line_and_hides_no_other_run(client: TestClient, runs: Path) -> None:
    write(runs / "damaged", "\n".join([*LINES[:5], "}", *LINES[5:]]) + "\n")
    for path in ("/api/v1/runs/damaged", "/api/v1/runs/damaged/telemetry"):
        answer = client.get(path)
        assert (answer.status_code, "line 6" in answer.json()["detail"]) == (422, True), answer.text
    page = client.get("/runs/damaged")
    assert (page.status_code, "line 6" in Page(page.text).text) == (422, True)
    listed = {run["run"]: run for run in client.get("/api/v1/runs").json()["runs"]}
    assert "line 6" in listed["damaged"]["problem"]
    assert listed["gpt"]["summary"]["state"] == "finished"
    assert "line 6" in Page(client.get("/runs").text).text
