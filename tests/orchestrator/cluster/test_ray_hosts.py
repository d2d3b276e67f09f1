"""Ranks on Ray, with fake Ray tables: waits hold no threads, and a node that starts no rank is avoided."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from pace import patient
from process_hosts import ElasticJob
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.cluster import ray_hosts
from orchestrator.cluster.hosts import RankGone
from orchestrator.cluster.placement import Node
from orchestrator.cluster.ray_hosts import RayHosts
from orchestrator.controller.ranks.runtime import Runtime
from orchestrator.events.types import Noticed, Undrained, Warned
from orchestrator.lifecycle.effects import Recruit
from orchestrator.lifecycle.stimuli import Noted, RankLost, Stimulus

BAD = Node(id="bad", host="10.0.0.1", total={"CPU": 8.0}, available={"CPU": 8.0})
GOOD = Node(id="good", host="10.0.0.2", total={"CPU": 2.0}, available={"CPU": 2.0})


def test_waiting_for_placement_holds_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    state = "PENDING"

    def table(group: object) -> dict[str, Any]:
        return {"state": state, "bundles_to_node_id": {0: f"node of {group}"}}

    monkeypatch.setattr(ray_hosts, "placement_group_table", table)

    async def wait() -> list[list[str] | None]:
        nonlocal state
        groups = [cast(Any, f"group {number}") for number in range(100)]
        waiting = [asyncio.ensure_future(ray_hosts._placed([group], 30.0)) for group in groups]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(patient(2.0)):
            await asyncio.to_thread(threading.get_ident)
        state = "CREATED"
        return await asyncio.gather(*waiting)

    assert asyncio.run(wait()) == [[f"node of group {number}"] for number in range(100)]


def test_what_is_not_placed_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_hosts, "placement_group_table", lambda group: {"state": "PENDING"})
    assert asyncio.run(ray_hosts._placed([cast(Any, "group")], 0.1)) is None


def test_a_drained_node_gets_no_ranks_until_it_is_undrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"state": "CREATED", "bundles_to_node_id": {0: "bad"}}
    monkeypatch.setattr(ray_hosts, "placement_group_table", lambda group: table)
    monkeypatch.setattr(ray_hosts, "placement_group", lambda *arguments, **options: "group")
    monkeypatch.setattr(ray_hosts.cluster, "nodes", lambda: (BAD, GOOD))
    monkeypatch.setattr(ray_hosts.time, "monotonic", count(step=3600.0).__next__)  # an hour with each look

    async def drain() -> None:
        setup = ElasticJob(resolved(tiny(tmp_path, "drained"))).setup
        hosts = RayHosts(setup.ranks, cast(Any, None))
        runtime = Runtime(setup, hosts, list[Stimulus]().append, asyncio.ensure_future)
        runtime.fold(Noticed(node="bad", host="10.0.0.1", source="request", ranks=(0,), left_s=0.5))
        assert [await hosts.room() for _ in range(3)] == [2, 2, 2]
        refused = await hosts.reserve([4], 1.0)
        assert refused == "the only room was on node bad, which the job is to leave"
        runtime.fold(Undrained(node="bad", host="10.0.0.1"))
        assert await hosts.room() == 10
        assert await hosts.reserve([4], 1.0) is None

    asyncio.run(drain())


class Unlucky(RayHosts):
    """Ranks that die on startup on the node where every group is placed."""

    def start(self, rank: int) -> None:
        return

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(RankGone("exit code 3"))
        return answer

    async def end(self, rank: int) -> None:
        return


def test_a_node_on_which_ranks_do_not_start_is_avoided_for_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"state": "CREATED", "bundles_to_node_id": {0: "bad"}}
    monkeypatch.setattr(ray_hosts, "placement_group_table", lambda group: table)
    monkeypatch.setattr(ray_hosts, "placement_group", lambda *arguments, **options: "group")
    monkeypatch.setattr(ray_hosts.cluster, "nodes", lambda: (BAD, GOOD))

    async def recruit() -> None:
        setup = ElasticJob(resolved(tiny(tmp_path, "unlucky"))).setup
        hosts = Unlucky(setup.ranks, cast(Any, None))
        told = list[Stimulus]()
        runtime = Runtime(setup, hosts, told.append, asyncio.ensure_future)
        assert await hosts.room() == 10
        for rank in (4, 5):
            work = runtime.carry_out(Recruit((rank,)))
            assert work is not None
            await work
        assert await hosts.room() == 2
        text = "rank {} did not start on node 10.0.0.1, which gets no other rank for {} s"
        died = "its process died as it started: exit code 3"
        assert told == [
            Noted(Warned(text=text.format(4, 2))),
            RankLost(4, died, dead=True),
            Noted(Warned(text=text.format(5, 4))),
            RankLost(5, died, dead=True),
        ]
        hosts.started(5)
        assert await hosts.room() == 10

    asyncio.run(recruit())
