"""`JobClient`: the door to the jobs of a cluster. Where they are, their events, and every command, each with an id.

`BlockingJobClient` is the same for code without an event loop. The process is a driver of the cluster: see `joined`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from orchestrator.client.asking import Refused, ask, job_names, known_controller
from orchestrator.events.types import Answered, Record
from workers.protocol import JobError

if TYPE_CHECKING:
    from orchestrator.controller.actor import Page, Status

POLL_S = 5.0
"""How long the controller holds a question for news before it answers that there is none."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Missed:
    """Events that a reader asked for too late: the controller no longer keeps them. The log has them."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that a job's controller has accepted."""

    job: str
    id: str
    text: str
    """What will happen, in words."""


class BlockingJobClient:
    """The jobs of the cluster that this process is a driver of.

    Every method raises `NoSuchJob`, `NoController` or `ControllerSilent` where a job does not answer, and `Refused`
    where its controller says no. A command that is sent twice with one `id` is done once; the same id for another
    command raises `CommandIdReused`. Without `id` a fresh one is drawn.

    Args:
        address: of the cluster, for messages.
    """

    def __init__(self, address: str = "auto") -> None:
        self._address = address

    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs that have a controller."""
        return tuple(job_names())

    def view(self, job: str, *, timeout_s: float | None = None) -> Status:
        """Where the job stands."""
        return ask(job, self._controller(job), "status", timeout_s=timeout_s)

    def page(self, job: str, after: int, wait_s: float = 0.0) -> Page:
        """The events that follow the first `after`; waits up to `wait_s` for one."""
        return ask(job, self._controller(job), "read", after, wait_s)

    def events(self, job: str, *, after: int = 0) -> Iterator[Record | Missed]:
        """The events of the job that follow the first `after`, as they come, until it has ended. A reader that is
        slower than the controller forgets gets `Missed` in their place."""
        over = False
        while not over:
            page = self.page(job, after, POLL_S)
            yield from items_of(page)
            after, over = page.next, page.over

    def stop(self, job: str, *, id: str | None = None) -> Command:
        """Stop after the step in flight, with a checkpoint."""
        return self._send(job, "stop", {}, id)

    def abort(self, job: str, *, id: str | None = None) -> Command:
        """End at once, without a checkpoint."""
        return self._send(job, "abort", {}, id)

    def checkpoint(self, job: str, *, id: str | None = None) -> Command:
        """Write a checkpoint after the step in flight."""
        return self._send(job, "checkpoint", {}, id)

    def move(self, job: str, layers: str, rank: int, *, id: str | None = None) -> Command:
        """Move `layers`, such as `3` or `3-4`, to `rank`."""
        return self._send(job, "move", {"layers": layers, "rank": rank}, id)

    def fault(self, job: str, drill: Mapping[str, Any], *, id: str | None = None) -> Command:
        """Inject the fault `drill`, an `orchestrator.controller.faults.Drill` as JSON values."""
        return self._send(job, "fault", {"drill": dict(drill)}, id)

    def drain(self, job: str, node: str, deadline_s: float = 30.0, *, id: str | None = None) -> Command:
        """Have a node drained, as before a preemption; the job must allow faults."""
        return self.fault(job, {"node": node, "deadline_s": deadline_s}, id=id)

    def outcome(self, command: Command, *, timeout_s: float | None = None) -> Answered:
        """What came of `command`; waits for it.

        Raises:
            Refused: it was not done; says why.
            TimeoutError: it is not decided after `timeout_s`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = POLL_S if deadline_s is None else min(POLL_S, max(0.0, deadline_s - time.monotonic()))
            answer: Answered | None = ask(
                command.job, self._controller(command.job), "outcome", command.id, left_s
            )
            if answer is not None:
                if not answer.done:
                    raise Refused(answer.text)
                return answer
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"job {command.job!r} has not decided command {command.id!r} in {timeout_s:g} s"
                )

    def _controller(self, job: str) -> Any:
        return known_controller(job, self._address)

    def _send(self, job: str, name: str, arguments: dict[str, Any], id: str | None) -> Command:
        id = secrets.token_hex(8) if id is None else id
        if not id:
            raise JobError("a command id is a text that is not empty")
        # With one id it is safe to ask the next controller where one dies on it.
        text: str = ask(job, self._controller(job), "command", id, name, arguments)
        return Command(job=job, id=id, text=text)


class JobClient:
    """`BlockingJobClient` for an event loop: no call blocks it."""

    def __init__(self, address: str = "auto") -> None:
        self._blocking = BlockingJobClient(address)

    async def jobs(self) -> tuple[str, ...]:
        return await _off(self._blocking.jobs)

    async def view(self, job: str, *, timeout_s: float | None = None) -> Status:
        return await _off(self._blocking.view, job, timeout_s=timeout_s)

    async def events(self, job: str, *, after: int = 0) -> AsyncIterator[Record | Missed]:
        over = False
        while not over:
            page = await _off(self._blocking.page, job, after, POLL_S)
            for item in items_of(page):
                yield item
            after, over = page.next, page.over

    async def stop(self, job: str, *, id: str | None = None) -> Command:
        return await _off(self._blocking.stop, job, id=id)

    async def abort(self, job: str, *, id: str | None = None) -> Command:
        return await _off(self._blocking.abort, job, id=id)

    async def checkpoint(self, job: str, *, id: str | None = None) -> Command:
        return await _off(self._blocking.checkpoint, job, id=id)

    async def move(self, job: str, layers: str, rank: int, *, id: str | None = None) -> Command:
        return await _off(self._blocking.move, job, layers, rank, id=id)

    async def fault(self, job: str, drill: Mapping[str, Any], *, id: str | None = None) -> Command:
        return await _off(self._blocking.fault, job, drill, id=id)

    async def drain(self, job: str, node: str, deadline_s: float = 30.0, *, id: str | None = None) -> Command:
        return await _off(self._blocking.drain, job, node, deadline_s, id=id)

    async def outcome(self, command: Command, *, timeout_s: float | None = None) -> Answered:
        return await _off(self._blocking.outcome, command, timeout_s=timeout_s)


def items_of(page: Page) -> Iterator[Record | Missed]:
    """What a reader of `page` gets."""
    if page.missed:
        yield Missed(page.missed)
    yield from page.records


async def _off(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    return await asyncio.to_thread(call, *arguments, **options)
