"""What a client makes of a controller's pages, answers and refusals."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from orchestrator.client import asking, job_client
from orchestrator.client.asking import NoSuchJob, Refused
from orchestrator.client.job_client import BlockingJobClient, Command, JobClient, Missed
from orchestrator.controller import actor
from orchestrator.controller.actor import page_of
from orchestrator.events.types import Answered, Record, Warned
from orchestrator.history.command_table import CommandIdReused
from workers.protocol import JobError


def record(number: int) -> Record:
    return Record(time_s=0.0, event=Warned(text=str(number)))


class Controller:
    """Answers what `answer` says to any method."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return Call(self, name)


class Call:
    def __init__(self, controller: Controller, name: str) -> None:
        self._controller = controller
        self._name = name

    def options(self, *, max_task_retries: int) -> Call:
        assert max_task_retries == -1
        return self

    def remote(self, *arguments: Any) -> Any:
        self._controller.asked.append((self._name, *arguments))
        return self._controller.answer(*arguments)


def controller(monkeypatch: pytest.MonkeyPatch, answer: Any) -> Controller:
    made = Controller(answer)

    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(asking, "controller_of", lambda job: made)
    return made


def refusal(error: JobError) -> RayTaskError:
    return RayTaskError("command", "a traceback", error)


def test_a_slow_reader_gets_the_number_of_events_that_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "PAGE_RECORDS", 3)
    kept = deque(map(record, range(10)), maxlen=5)
    controller(monkeypatch, lambda after, wait_s: page_of(kept, 10, after, over=True))
    expected = [Missed(3), *(record(number) for number in range(5, 10))]
    assert list(BlockingJobClient().events("a", after=2)) == expected
    assert list(BlockingJobClient().events("a", after=8)) == [record(8), record(9)]
    assert page_of(kept, 10, 10, over=True).records == ()
    # A controller without the log of the one before it has fewer events than its reader: it gets the end.
    assert page_of(kept, 10, 12, over=True).records == (record(9),)

    async def read() -> list[Record | Missed]:
        return [item async for item in JobClient().events("a", after=2)]

    assert asyncio.run(read()) == expected


def test_a_command_has_an_id_and_an_outcome_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answered(id="x", done=True, step=4, text="checkpoint of step 4")
    given = ["writes a checkpoint", None, answer]
    made = controller(monkeypatch, lambda *arguments: given.pop(0))
    client = BlockingJobClient()
    command = client.checkpoint("a", id="x")
    assert command == Command(job="a", id="x", text="writes a checkpoint")
    assert client.outcome(command) == answer
    assert made.asked[0] == ("command", "x", "checkpoint", {})
    assert [asked[:2] for asked in made.asked[1:]] == [("outcome", "x")] * 2


def test_ids_that_are_drawn_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    made = controller(monkeypatch, lambda *arguments: "well")
    BlockingJobClient().stop("a")
    BlockingJobClient().stop("a")
    assert len({id for _, id, *_ in made.asked}) == 2
    with pytest.raises(JobError, match="not empty"):
        BlockingJobClient().stop("a", id="")


def test_errors_are_types(monkeypatch: pytest.MonkeyPatch) -> None:
    client = BlockingJobClient()
    controller(monkeypatch, lambda *arguments: refusal(JobError("no rank 9")))
    with pytest.raises(Refused, match=r"^no rank 9$"):
        client.move("a", "1", 9)
    controller(monkeypatch, lambda *arguments: refusal(CommandIdReused("id 'x' was used")))
    with pytest.raises(CommandIdReused, match="id 'x' was used"):
        client.stop("a", id="x")
    controller(monkeypatch, lambda *arguments: Answered(id="x", done=False, step=1, text="the disk is full"))
    with pytest.raises(Refused, match="the disk is full"):
        client.outcome(Command(job="a", id="x", text=""))
    monkeypatch.setattr(asking, "controller_of", lambda job: None)
    monkeypatch.setattr(asking, "job_names", lambda: ["train"])
    with pytest.raises(NoSuchJob, match="no job 'trian' is running at auto; did you mean 'train'"):
        client.stop("trian")


def test_an_outcome_that_does_not_come_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    controller(monkeypatch, lambda *arguments: None)
    monkeypatch.setattr(job_client, "POLL_S", 0.01)
    with pytest.raises(TimeoutError, match="has not decided command 'x' in 0"):
        BlockingJobClient().outcome(Command(job="a", id="x", text=""), timeout_s=0.0)
