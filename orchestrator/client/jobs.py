"""`Jobs`: what a client can do with jobs, whichever way it reaches them.

Not here: The two ways. `JobClient` is a driver of the cluster, `RestJobClient` sends requests to a Freshet service;
`orchestrator.client.opening` chooses one.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from orchestrator.client.errors import Refused
from orchestrator.commands.command import JobCommand
from orchestrator.commands.table import Steering
from orchestrator.events.page import Page
from orchestrator.events.types import Answered, Record
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from orchestrator.analysis.job_summary import JobSummary
    from orchestrator.client.submit import SubmittedJob
    from orchestrator.history.job_view import JobView
    from orchestrator.history.proposal import Proposal
    from orchestrator.spec.job_spec import Spec
    from planner.profile import Profile

POLL_S = 5.0
"""Time a request for news is held before the answer is that there is none."""


@dataclass(frozen=True)
class Missed:
    """Events that a reader requested too late: they are no longer kept. The log has them."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that a job's controller has accepted."""

    job: str
    id: str
    text: str
    """The command's effect, in words."""


def items_of(page: Page) -> Iterator[Record | Missed]:
    """The items that a reader of `page` gets."""
    if page.missed:
        yield Missed(page.missed)
    yield from page.records


def command_id(id: str | None) -> str:
    """`id`, or a random one.

    Raises:
        JobError: it is empty.
    """
    id = secrets.token_hex(8) if id is None else id
    if not id:
        raise JobError("a command id is a text that is not empty")
    return id


class Jobs(Steering, ABC):
    """The jobs at an address.

    Every method that names a job raises `NoSuchJob`, `NoController` or `ControllerSilent` if the job does not answer,
    and `Refused` if its controller refuses. A command whose id was used for another one raises `CommandIdReused`, and
    one for a plan that is not the newest one any more `PlanChanged`.
    """

    @abstractmethod
    async def submit(
        self, spec: Spec, *, resume: bool = False, profile: Path | None = None, replay: Path | None = None
    ) -> SubmittedJob:
        """Check, measure, plan and start a job; returns once its controller has accepted it, and does not follow it.

        Args:
            resume: continue from the newest checkpoint in the job's folder.
            profile: plan with this file instead of measuring. Not over REST.
            replay: freeze as this event log says, without new decisions. Not over REST.

        Raises:
            JobError: something that the user can fix.
        """

    @abstractmethod
    async def jobs(self) -> tuple[str, ...]:
        """Names of the jobs that can be asked; over REST also of jobs that ended a while ago."""

    @abstractmethod
    async def summaries(self) -> tuple[JobSummary, ...]:
        """All jobs in a few numbers, by name. A job whose controller does not answer is `silent`, and one whose ranks
        have none `abandoned`."""

    @abstractmethod
    async def view(self, job: str, *, folder: str | None = None, timeout_s: float | None = None) -> JobView:
        """The job's state and history.

        Args:
            folder: the job's folder, from which a job without a controller is read, as it ended or was lost.
            timeout_s: limit for the answer; None: 90 s.
        """

    @abstractmethod
    async def profile(self, job: str) -> Profile | None:
        """Measured profile of the job's layers and links; None if nothing was measured, or the file is not visible."""

    @abstractmethod
    async def page(self, job: str, after: int, wait_s: float = 0.0) -> Page:
        """The events after the first `after` of the job's newest start; waits up to `wait_s` for one."""

    async def events(self, job: str, *, after: int = 0) -> AsyncIterator[Record | Missed]:
        """The events of the job after the first `after`, as they arrive, until it has ended. A reader that is too slow
        gets `Missed` for the events that are no longer kept."""
        over = read = False
        while not over:
            page = await self.page(job, after, POLL_S)
            for item in items_of(page):
                yield item
            # A newer start numbers its events from 1.
            again = read and page.next < after and not page.records
            after, over, read = 0 if again else page.next, page.over and not again, True

    @abstractmethod
    async def send(self, job: str, command: JobCommand) -> Command:
        """Send a command; returns once the job's controller has accepted it. `Steering` has a method for each."""

    @abstractmethod
    async def propose(self, job: str, partition: Sequence[int] | None = None) -> Proposal:
        """Expected effect of another partition, validated and simulated. Nothing changes.

        Args:
            partition: layers per stage; None: the planner's own best for the same ranks and schedule.
        """

    async def outcome(self, command: Command, *, timeout_s: float | None = None) -> Answered:
        """Wait for the answer to `command`.

        Raises:
            Refused: it was not done; says why.
            TimeoutError: it is not decided after `timeout_s`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            hold_s = self._hold_s if deadline_s is None else deadline_s - time.monotonic()
            answer = await self._outcome(command, min(self._hold_s, max(0.0, hold_s)))
            if answer is not None and not answer.done:
                raise Refused(answer.text)
            if answer is not None:
                return answer
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"job {command.job!r} has not decided command {command.id!r} in {timeout_s:g} s"
                )

    _hold_s: ClassVar[float] = POLL_S
    """Longest wait of one call of `_outcome`."""

    @abstractmethod
    async def _outcome(self, command: Command, wait_s: float) -> Answered | None:
        """The answer to `command`; None if it is not decided after `wait_s`."""
