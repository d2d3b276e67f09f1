"""What a service answers while something else takes long: a simulation, a past run's log, a cluster that does not
answer, a client that takes nothing."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from pace import patient
from serving import client_of, live_job, settings_in, show, token

import dashboard.jobs.live_jobs
import dashboard.jobs.past_runs
import dashboard.pages.what_if_page
import dashboard.server
from dashboard.app import create_app
from dashboard.jobs.live_jobs import LiveJobs
from dashboard.jobs.past_runs import PastRuns
from dashboard.server import listener_of
from dashboard.service.settings import ServiceSettings
from orchestrator.client import asking, job_client
from orchestrator.client.errors import Refused
from orchestrator.client.job_client import Command, JobClient
from orchestrator.client.ray_calls import RayCalls
from orchestrator.commands.command import JobCommand

READS = ("/api/v1/jobs/gpt", "/api/v1/jobs/gpt/view", "/api/v1/jobs/gpt/telemetry", "/jobs/gpt", "/metrics")
PAST = ("/healthz", "/metrics", "/runs/gpt", "/api/v1/runs/gpt", "/api/v1/jobs/gpt/view")


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return settings_in(tmp_path)


async def statuses(client: httpx.AsyncClient, paths: tuple[str, ...]) -> list[int]:
    return [answer.status_code for answer in await asyncio.gather(*map(client.get, paths))]


class Held:
    """`real`, which waits in its threads until the test lets it go."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._real = real

    def __call__(self, *arguments: object) -> Any:
        self.begun.set()
        assert self.go.wait(60)
        return self._real(*arguments)


@asynccontextmanager
async def waiting(
    held: Held, paths: Sequence[str], app: FastAPI, settings: ServiceSettings
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `app`, while requests for `paths` wait for `held`; they are answered in the end."""
    async with client_of(app, token(settings)) as client:
        asked = [asyncio.create_task(client.get(path)) for path in paths]
        try:
            assert await asyncio.to_thread(held.begun.wait, 20)
            async with asyncio.timeout(patient(20)):
                yield client
        finally:
            held.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


@pytest.fixture
def what_ifs(monkeypatch: pytest.MonkeyPatch) -> Held:
    """The simulations of what-ifs."""
    held = Held(dashboard.pages.what_if_page.what_if)
    monkeypatch.setattr(dashboard.pages.what_if_page, "what_if", held)
    return held


def test_reads_do_not_wait_for_simulations(settings: ServiceSettings, what_ifs: Held) -> None:
    """More what-ifs than there are threads hold their simulations until the reads are answered."""

    async def run() -> None:
        app = create_app(settings)
        show(app, live_job())
        async with waiting(what_ifs, ["/jobs/gpt/what-if?ranks=2"] * 10, app, settings) as client:
            assert await statuses(client, READS) == [200] * len(READS)

    asyncio.run(run())


class Refusing(JobClient):
    """A client whose job refuses every move."""

    async def send(self, job: str, command: JobCommand) -> Command:
        raise Refused("another move is under way")


def test_controls_do_not_wait_for_simulations_that_they_do_not_need(
    settings: ServiceSettings, what_ifs: Held
) -> None:
    """Someone stops the job while others look at what-ifs; a refused move is told at once, too."""
    plain = ("pause", "resume", "checkpoint", "cancel", "cancelnow", "scale?spares=1", "freeze?method=apf")
    asked = tuple(f"/jobs/gpt/controls/{name}" for name in plain)

    async def run() -> None:
        app = create_app(settings)
        show(app, live_job())
        app.state.services.live.client = Refusing()
        async with waiting(what_ifs, ["/jobs/gpt/what-if?ranks=2"] * 5, app, settings) as client:
            assert await statuses(client, asked) == [200] * len(asked)
            form = {"key": "1", "layers": "7", "rank": "2"}
            refused = await client.post("/jobs/gpt/controls/move", data=form)
            assert (refused.status_code, "another move is under way" in refused.text) == (409, True)

    asyncio.run(run())


def test_reads_do_not_wait_for_past_runs(settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests for past runs than there are threads wait until the reads of a live job are answered."""
    held = Held(dashboard.jobs.past_runs.placed_view_in)
    monkeypatch.setattr(dashboard.jobs.past_runs, "placed_view_in", held)
    past = ("/runs", "/runs/gpt", "/compare?run=gpt&run=frozen", "/api/v1/runs", "/api/v1/runs/frozen/view")

    async def run() -> None:
        app = create_app(settings)
        show(app, live_job())
        async with waiting(held, past * 4, app, settings) as client:
            assert await statuses(client, READS) == [200] * len(READS)

    asyncio.run(run())


def test_nothing_is_kept_of_a_read_that_is_over(settings: ServiceSettings) -> None:
    past = PastRuns(settings.runs)
    for name in ("gpt", "frozen", "gpt"):
        past.view(past.find(name))
    assert not past._reading


def test_a_cluster_that_does_not_answer_costs_only_what_needs_it(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call to Ray blocks, more often than there are threads; nothing else waits."""
    go = threading.Event()
    monkeypatch.setattr(dashboard.jobs.live_jobs, "ANSWER_S", 1.0)

    def silent(*arguments: object) -> object:
        go.wait(60)
        return ()

    for module, name in (
        (job_client, "job_names"),
        (job_client, "cluster_nodes"),
        (asking, "controller_of"),
    ):
        monkeypatch.setattr(module, name, silent)
    client = JobClient()
    client._calls = RayCalls(most=8, limit_s=0.3)

    async def run() -> None:
        app = create_app(settings)
        live = LiveJobs(client)
        app.state.services = replace(app.state.services, live=live)
        live._jobs["gpt"] = live_job()
        live.start()
        async with client_of(app, token(settings)) as browser:
            asked = [
                browser.get("/api/v1/cluster"),
                *(browser.post("/api/v1/jobs/gpt/pause") for _ in range(25)),
                *(browser.get(f"/api/v1/jobs/other{n}") for n in range(15)),
            ]
            needing = [asyncio.create_task(each) for each in asked]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(patient(20)):
                assert await statuses(browser, PAST) == [200] * len(PAST)
                answers = await asyncio.gather(*needing)
            assert {answer.status_code for answer in answers} == {503}
            assert {answer.json()["type"] for answer in answers} == {"urn:freshet:cluster-silent"}
            trouble = (await browser.get("/api/v1/jobs")).json()["trouble"]
            assert re.search("the cluster (has not answered|does not answer)", trouble)
            go.set()
            await live.close()

    asyncio.run(run())


def test_a_stalled_client_is_dropped_with_what_is_kept_for_it(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for more than the sockets hold, reads nothing and stays connected."""
    monkeypatch.setattr(dashboard.server, "STALLED_MS", 1_000)

    async def run() -> None:
        app = create_app(settings)
        show(app, live_job())
        with listener_of(replace(settings, port=0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            async with serving(app, listener) as server:
                stalled = socket.socket()
                stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stalled.connect(listener.getsockname())
                request = (
                    "GET /api/v1/jobs/gpt/view HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                    f"Authorization: Bearer {token(settings)}\r\n\r\n"
                )
                stalled.sendall(request.encode())
                with stalled:
                    await until(lambda: any(kept(each) for each in server.server_state.connections))
                    await until(lambda: not server.server_state.connections)

    asyncio.run(run())


@asynccontextmanager
async def serving(app: FastAPI, listener: socket.socket) -> AsyncIterator[uvicorn.Server]:
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield server
    finally:
        server.should_exit = True
        await task


def kept(connection: Any) -> int:
    """Bytes that wait in this process for the client to take them."""
    return connection.transport.get_write_buffer_size()


async def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patient(10)
    while not true():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
