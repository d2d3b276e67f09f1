"""The live stream on a real socket, of a job whose events this test makes."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import synthetic_run
import uvicorn
from fastapi import FastAPI
from pace import patient
from report_page import Page
from serving import Made, settings_in, show, token

import dashboard.api.events
import dashboard.api.jobs_stream
import dashboard.api.streams
from dashboard.app import create_app
from dashboard.service.access import Role
from dashboard.service.limits import AtOnce
from dashboard.service.settings import ServiceSettings
from orchestrator.events.types import Record


def step(number: int, size: int = 0) -> Record:
    report = synthetic_run.step_report(number, random.Random(number))
    return Record(time_s=float(number), event=replace(report, samples_digest="x" * size))


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return settings_in(tmp_path)


@asynccontextmanager
async def serving(settings: ServiceSettings, job: Made) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """A service that shows `job`; yields a client and its port."""
    app = create_app(settings)
    show(app, job)
    async with serving_app(settings, app) as client:
        yield client, client.base_url.port or 0


@asynccontextmanager
async def serving_app(settings: ServiceSettings, app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `app` on a socket."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    headers = {"Authorization": f"Bearer {token(settings)}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
        yield client
    server.should_exit = True
    await task


async def read(
    client: httpx.AsyncClient, records: int, path: str = "/api/v1/jobs/made/stream", **headers: str
) -> tuple[list[str], list[int], int]:
    """(kinds, step numbers, missed) of a stream up to this many records."""
    kinds: list[str] = []
    steps: list[int] = []
    missed = 0
    async with client.stream("GET", path, headers=headers, timeout=patient(20)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        kind = ""
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
                kinds.append(kind)
            elif name == "data" and kind == "missed":
                missed += json.loads(value)["count"]
            elif name == "data" and kind == "record":
                steps.append(json.loads(value)["step"])
            if len(steps) >= records or kind == "end":
                break
    return kinds, steps, missed


def test_a_reader_that_reconnects_misses_nothing(settings: ServiceSettings) -> None:
    async def run() -> None:
        job = Made("made")
        async with serving(settings, job) as (client, _):
            reading = asyncio.create_task(read(client, 5))
            await asyncio.sleep(0.5)
            for number in range(1, 6):
                job.take(step(number))
                await asyncio.sleep(0.05)
            assert (await reading)[1] == [1, 2, 3, 4, 5]
            for number in range(6, 9):
                job.take(step(number))
            last = {"Last-Event-ID": "0-5"}
            assert (await read(client, 3, **last))[1:] == ([6, 7, 8], 0)
            # A number of an earlier start of the job: everything of this one.
            assert (await read(client, 8, **{"Last-Event-ID": "7-5"}))[1] == list(range(1, 9))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("query", "headers"),
    [("?after=500", {}), ("", {"Last-Event-ID": "0-500"}), ("?after=0", {"Last-Event-ID": "0-500"})],
)
def test_after_the_end_there_are_only_new_events(
    settings: ServiceSettings, query: str, headers: dict[str, str]
) -> None:
    async def run() -> None:
        job = Made("made")
        for number in range(1, 9):
            job.take(step(number))
        async with serving(settings, job) as (client, _):
            url = f"/api/v1/jobs/made/stream{query}"
            async with client.stream("GET", url, headers=headers, timeout=20) as answer:
                lines = answer.aiter_lines()
                assert await anext(lines) == "retry: 1000"
                job.take(step(9))
                async for line in lines:
                    if line.startswith("data: "):
                        assert json.loads(line.removeprefix("data: "))["step"] == 9
                        break

    asyncio.run(run())


def test_a_page_after_the_end_is_empty_and_says_where_the_end_is(settings: ServiceSettings) -> None:
    async def run() -> None:
        job = Made("made")
        for number in range(1, 9):
            job.take(step(number))
        async with serving(settings, job) as (client, _):
            page = (await client.get("/api/v1/jobs/made/events?after=1000000")).json()
            assert page == {"events": [], "missed": 0, "next": 8, "over": False}

    asyncio.run(run())


@pytest.mark.parametrize("last", ["-5", "0--5", "5", "0-5-1", "0-", "0-99999999999999999999", "0-٣", "x-5"])
def test_an_id_that_no_stream_sends_is_refused(settings: ServiceSettings, last: str) -> None:
    async def run() -> None:
        job = Made("made")
        job.take(step(1))
        async with serving(settings, job) as (client, _):
            headers = {"Last-Event-ID": last.encode()}
            answer = await client.get("/api/v1/jobs/made/stream", headers=headers, timeout=20)  # pyright: ignore[reportArgumentType]
            assert (answer.status_code, "is no id of this stream" in answer.json()["detail"]) == (422, True)

    asyncio.run(run())


def test_a_page_follows_the_job_from_what_it_shows(settings: ServiceSettings) -> None:
    """An event may come between the page and its stream."""

    async def run() -> None:
        job = Made("made")
        async with serving(settings, job) as (client, _):
            for number in range(1, 4):
                job.take(step(number))
            page = Page((await client.get("/jobs/made")).text)
            (path,) = (each["data-stream"] for each in page.all("div") if "data-stream" in each)
            job.take(step(4))
            assert await asyncio.wait_for(read(client, 1, path), 5) == (["record"], [4], 0)

    asyncio.run(run())


def test_what_is_no_longer_kept_is_told(settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboard.jobs.frames.KEPT_FRAMES", 10)

    async def run() -> None:
        job = Made("made")
        for number in range(1, 31):
            job.take(step(number))
        async with serving(settings, job) as (client, _):
            kinds, steps, missed = await read(client, 10, **{"Last-Event-ID": "0-5"})
            assert (kinds[0], missed, steps) == ("missed", 15, list(range(21, 31)))
            job.gone = True
            assert (await read(client, 1, **{"Last-Event-ID": "0-30"}))[0] == ["end"]

    asyncio.run(run())


def test_all_jobs_are_followed_by_their_summaries(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First every job, then those that have changed, and those that are gone; then why it may be old."""
    monkeypatch.setattr(dashboard.api.jobs_stream, "TURN_S", 0.01)

    async def run() -> None:
        job, other = Made("made"), Made("other")
        for each in (job, other):
            each.view.job = each.name
        app = create_app(settings)
        show(app, job)
        live = app.state.services.live
        live.jobs = lambda: [job, other]
        async with serving_app(settings, app) as client, client.stream("GET", "/api/v1/stream") as answer:
            events = events_of(answer)
            assert [(await anext(events))["job"] for _ in range(2)] == ["made", "other"]
            for number in range(1, 4):
                job.take(step(number))
                summary = await anext(events)
                assert (summary["job"], summary["step"]) == ("made", number)
            live.jobs = lambda: [job]
            assert await anext(events) == {"job": "other"}
            live.trouble = "the cluster does not answer"
            assert await anext(events) == {"trouble": "the cluster does not answer"}

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_stream_of_all_jobs_ends_so_that_its_session_is_looked_at_again(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard.api.jobs_stream, "LONGEST_S", 0.01)

    async def run() -> None:
        async with serving_app(settings, create_app(settings)) as client:
            assert (await client.get("/api/v1/stream")).text == "retry: 1000\n\n"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_stream_of_a_job_ends_so_that_its_session_is_looked_at_again(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard.api.events, "LONGEST_S", 0.01)

    async def run() -> None:
        async with serving(settings, Made("made")) as (client, _):
            assert (await client.get("/api/v1/jobs/made/stream")).text == "retry: 1000\n\n"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_one_caller_does_not_hold_all_streams(settings: ServiceSettings) -> None:
    async def run() -> None:
        app = create_app(settings)
        show(app, Made("made"))
        app.state.services = replace(app.state.services, streams=AtOnce(3, 2))
        reader = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
        paths = "/api/v1/stream", "/api/v1/jobs/made/stream"
        async with serving_app(settings, app) as client, AsyncExitStack() as opened:
            for path in paths:
                await opened.enter_async_context(client.stream("GET", path, headers=reader))
            for path in paths:
                answer = await client.get(path, headers=reader)
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "10")
                assert answer.json()["detail"] == "2 streams of read from 127.0.0.1 are open"
            await opened.enter_async_context(client.stream("GET", paths[0]))
            answer = await client.get(paths[0])
            assert (answer.status_code, answer.json()["detail"]) == (503, "3 streams are open")
            await opened.aclose()
            while app.state.services.streams.open:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))


async def events_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The data of each event."""
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_client_that_takes_nothing_is_dropped(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard.api.streams, "SLOW_S", 0.5)

    async def run() -> None:
        job = Made("made")
        app = create_app(settings)
        streams = app.state.services.streams
        show(app, job)
        async with serving_app(settings, app) as client:
            port = client.base_url.port
            slow = socket.create_connection(("127.0.0.1", port))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            request = (
                "GET /api/v1/jobs/made/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Authorization: {client.headers['authorization']}\r\n\r\n"
            )
            slow.sendall(request.encode())
            reading = asyncio.create_task(read(client, 40))
            while streams.open < 2:
                await asyncio.sleep(0.01)
            for number in range(1, 41):
                job.take(step(number, size=400_000))
                await asyncio.sleep(0.02)
            assert (await reading)[1][-1] == 40
            for _ in range(100):
                if streams.open == 0:
                    break
                await asyncio.sleep(0.1)
            assert streams.open == 0
            slow.close()

    asyncio.run(asyncio.wait_for(run(), 60))
