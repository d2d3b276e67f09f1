"""A job's events by kind, and what its ranks print: on pages and over REST, of live jobs and past runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from page_runs import HOSTILE
from report_page import Page
from serving import live_job, settings_in, show, token

from dashboard.api.output import MOST_BYTES
from dashboard.app import create_app
from dashboard.service.access import Role


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[TestClient]:
    """A service of a live job and of past runs, whose folders hold the output of ranks."""
    settings = settings_in(runs)
    app = create_app(settings)
    job = live_job()
    job.view.spec = {
        **job.view.spec,
        "job": {**job.view.spec["job"], "output": str(runs / "runs" / "frozen")},
    }
    show(app, job)
    logs = runs / "runs" / "frozen" / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text(f"{HOSTILE}\nsaid by rank 0\n")
    (logs / "rank-2.log").write_text("x" * 99 + "\n" + "y\n" * MOST_BYTES)
    (logs / "rank-3.log").symlink_to(settings.tokens)
    headers = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client


def shown_kinds(text: str) -> list[str]:
    """The kinds of the events that are listed, newest first."""
    return re.findall(r"UTC</td><td>(\w+)</td>", text)


@pytest.mark.parametrize("base", ["/jobs/gpt", "/runs/frozen"])
def test_events_are_shown_by_kind_and_floods_only_when_they_are_chosen(client: TestClient, base: str) -> None:
    usual = client.get(f"{base}/events")
    kinds = shown_kinds(usual.text)
    assert {"StepReport", "CheckpointReport"} <= set(kinds)
    assert not {"FreezeReport", "TimelineReport"} & set(kinds)
    text = " ".join(Page(usual.text).text.split())
    assert re.search(r"Left out until they are chosen: .*[\d,]+ of FreezeReport", text)
    assert "step 200 loss" in text
    chosen = client.get(f"{base}/events", params={"kind": ["Issued", "CheckpointReport"]})
    assert set(shown_kinds(chosen.text)) == {"Issued", "CheckpointReport"}
    boxes = [each["value"] for each in Page(chosen.text).all("input") if "checked" in each]
    assert set(boxes) == {"Issued", "CheckpointReport"}
    refused = client.get(f"{base}/events", params={"kind": "plans"})
    assert refused.status_code == 422
    assert "there is no kind of event" in refused.text


def test_the_events_of_a_live_job_are_filtered_over_rest(client: TestClient) -> None:
    path = "/api/v1/jobs/gpt/events"
    found = client.get(path, params={"kind": ["CheckpointReport", "Finished"], "limit": 2}).json()
    assert [each["event"] for each in found["events"]] == ["CheckpointReport", "CheckpointReport"]
    rest = client.get(path, params={"kind": ["CheckpointReport", "Finished"], "after": found["next"]}).json()
    assert [each["event"] for each in rest["events"]] == ["CheckpointReport", "CheckpointReport", "Finished"]
    assert rest["over"]
    assert client.get(path, params={"kind": "plans"}).status_code == 422


@pytest.mark.parametrize("base", ["/jobs/gpt", "/runs/frozen"])
def test_the_output_of_a_rank_is_shown_as_text_and_never_as_markup(client: TestClient, base: str) -> None:
    whole = client.get(f"{base}/output")
    page = Page(whole.text)
    assert f"{HOSTILE}\nsaid by rank 0" in page.text
    assert HOSTILE not in whole.text
    section = client.get(f"{base}/parts/output").text
    assert "said by rank 0" in section
    assert f'href="{base}/output?rank=2"' in section
    answer = client.get(f"/api/v1{base}/output/0").json()
    assert answer == {"rank": 0, "ranks": [0, 2, 3], "text": f"{HOSTILE}\nsaid by rank 0\n", "cut": False}


def test_no_more_of_an_output_is_shown_than_its_end(client: TestClient) -> None:
    answer = client.get("/runs/frozen/output", params={"rank": 2})
    assert len(answer.text) < 1.1 * MOST_BYTES
    assert "There is more before it" in answer.text
    end = client.get("/api/v1/runs/frozen/output/2", params={"bytes": 10}).json()
    assert (end["text"], end["cut"]) == ("y\n" * 4, True)
    assert client.get("/api/v1/runs/frozen/output/2", params={"bytes": MOST_BYTES + 1}).status_code == 422


def test_what_is_no_output_is_not_shown(client: TestClient, runs: Path) -> None:
    """A link out of the folder, a rank without output, a run without any."""
    for path in ("/runs/frozen/output/3", "/runs/frozen/output/7", "/runs/gpt/output/0"):
        answer = client.get(f"/api/v1{path}")
        assert answer.status_code == 404
        assert (runs / "tokens.json").read_text() not in answer.text
    assert "Ranks whose output is here: 0, 2, 3." in client.get("/api/v1/runs/frozen/output/7").text
    assert "each rank writes it on its own node" in client.get("/runs/gpt/output").text
    assert not client.get("/runs/gpt/parts/output").text
    assert client.get("/runs/frozen/output", params={"rank": -1}).status_code == 422
