"""The cluster: nodes, who leaves them and when, past preemptions of all jobs, devices and links with their nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_run import ElasticRun
from fastapi.testclient import TestClient
from page_runs import profile
from report_page import Page
from serving import Made, settings_in, show, token

from dashboard.api.cluster import KEPT_PREEMPTIONS, preemptions
from dashboard.app import create_app
from dashboard.service.access import Role
from orchestrator.client.cluster_state import NodeState
from orchestrator.client.job_client import JobClient
from orchestrator.events.types import Dismissed, Noticed, Undrained
from orchestrator.history.job_view import JobView, fold
from planner.profile import Link


class Nodes(JobClient):
    """A cluster of two nodes."""

    async def nodes(self) -> tuple[NodeState, ...]:
        return tuple(
            NodeState(
                id=f"node-{number}",
                host=f"10.0.0.{number}",
                head=number == 0,
                alive=True,
                total={"CPU": 2.0},
                available={"CPU": 1.0},
                draining=False,
                deadline_s=None,
            )
            for number in range(2)
        )


def notice(rank: int, source: str, left_s: float | None = 60.0) -> Noticed:
    node = f"node-{rank}"
    return Noticed(node=node, host=f"10.0.0.{rank}", source=source, ranks=(rank,), left_s=left_s)


def training(name: str, *, from_s: float = 1000.0) -> ElasticRun:
    """A job of four ranks, each on a node of its own."""
    run = ElasticRun(clock_s=from_s)
    run.submit()
    for rank in range(4):
        run.rank(rank)
    run.form((0, 1, 2, 3))
    run.train(2)
    return run


def view(run: ElasticRun, name: str) -> JobView:
    found = fold(run.records)
    found.job = name
    return found


def preempted() -> JobView:
    """Rank 1 leaves by AWS's notice, rank 2 is lost without one, and a user drains rank 0's node."""
    run = training("spot")
    run.put(notice(1, "aws", 120.0))
    run.train(1)
    run.regroup((0, 2, 3), cause="drain", lost=(1,))
    run.lose(2)
    run.regroup((0, 3), lost=(2,))
    run.train(1)
    run.put(notice(0, "request"))
    return view(run, "spot")


def test_preemptions_of_all_jobs_are_in_the_order_of_time() -> None:
    other = training("other", from_s=1001.5)
    other.put(notice(3, "sigterm", None))
    found = preemptions([preempted(), view(other, "other")])
    assert [(each.job, each.noticed, each.text) for each in found] == [
        ("spot", True, "rank 1 on 10.0.0.1 must leave (aws, 2 min 00 s left)"),
        ("other", True, "rank 3 on 10.0.0.3 must leave (sigterm)"),
        ("spot", False, "rank 2 was lost on 127.0.0.1 without notice"),
    ]
    assert [each.time_s for each in found] == pytest.approx([1002.0, 1003.5, 1005.0])


def test_the_newest_preemptions_are_shown() -> None:
    run = training("often")
    for _ in range(KEPT_PREEMPTIONS + 3):
        run.put(notice(1, "aws"))
        run.clock_s += 1
    found = preemptions([view(run, "often")])
    assert len(found) == KEPT_PREEMPTIONS
    assert found[-1].time_s == run.clock_s - 1


@pytest.fixture
def job(tmp_path: Path) -> Made:
    """A job with a profile in its folder. Ranks 1 and 2 are gone, rank 0 is about to leave."""
    made = Made("spot")
    made.view = preempted()
    made.view.spec = {**made.view.spec, "job": {**made.view.spec["job"], "output": str(tmp_path / "job")}}
    measured = profile().cluster
    devices = tuple(
        replace(device, machine=f"machine-{rank}" if rank else "")
        for rank, device in enumerate(measured.devices)
    )
    slow = Link(latency_s=2e-3, bytes_per_s=1e6)
    links = tuple(
        tuple(slow if (source, target) == (0, 2) else link for target, link in enumerate(row))
        for source, row in enumerate(measured.links)
    )
    (tmp_path / "job").mkdir()
    found = replace(profile(), cluster=replace(measured, devices=devices, links=links))
    (tmp_path / "job" / "profile.json").write_text(found.to_json())
    return made


@pytest.fixture
def client(tmp_path: Path, job: Made) -> Iterator[TestClient]:
    settings = settings_in(tmp_path / "service")
    app = create_app(settings)
    show(app, job)
    app.state.services.live.client = Nodes()
    headers = {"Authorization": f"Bearer {token(settings, Role.CONTROL)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client


def test_a_drain_that_a_user_requested_has_its_deadline(client: TestClient) -> None:
    answer: dict[str, Any] = client.get("/api/v1/cluster").json()
    first, second = answer["nodes"]
    assert first["users"] == [{"job": "spot", "ranks": [0], "leaving": True, "deadline_s": 1067.5}]
    assert second["users"] == []
    assert not any("request" in each["text"] for each in answer["preemptions"])
    page = Page(client.get("/cluster").text)
    text = " ".join(page.text.split())
    assert "spot: rank 0 leaves by 00:17:47 UTC" in text
    assert "1970-01-01 00:16:42 UTC spot rank 1 on 10.0.0.1 must leave (aws, 2 min 00 s left)" in text
    assert text.index("(aws, 2 min 00 s left)") < text.index("rank 2 was lost")


def test_a_node_that_a_job_has_left_on_request_can_be_undrained(client: TestClient, job: Made) -> None:
    node = client.get("/api/v1/cluster").json()["nodes"][0]
    assert node["drained_by"] == []  # its rank is still leaving
    job.view.ranks.fold(Dismissed(ranks=(0,)))
    node = client.get("/api/v1/cluster").json()["nodes"][0]
    assert (node["users"], node["drained_by"]) == ([], ["spot"])
    page = client.get("/cluster").text
    assert "drained, starts no ranks here" in page
    form = client.get(f"/jobs/spot/controls/undrain?node={node['id']}")
    assert f'href="/jobs/spot/controls/undrain?node={node["id"]}"' in page
    assert f"The job may start ranks on {node['id']} again" in " ".join(Page(form.text).text.split())
    job.view.ranks.fold(Undrained(node=node["id"], host=node["host"]))
    assert client.get("/api/v1/cluster").json()["nodes"][0]["drained_by"] == []
    assert "no Freshet job" in client.get("/cluster").text


def test_devices_and_links_name_their_nodes(client: TestClient) -> None:
    """That of the rank; of a rank that is gone, the machine that was measured."""
    measured = client.get("/api/v1/cluster/measured").json()
    assert [device["node"] for device in measured["devices"]] == [
        "127.0.0.1",
        "machine-1",
        "machine-2",
        "127.0.0.1",
    ]
    (slow,) = [link for link in measured["links"] if link["bytes_per_s"] == 1e6]
    assert (slow["source_node"], slow["target_node"]) == ("127.0.0.1", "machine-2")
    text = client.get("/cluster").text
    rows = [
        re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row)
        for row in re.findall(r"<tr>.*?</tr>", text, re.DOTALL)
    ]
    assert ["Job", "Rank", "Node", "Device", "Memory", "Times"] in rows
    assert ["spot", "1", "machine-1", "made by hand (cpu)", "12.0 MB", "× 1"] in rows
    links = rows[
        rows.index(["Job", "From rank", "From node", "To rank", "To node", "Latency", "Bandwidth"]) :
    ]
    assert links[1] == ["spot", "0", "127.0.0.1", "2", "machine-2", "2.00 ms", "1.00 MB/s"]
