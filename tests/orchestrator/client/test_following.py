"""A driver follows a job using only the job client: to the end, past a silent controller, and on signals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import tiny

from orchestrator.client import following
from orchestrator.client.errors import ControllerSilent, NoController, NoSuchJob
from orchestrator.client.following import FollowedJob, JobResult
from orchestrator.client.interrupts import Interrupts
from orchestrator.events.log import EventLog
from orchestrator.events.page import Page
from orchestrator.events.types import Event, Failed, Finished, Record, Submitted, Warned
from orchestrator.spec.job_spec import Spec
from workers.checkpoint.left_behind import leave_reports
from workers.protocol.reports import CheckpointReport, Rescued

END = Finished(step=3, stopped=False, state_sha256=None)


def page(*told: Event, after: int = 0, over: bool = False) -> Page:
    records = tuple(Record(time_s=0.0, event=event) for event in told)
    return Page(records=records, missed=0, next=after + len(records), over=over)


class Client:
    """Returns the given pages in order, then nothing."""

    def __init__(self, *answers: Page | Exception) -> None:
        self._answers = [*answers]
        self.waiting = self
        self.done: list[str] = []

    async def page(self, job: str, after: int, wait_s: float) -> Page:
        if not self._answers:
            await asyncio.sleep(60)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def stop(self, job: str) -> None:
        self.done.append("stop")

    async def abort(self, job: str) -> None:
        self.done.append("abort")

    def reap(self, job: str, *, force: bool) -> str:
        self.done.append("reap" if force else "reap without force")
        raise NoSuchJob("nothing is left")

    def dismiss(self, job: str) -> None:
        self.done.append("dismiss")


class Whole:
    """A connection whose processes live."""

    def broken(self) -> bool:
        return False

    def headless(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.01)


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return tiny(tmp_path, "a", pipeline={"ranks": 1, "partition": [6]})


def follow(
    spec: Spec,
    client: Any,
    *,
    ours: bool = True,
    on_say: Callable[[Interrupts, str], None] = lambda interrupts, text: None,
    signals: int = 0,
) -> tuple[JobResult, list[Event], list[str]]:
    """Follow the job; returns (the run, the events that arrived, the messages)."""
    interrupts, seen, said = Interrupts(), list[Event](), list[str]()
    interrupts.count = signals
    connection: Any = Whole()

    def say(text: str) -> None:
        said.append(text)
        on_say(interrupts, text)

    driver = FollowedJob(client, spec, connection, interrupts=interrupts, ours=ours)
    return driver.run(lambda record: seen.append(record.event), say), seen, said


def test_events_come_once_and_in_order_to_the_end(spec: Spec) -> None:
    one, two = Warned(text="1"), Warned(text="2")
    client = Client(page(one), ControllerSilent("busy"), page(two, after=1), page(END, after=2, over=True))
    run, seen, _ = follow(spec, client)
    assert seen == [one, two, END]
    assert (run.end, run.interrupted, run.partition) == (END, False, (6,))
    assert client.done == ["dismiss"]


@pytest.mark.parametrize("logged", [2, 0])
def test_events_that_a_slow_driver_missed_come_from_the_log_or_are_counted(spec: Spec, logged: int) -> None:
    told = [Submitted(job="a", epoch=1, spec={}, resume=False), *(Warned(text=text) for text in "123")]
    log = EventLog(Path(spec.job.folder) / "events.jsonl")
    for event in told[: 1 + logged]:
        log.append(Record(time_s=0.0, event=event))
    last = Record(time_s=0.0, event=told[3])
    late = Page(records=(last,), missed=2, next=4, over=False)
    _, seen, said = follow(spec, Client(page(told[0]), late, page(END, after=4, over=True)))
    assert seen == [told[0], *told[1 : 1 + logged], told[3], END]
    lacking = "2 events came faster than this driver read them; the log has none of them here"
    assert said == ([] if logged else [lacking])


def test_signals_stop_the_job_and_then_end_it_at_once(spec: Spec) -> None:
    class Stopping(Client):
        async def stop(self, job: str) -> None:
            await super().stop(job)
            interrupts[0].count = 2

        async def abort(self, job: str) -> None:
            await super().abort(job)
            self._answers.append(page(END, over=True))

        async def page(self, job: str, after: int, wait_s: float) -> Page:
            while not self._answers:
                await asyncio.sleep(0.001)
            return await super().page(job, after, wait_s)

    interrupts: list[Interrupts] = []
    client = Stopping()
    run, _, said = follow(spec, client, signals=1, on_say=lambda each, text: interrupts.append(each))
    assert client.done == ["stop", "abort", "dismiss"]
    assert said[0].startswith("stopping after this step")
    assert said[1].startswith("ending at once")
    assert run.interrupted


def test_a_signal_only_ends_the_following_of_another_drivers_job(spec: Spec) -> None:
    client = Client()
    with pytest.raises(KeyboardInterrupt):
        follow(spec, client, ours=False, signals=1)
    assert client.done == []


def test_a_silent_controller_is_reported_and_a_second_signal_ends_the_job(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SILENCE_S", 0.1)
    client = Client()

    def twice(interrupts: Interrupts, text: str) -> None:
        interrupts.count = 2

    run, _, said = follow(spec, client, on_say=twice)
    assert "has not answered for 0.1 s: it hangs" in said[0]
    assert isinstance(run.end, Failed)
    assert run.end.reason.startswith("ended at once: its controller had not answered for ")
    assert run.interrupted
    assert client.done[-1] == "reap"


def test_the_end_of_a_controller_that_is_gone_is_in_the_log(spec: Spec) -> None:
    first, last = Submitted(job="a", epoch=1, spec={}, resume=False), Warned(text="last")
    log = EventLog(Path(spec.job.folder) / "events.jsonl")
    for event in (first, last, END):
        log.append(Record(time_s=0.0, event=event))
    client = Client(page(first), NoController("gone"))
    run, seen, _ = follow(spec, client)
    assert seen == [first, last, END]
    assert run.end == END
    assert client.done == []


def test_a_controller_that_is_gone_without_an_end_fails_the_job_and_leaves_nothing(spec: Spec) -> None:
    client = Client(NoSuchJob("no job 'a'"))
    run, _, _ = follow(spec, client)
    assert run.end == Failed(reason="the controller died: no job 'a'", user_error=False)
    assert client.done == ["reap"]


class Headless(Whole):
    """A connection whose cluster has lost its head, `own` or another one."""

    def __init__(self, address: str) -> None:
        self.address = address

    def broken(self) -> bool:
        return not self.address

    def headless(self) -> bool:
        return True


@pytest.mark.parametrize("address", ["10.0.0.1:6379", ""])
def test_a_lost_head_ends_in_words_with_what_ranks_had_left(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    folder = spec.job.folder
    log = EventLog(Path(folder) / "events.jsonl")
    first = CheckpointReport(step=4, path="c4", bytes=1, seconds=0.1)
    rescued = Rescued(step=4, lost_s=1.0, ends_s=61.0, seconds=0.1)
    told = [Submitted(job="a", epoch=1, spec={}, resume=False), first, rescued]
    for event in told:
        log.append(Record(time_s=0.0, event=event))
    second = replace(first, step=9, path="c9")
    leave_reports(folder, 0, [(2.0, first), (3.0, second)])
    monkeypatch.setattr(following, "QUIET_S", 0.0)
    monkeypatch.setattr(following, "AFTER_S", 0.0)
    monkeypatch.setattr(following, "patience_s", lambda: 0.0)
    said: list[str] = []
    seen: list[Event] = []
    connection: Any = Headless(address)
    client: Any = Client()
    driver = FollowedJob(client, spec, connection, interrupts=Interrupts(), ours=True)
    run = driver.run(lambda record: seen.append(record.event), said.append)
    assert seen == [*told, second]
    assert isinstance(run.end, Failed)
    assert run.end.reason.endswith(f": --resume goes on from the checkpoint of step 9, in {folder}")
    if address:
        assert run.end.reason.startswith(f"the head of the Ray cluster at {address} was lost")
        assert [f"the head of the Ray cluster at {address} does not answer" in text for text in said] == [
            True
        ]
    else:
        assert run.end.reason.startswith("Ray's processes on this machine were killed")


def test_a_head_that_is_lost_without_a_checkpoint_is_said_to_be(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RESCUE_S", 0.0)
    client: Any = Client()
    connection: Any = Headless("")
    driver = FollowedJob(client, spec, connection, interrupts=Interrupts(), ours=True)
    run = driver.run(lambda record: None, lambda text: None)
    assert isinstance(run.end, Failed)
    assert f"there is no checkpoint to go on from in {spec.job.folder}" in run.end.reason
