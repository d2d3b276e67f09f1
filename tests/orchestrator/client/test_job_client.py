"""How a client handles a controller's pages, answers and refusals."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from synthetic_run import records

from orchestrator.cli import steering
from orchestrator.client import asking, job_client
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.errors import NoSuchJob, Refused
from orchestrator.client.job_client import JobClient
from orchestrator.client.jobs import Command, Missed
from orchestrator.cluster.actor_names import JobActors
from orchestrator.cluster.connection import Connection
from orchestrator.commands.pause import Pause
from orchestrator.commands.resume import Resume
from orchestrator.events import page
from orchestrator.events.log import EventLog
from orchestrator.events.page import page_of
from orchestrator.events.types import Answered, Finished, Record, Warned
from orchestrator.history.command_table import CommandIdReused
from orchestrator.history.job_view import fold
from orchestrator.history.proposal import PlanChanged
from workers.protocol.errors import JobError

RUN = records(steps=20)


def record(number: int) -> Record:
    return Record(time_s=0.0, event=Warned(text=str(number)))


class Controller:
    """Answers every method with `answer`."""

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

    async def remote(self, *arguments: Any) -> Any:
        self._controller.asked.append((self._name, *arguments))
        answer = self._controller.answer(*arguments)
        if isinstance(answer, Exception):
            raise answer
        return await answer if asyncio.iscoroutine(answer) else answer


def controller(monkeypatch: pytest.MonkeyPatch, answer: Any) -> Controller:
    made = Controller(answer)
    monkeypatch.setattr(asking, "controller_of", lambda job: made)
    monkeypatch.setattr(job_client, "controller_of", lambda job: made)
    return made


def refusal(error: JobError) -> RayTaskError:
    return RayTaskError("command", "a traceback", error)


def test_a_slow_reader_gets_the_number_of_events_that_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE_RECORDS", 3)
    kept = deque(map(record, range(10)), maxlen=5)
    controller(monkeypatch, lambda after, wait_s: page_of(kept, 10, after, over=True))
    expected = [Missed(3), *(record(number) for number in range(5, 10))]
    assert list(BlockingJobClient().events("a", after=2)) == expected
    assert list(BlockingJobClient().events("a", after=8)) == [record(8), record(9)]
    assert page_of(kept, 10, 10, over=True).records == ()
    # A controller without its predecessor's log has fewer events than the reader, which then gets the last
    # ones.
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
    assert made.asked[0] == ("command", "x", "checkpoint", {}, "")
    assert [asked[:2] for asked in made.asked[1:]] == [("outcome", "x")] * 2


def test_a_pause_is_waited_for_and_a_resume_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = Answered(id="x", done=True, step=4, text="paused at step 4")
    given = ["pauses", paused, "goes on from step 4"]
    made = controller(monkeypatch, lambda *arguments: given.pop(0))
    monkeypatch.setattr(asking, "joined", lambda address: nullcontext(Connection(set(), address)))
    assert steering.steer("auto", "a", Pause(), wait=Pause.waits) == "paused at step 4"
    assert steering.steer("auto", "a", Resume(), wait=Resume.waits) == "goes on from step 4"
    assert [asked[2] for asked in made.asked if asked[0] == "command"] == ["pause", "resume"]


def test_ids_that_are_drawn_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    made = controller(monkeypatch, lambda *arguments: "well")
    BlockingJobClient().stop("a")
    BlockingJobClient().stop("a")
    assert len({id for _, id, *_ in made.asked}) == 2
    with pytest.raises(JobError, match="not empty"):
        BlockingJobClient().stop("a", id="")


def test_every_command_says_who_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, client = controller(monkeypatch, lambda *arguments: "well"), BlockingJobClient()
    who = {"by": "control from 127.0.0.1", "id": "x"}
    for name in ("stop", "abort", "checkpoint", "pause", "resume"):
        getattr(client, name)("a", **who)
    client.move("a", "3", 1, **who)
    client.fault("a", {}, **who)
    client.drain("a", "node1", 5.0, **who)
    client.undrain("a", "node1", **who)
    client.scale("a", spares=1, **who)
    client.apply("a", (1, 2), base=(1, 4), **who)
    assert {(id, by) for _, id, _, _, by in made.asked} == {("x", "control from 127.0.0.1")}
    assert [(name, arguments) for _, _, name, arguments, _ in made.asked[5:]] == [
        ("move", {"layers": "3", "rank": 1}),
        ("fault", {"drill": {}}),
        ("drain", {"node": "node1", "deadline_s": 5.0}),
        ("undrain", {"node": "node1"}),
        ("scale", {"ranks": None, "pipelines": None, "spares": 1}),
        ("plan", {"partition": [1, 2], "base": [1, 4]}),
    ]


def test_a_plan_that_has_changed_is_an_error_with_the_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    error = pickle.loads(pickle.dumps(PlanChanged("look at plan 2.7", 2, 7)))
    controller(monkeypatch, lambda *arguments: refusal(error))
    with pytest.raises(PlanChanged, match=r"^look at plan 2\.7$") as changed:
        BlockingJobClient().apply("a", (1, 2), base=(2, 6))
    assert (changed.value.epoch, changed.value.version) == (2, 7)


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
    monkeypatch.setattr(JobClient, "_hold_s", 0.01)
    with pytest.raises(TimeoutError, match="has not decided command 'x' in 0"):
        BlockingJobClient().outcome(Command(job="a", id="x", text=""), timeout_s=0.0)


def test_a_view_is_the_controllers_or_that_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    view = fold(RUN)
    controller(monkeypatch, lambda: view.to_json())
    assert BlockingJobClient().view("a") == view
    monkeypatch.setattr(asking, "controller_of", lambda job: None)
    monkeypatch.setattr(asking, "job_names", lambda: [])
    with pytest.raises(NoSuchJob, match="running: none"):
        BlockingJobClient().view("a")
    with pytest.raises(JobError, match="holds no event log: name a job's output folder"):
        BlockingJobClient().view("a", folder=str(tmp_path))
    log = EventLog(tmp_path / "events.jsonl")
    for each in RUN[:-1]:
        log.append(each)
    lost = BlockingJobClient().view("a", folder=str(tmp_path))
    assert (lost.step, lost.outcome) == (view.step, None)
    assert lost.trouble.startswith("it has no controller: it was lost, and --resume")
    assert isinstance(RUN[-1].event, Finished)
    log.append(RUN[-1])
    assert BlockingJobClient().view("a", folder=str(tmp_path)) == view


def test_a_job_at_work_is_not_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    made = controller(monkeypatch, lambda: fold(RUN[:-1]).to_json())
    monkeypatch.setattr(job_client, "living_jobs", lambda: {"a": JobActors(True, frozenset({0, 1}))})
    cleared: list[Any] = []
    monkeypatch.setattr(job_client, "_clear", lambda job, controller: cleared.append((job, controller)))
    with pytest.raises(
        Refused, match=r"job 'a' is training, at step .*: end it with freshet cancel a, or kill it"
    ):
        BlockingJobClient().reap("a")
    assert cleared == []
    made.answer = lambda: fold(RUN).to_json()
    assert BlockingJobClient().reap("a").startswith("a: 2 ranks and its controller cleared away")
    assert cleared == [("a", made)]


def test_a_question_does_not_hold_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readers wait for one controller at the same time; a third call lets both continue."""

    class Gated(Controller):
        open = asyncio.Event()

        async def wait(self) -> str:
            await self.open.wait()
            return "well"

    made = Gated(None)
    made.answer = lambda *arguments: made.wait()
    monkeypatch.setattr(asking, "controller_of", lambda job: made)
    monkeypatch.setattr(job_client, "controller_of", lambda job: made)

    async def ask_twice() -> list[Command]:
        asked = [asyncio.ensure_future(JobClient().stop("a", id=id)) for id in ("x", "y")]
        while len(made.asked) < 2:
            await asyncio.sleep(0.001)
        made.open.set()
        return await asyncio.gather(*asked)

    assert [command.id for command in asyncio.run(ask_twice())] == ["x", "y"]
