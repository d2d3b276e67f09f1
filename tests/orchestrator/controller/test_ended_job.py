"""A controller whose job has ended, or that cannot take its job over, and what it does meanwhile.

The controllers here have no Ray around them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from process_hosts import ElasticJob
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.cluster.actor_arguments import in_pieces
from orchestrator.controller import actor
from orchestrator.controller.actor import Controller
from orchestrator.events.log import read_log
from orchestrator.events.types import Commanded, Event, Failed, Finished, Record, Submitted
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import load_folder
from workers.protocol.errors import JobError

ENDS = (
    Finished(step=2, stopped=False, state_sha256=None),
    Failed(reason="no room", user_error=False),
)
ASKED = Commanded(id="early", name="stop", arguments={})


class Ended:
    """A job whose log has the given events, and controllers of it, which an event loop must run."""

    def __init__(self, folder: Path) -> None:
        made = resolved(tiny(folder, "ended"))
        self._job = ElasticJob(made)
        self._spec = made.spec.model_dump(mode="json")
        self.folder = JobFolder(self._job.setup.config.job.folder)

    def write(self, *told: Event) -> None:
        log = self.folder.open_log(1)
        first = Submitted(job=self._job.order.job, epoch=1, spec=self._spec, resume=False)
        for event in (first, *told):
            log.append(Record(time_s=0.0, event=event))
        log.close()

    def logged(self) -> list[Event]:
        return [record.event for record in read_log(self.folder.events_path)]

    def controller(self) -> Controller:
        return Controller(*in_pieces(self._job.order, self._job.setup, self._spec))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    context = SimpleNamespace(current_actor=None, was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actor, "reap", lambda job, ranks=None: None)
    return Ended(tmp_path)


@pytest.mark.parametrize("end", ENDS, ids=["finished", "failed"])
def test_once_the_log_has_the_end_no_command_follows_it(end: Event, job: Ended) -> None:
    """Its sinks have not closed yet."""
    job.write(ASKED, end)

    async def ask() -> None:
        controller = job.controller()
        await controller._load()
        controller._begun.set()
        for name in ("stop", "abort", "checkpoint"):
            with pytest.raises(JobError, match="has ended: it takes no commands"):
                await controller.command(name, name, {})
        assert [*controller._view.commands.entries] == ["early"]
        answer = await controller.outcome("early", 0.0)
        assert answer is not None

    asyncio.run(ask())


def test_reading_the_log_does_not_hold_up_the_event_loop(job: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks report and clients ask while a controller that takes over parses a long log."""
    job.write(ASKED)
    begun, released = threading.Event(), threading.Event()

    def stuck(folder: JobFolder) -> Any:
        begun.set()
        assert released.wait(10), "the event loop does not run while the log is read"
        return load_folder(folder)

    monkeypatch.setattr(actor, "load_folder", stuck)

    async def take_over() -> None:
        controller = job.controller()
        loading = asyncio.ensure_future(controller._load())
        while not begun.is_set():
            await asyncio.sleep(0)
        assert await controller.view()
        released.set()
        await loading
        assert controller._view.events == 2

    asyncio.run(take_over())


@pytest.mark.parametrize("held", [False, True])
def test_a_takeover_that_fails_is_the_end_of_its_own_log_and_not_of_another_run_s(
    job: Ended, held: bool
) -> None:
    job.write(ASKED)
    before = job.logged()
    lock: Callable[[], Any] = job.folder.lock if held else lambda: None
    other = lock()

    async def give_up() -> None:
        controller = job.controller()
        await controller._fail("it cannot be taken over")
        page = await controller.read(0, 0.0)
        assert page.over
        assert [record.event for record in page.records] == [end]

    end = Failed(reason="it cannot be taken over", user_error=True)
    asyncio.run(give_up())
    assert job.logged() == [*before, *([] if held else [end])]
    if held:
        other.close()
