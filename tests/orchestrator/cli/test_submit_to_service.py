"""`freshet submit --follow` to a service: shows the job's events over REST to its end, and exits with its code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import freshet_here
from fastapi import FastAPI
from serving import Made, listening, settings_in, show
from synthetic_run import records
from tiny_jobs import write_spec

from dashboard.app import create_app
from dashboard.jobs.submission import Submissions
from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED, USER_ERROR
from orchestrator.client.access_token import TOKEN, TOKEN_FILE
from orchestrator.events.types import Event, Failed, Finished, Record
from workers.protocol.reports import StepReport

RUN = [record for record in records(steps=20) if not isinstance(record.event, Finished)]


class Accepting(Submissions):
    """Accepts a job at once: half of its events are there, and the others come while it is followed.

    Until then, the service shows another one.
    """

    def __init__(self, app: FastAPI, job: Made, log: Sequence[Record]) -> None:
        super().__init__("10.0.0.1:6379")
        self._app, self._job, self._log = app, job, log
        show(app, Made("other"))

    async def _start(self, file: Path, resume: bool) -> str:
        show(self._app, self._job)
        for record in self._log[:15]:
            self._job.take(record)
        asyncio.get_running_loop().call_later(0.2, self._end)
        return ""

    def _end(self) -> None:
        for record in self._log[15:]:
            self._job.take(record)
        self._job.end()


@contextmanager
def service(folder: Path, end: Event) -> Iterator[str]:
    """A service whose cluster accepts the job `gpt`, which ends with `end`; yields its address."""
    settings = replace(settings_in(folder / "service"), trust_specs=True)
    app, job = create_app(settings), Made("gpt")
    log = [*RUN, Record(time_s=RUN[-1].time_s + 1, event=end)]
    app.state.services = replace(app.state.services, submissions=Accepting(app, job, log))
    with listening(app) as address:
        yield address


@pytest.fixture(autouse=True)
def _token_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "service" / "tokens.json"))


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (Finished(step=20, stopped=False, state_sha256="0" * 64), DONE),
        (Finished(step=20, stopped=True, state_sha256="0" * 64), DONE),
        (Failed(reason="the disk is full", user_error=True), USER_ERROR),
        (Failed(reason="too many failures", user_error=False), FAILED),
    ],
    ids=["done", "stopped", "user-error", "failed"],
)
def test_a_followed_job_is_shown_to_its_end_and_gives_its_exit_code(
    end: Finished | Failed, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(tmp_path, end) as address:
        spec = write_spec(tmp_path, "gpt")
        assert freshet_here("submit", str(spec), "--address", address, "--follow") == code
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert f"stop, with a checkpoint: freshet cancel gpt --address {address}" in lines
    first = next(number for number, line in enumerate(lines) if line.startswith("     1  "))
    numbers = [int(line.split()[0]) for line in lines[first:]]
    assert numbers == [*range(1, len(RUN) + 2)], "every event once, those that came later too"
    assert "the disk is full" in told.err if code == USER_ERROR else not told.err


def test_ctrl_c_ends_only_the_following(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(number: int, record: Record) -> str:
        if isinstance(record.event, StepReport):
            raise KeyboardInterrupt
        return str(number)

    monkeypatch.setattr("orchestrator.cli.job_events.event_line", interrupted)
    with service(tmp_path, Failed(reason="never seen", user_error=False)) as address:
        spec = write_spec(tmp_path, "gpt")
        assert freshet_here("submit", str(spec), "--address", address, "--follow") == INTERRUPTED
    told = capsys.readouterr().err
    assert "no longer following gpt, which goes on" in told
    assert f"freshet events --follow gpt --address {address}" in told


def test_without_follow_the_command_that_follows_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(tmp_path, Failed(reason="never seen", user_error=False)) as address:
        spec = write_spec(tmp_path, "gpt")
        assert freshet_here("submit", str(spec), "--address", address) == DONE
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"follow: freshet events --follow gpt --address {address}"


def test_a_service_takes_no_folder_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(tmp_path, Failed(reason="never seen", user_error=False)) as address:
        spec = write_spec(tmp_path, "gpt")
        words = ("submit", str(spec), "--address", address, "--working-dir", str(tmp_path))
        assert freshet_here(*words) == USER_ERROR
    assert f"--working-dir {tmp_path}: a service takes no folder" in capsys.readouterr().err
