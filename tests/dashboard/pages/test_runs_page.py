"""The list of past runs: what it tells of each, how it is searched and sorted; and the axis of the comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from report_page import Page
from serving import settings_in, token, write_run
from synthetic_run import records

from dashboard.app import create_app
from dashboard.service.access import Role
from orchestrator.events.types import Record, Submitted


def run(name: str, *, days: int, steps: int, family: str) -> list[Record]:
    log = [replace(record, time_s=record.time_s + 86_400 * days) for record in records(steps=steps)]
    begins = log[0].event
    assert isinstance(begins, Submitted)
    model = {**begins.spec["model"], "family": family}
    return [replace(log[0], event=replace(begins, job=name, spec={**begins.spec, "model": model})), *log[1:]]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("runs")
    for name, days, steps, family in (("b", 0, 30, "gpt"), ("a", 2, 10, "llama"), ("c", 1, 20, "gpt")):
        write_run(folder / name, run(name, days=days, steps=steps, family=family))
    (folder / "half").mkdir()
    (folder / "half" / "job.json").write_text("{}")
    settings = replace(settings_in(Path(tmp_path_factory.mktemp("service"))), runs=(folder,))
    headers = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client


def listed(client: TestClient, **query: object) -> list[str]:
    answer = client.get("/runs", params=query)  # type: ignore[arg-type]
    assert answer.status_code == 200
    return re.findall(r'<td><a href="/runs/(\w+)">', answer.text)


def test_each_run_tells_when_it_ran_how_long_and_what(client: TestClient) -> None:
    text = " ".join(Page(client.get("/runs").text).text.split())
    assert "2025-11-22 08:40" in text
    assert "llama, 8 blocks, width 128, context 128" in text
    assert "4 of 4 runs" in text
    summaries = {each["run"]: each["summary"] for each in client.get("/api/v1/runs").json()["runs"]}
    assert summaries["b"]["model"].startswith("gpt, 8 blocks")
    assert summaries["b"]["duration_s"] > summaries["a"]["duration_s"] > 5


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, ["a", "c", "b"]),
        ({"sort": "date", "down": 0}, ["b", "c", "a"]),
        ({"sort": "run", "down": 0}, ["a", "b", "c"]),
        ({"sort": "run", "down": 1}, ["c", "b", "a"]),
        ({"sort": "step"}, ["b", "c", "a"]),
        ({"sort": "duration", "down": 0}, ["a", "c", "b"]),
        ({"sort": "loss"}, ["a", "c", "b"]),
        ({"sort": "model", "down": 0}, ["b", "c", "a"]),
        ({"search": "GPT", "sort": "run", "down": 0}, ["b", "c"]),
        ({"search": "gpt finished", "sort": "run"}, ["c", "b"]),
        ({"search": "nothing like it"}, []),
        ({"search": "half"}, []),
    ],
)
def test_runs_are_searched_and_sorted(client: TestClient, query: dict[str, object], names: list[str]) -> None:
    assert listed(client, **query) == names


def test_runs_that_cannot_be_read_come_last_and_are_found_too(client: TestClient) -> None:
    assert "half has no event log yet" in client.get("/runs", params={"search": "half"}).text
    for down in (0, 1):
        text = client.get("/runs", params={"sort": "run", "down": down}).text
        assert text.index(">unreadable<") > max(text.index(f"/runs/{name}") for name in "abc")
    assert "No run has “&lt;b&gt;”" in client.get("/runs", params={"search": "<b>"}).text
    assert client.get("/runs", params={"sort": "luck"}).status_code == 422


def test_a_heading_sorts_and_turns_the_order_and_keeps_the_search(client: TestClient) -> None:
    page = Page(client.get("/runs", params={"search": "gpt", "sort": "loss", "down": 0}).text)
    assert [each["aria-sort"] for each in page.all("th") if "aria-sort" in each] == ["ascending"]
    links = [each["href"] for each in page.all("a") if each["href"].startswith("/runs?sort=")]
    assert "/runs?sort=loss&down=1&search=gpt" in links
    assert "/runs?sort=date&down=1&search=gpt" in links
    assert all(client.get(link).status_code == 200 for link in links)


def test_runs_are_compared_over_the_axis_that_the_address_names(client: TestClient) -> None:
    for axis, label in (("step", "step"), ("tokens", "tokens"), ("time", "time, s")):
        answer = client.get("/compare", params={"run": ["a", "b"], "axis": axis})
        page = Page(answer.text)
        assert page.charts["Loss"]["x"]["label"] == label
        (now,) = (each for each in page.all("a") if "aria-current" in each)
        assert now["href"] == f"/compare?run=a&run=b&axis={axis}#curves"
    assert "model.family" in page.text
    assert client.get("/compare", params={"run": ["a", "b"], "axis": "luck"}).status_code == 422
