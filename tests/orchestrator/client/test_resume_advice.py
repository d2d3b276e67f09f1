"""A driver or a reader that cannot know whether a lost job has a checkpoint does not promise one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Never

import pytest
from tiny_jobs import tiny

from orchestrator.client import following
from orchestrator.client.errors import NoSuchJob
from orchestrator.client.following import FollowedJob
from orchestrator.client.interrupts import Interrupts
from orchestrator.events.log import EventLog
from orchestrator.events.types import Failed, Record, Submitted
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import view_without_controller

ADVICE = "--resume goes on from its newest checkpoint, if any"


class Silent:
    """The client of a controller that never answers."""

    def __init__(self) -> None:
        self.waiting = self

    async def page(self, job: str, after: int, wait_s: float) -> None:
        await asyncio.sleep(60)

    async def abort(self, job: str) -> None:
        pass

    def reap(self, job: str, *, force: bool) -> Never:
        raise NoSuchJob("nothing is left")


class Whole:
    """A connection whose processes live."""

    def broken(self) -> bool:
        return False

    def headless(self) -> bool:
        return False


def test_a_driver_that_gives_up_on_a_silent_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.01)
    monkeypatch.setattr(following, "SILENCE_S", 0.1)
    interrupts = Interrupts()
    interrupts.count = 2
    client: Any = Silent()
    connection: Any = Whole()
    spec = tiny(tmp_path, "a", pipeline={"ranks": 1, "partition": [6]})
    end = FollowedJob(client, spec, connection, interrupts=interrupts, ours=True).run(print, print).end
    assert isinstance(end, Failed)
    assert end.reason.startswith("ended at once: its controller had not answered for ")
    assert end.reason.endswith(f" s; {ADVICE}")


def test_a_folder_whose_job_has_no_controller(tmp_path: Path) -> None:
    started = Submitted(job="a", epoch=1, spec={}, resume=False)
    EventLog(tmp_path / "events.jsonl").append(Record(time_s=0.0, event=started))
    trouble = view_without_controller(JobFolder(str(tmp_path))).trouble
    assert trouble == f"it has no controller: it was lost, and {ADVICE}"
