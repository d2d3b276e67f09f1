"""A service in this process, over runs that were made up, and clients for it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import httpx
import synthetic_run
import uvicorn
from fastapi import FastAPI

from dashboard.app import create_app
from dashboard.jobs.frames import Frame
from dashboard.jobs.live_job import LiveJob, frame_of
from dashboard.service.access import Role, open_tokens
from dashboard.service.settings import ServiceSettings
from orchestrator.client.errors import NoSuchJob
from orchestrator.client.job_client import JobClient
from orchestrator.events.types import Record


def write_run(folder: Path, records: Sequence[Record]) -> Path:
    """A run's folder with this log."""
    return write_log(folder, log_of(records))


def write_log(folder: Path, log: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text(log)
    return folder


def log_of(records: Sequence[Record]) -> str:
    return "".join(record.to_json() + "\n" for record in records)


@cache
def made_logs() -> dict[str, str]:
    """Name of a run that was made up -> its log. Making them takes a quarter of a second."""
    return {"gpt": log_of(synthetic_run.records()), "frozen": log_of(synthetic_run.freezing_records())}


@cache
def frozen_frames() -> Sequence[tuple[Record, Frame]]:
    """The events of the run `frozen`, and what a stream sends of each."""
    records = synthetic_run.freezing_records()
    return [(record, frame_of(number, record)) for number, record in enumerate(records, 1)]


def made_runs(folder: Path) -> Path:
    """A folder of three past runs: `gpt`, `frozen`, and `half` without a log."""
    for name, log in made_logs().items():
        write_log(folder / name, log)
    (folder / "half").mkdir()
    (folder / "half" / "job.json").write_text("{}")
    return folder


def settings_in(folder: Path) -> ServiceSettings:
    """Settings of a service that shows made-up runs and keeps its files in `folder`."""
    return ServiceSettings(
        address=None,
        runs=(made_runs(folder / "runs"),),
        tokens=folder / "tokens.json",
        audit=folder / "audit.jsonl",
        roots=(folder,),
    )


def token(settings: ServiceSettings, role: Role = Role.CONTROL) -> str:
    """The token for `role`."""
    return open_tokens(settings.tokens)[role]


def client_of(app: FastAPI, bearer: str | None = None, host: str = "127.0.0.1") -> httpx.AsyncClient:
    """A client of `app` without a network."""
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8270", headers=headers)


def audited(settings: ServiceSettings) -> list[dict[str, object]]:
    """The lines of the audit log."""
    if not settings.audit.exists():
        return []
    return [json.loads(line) for line in settings.audit.read_text().splitlines()]


def live_job(name: str = "gpt") -> LiveJob:
    """A job as the service holds it, made up: it has just ended, so that no reader waits for more."""
    job = LiveJob(name, JobClient())
    job.gone = True
    for record, frame in frozen_frames():
        job.view.fold(record)
        job.frames.append(frame)
    job.ready.set()
    return job


class Made(LiveJob):
    """A live job that gets its events from the test, not from a controller."""

    def __init__(self, name: str) -> None:
        super().__init__(name, JobClient())
        self.ready.set()

    def take(self, record: Record) -> None:
        """Take one event. Call it on the service's event loop."""
        self.view.fold(record)
        self.frames.append(frame_of(self.frames.newest + 1, record))
        self._notify()

    def end(self) -> None:
        """The job is over. Call it on the service's event loop."""
        self.gone = True
        self._notify()


def show(app: FastAPI, job: LiveJob) -> None:
    """Have the service `app` show `job`, in place of those of a cluster, and look for no others."""
    live = app.state.services.live
    live.start = lambda: None

    async def find(name: str) -> LiveJob:
        if name != job.name:
            raise NoSuchJob(f"there is no job {name!r}")
        return job

    live.find = find
    live.jobs = lambda: [job]


@contextmanager
def served(settings: ServiceSettings) -> Iterator[str]:
    """A service on a free port; yields its address."""
    with listening(create_app(replace(settings, port=0))) as address:
        yield address


@contextmanager
def listening(app: FastAPI, port: int = 0) -> Iterator[str]:
    """`app` on `port` of this machine, 0: a free one; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def service_process(
    folder: Path, *options: str, patch: str = ""
) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """`freshet dashboard` of the runs in `folder`, as a process, and a client of it.

    Args:
        options: of the command.
        patch: statements that it runs first.
    """
    code = f"from orchestrator.cli.main import main\n{patch}\nmain()"
    given = ["--port", "0", "--runs", str(folder / "runs"), *options]
    given += ["--token-file", str(folder / "tokens.json"), "--audit-log", str(folder / "audit.jsonl")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "dashboard", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[1]
    bearer = {"Authorization": f"Bearer {open_tokens(folder / 'tokens.json')[Role.READ]}"}
    try:
        with httpx.Client(base_url=address, headers=bearer, trust_env=False, timeout=30) as client:
            yield client, process
    finally:
        process.kill()
        process.communicate()
