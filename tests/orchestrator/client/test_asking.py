"""A controller answers within a bounded time, and one that restarts does not count as gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from orchestrator.client import asking
from orchestrator.client.blocking import finish
from orchestrator.client.errors import NoController
from orchestrator.client.ray_calls import RayCalls
from workers.protocol.errors import JobError

HANGS = object()
UNAVAILABLE = ActorUnavailableError("it restarts", None)


class Controller:
    """Returns the given answers in order and repeats the last one."""

    def __init__(self, *answers: object) -> None:
        self._answers = [*answers]
        self.asked: list[tuple[object, ...]] = []
        self.status = self
        self.retries: int | None = None

    def options(self, *, max_task_retries: int) -> Controller:
        self.retries = max_task_retries
        return self

    async def remote(self, *arguments: object) -> object:
        self.asked.append(arguments)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is HANGS:
            await asyncio.sleep(60)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(job: str, controller: Any, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
    return finish(asking.ask(job, controller, method, *arguments, calls=RayCalls(), timeout_s=timeout_s))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace Ray's registry. The one item says whether the controller's name is still registered."""
    named = [True]
    monkeypatch.setattr(asking, "controller_of", lambda job: object() if named[0] else None)
    monkeypatch.setattr(asking, "RETRY_S", 0.001)
    return named


@pytest.mark.parametrize("restarting", [UNAVAILABLE, ActorDiedError()])
def test_a_controller_that_is_started_again_is_waited_for(restarting: Exception) -> None:
    controller = Controller(restarting, restarting, "well")
    assert ask("a", controller, "status", 7) == "well"
    assert controller.asked == [(7,)] * 3
    assert controller.retries == -1


def test_one_that_never_comes_back_is_waited_for_no_longer_than_said() -> None:
    with pytest.raises(
        JobError, match=r"'a' has not answered for 0\.05 s: .*`freshet reap a --force`"
    ) as told:
        ask("a", Controller(UNAVAILABLE), "status", timeout_s=0.05)
    assert not isinstance(told.value, NoController)


def test_one_that_hangs_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.05)
    with pytest.raises(JobError, match=r"'a' has not answered for 0\.05 s: .*`freshet reap a --force`"):
        ask("a", Controller(HANGS), "status")


def test_a_head_that_restarts_is_waited_for_as_long_as_the_answer() -> None:
    limits: list[float | None] = []

    class Calls(RayCalls):
        async def run(self, work: Any, *arguments: Any, limit_s: float | None = None) -> Any:
            limits.append(limit_s)
            return await super().run(work, *arguments, limit_s=limit_s)

    answers = Controller(ActorDiedError(), "well")
    assert finish(asking.ask("a", answers, "status", calls=Calls(limit_s=0.01), timeout_s=60.0)) == "well"
    assert [limit is not None and 50 < limit <= 60 for limit in limits] == [True]


def test_one_that_is_gone_is_gone(registered: list[bool]) -> None:
    registered[0] = False
    with pytest.raises(NoController, match="the controller of job 'a' is gone"):
        ask("a", Controller(ActorDiedError()), "status")


def test_what_it_refuses_is_told_as_it_says() -> None:
    refusal = RayTaskError("status", "a traceback", JobError("step 3 is past"))
    with pytest.raises(JobError, match=r"^step 3 is past$"):
        ask("a", Controller(refusal), "status")
