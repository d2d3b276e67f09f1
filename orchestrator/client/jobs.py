"""`Jobs`: what a client can do with jobs, whichever way it reaches them.

Not here: The two ways. `JobClient` is a driver of the cluster, `RestJobClient` sends requests to a Freshet service;
`orchestrator.client.opening` chooses one.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from orchestrator.client.errors import Refused
from orchestrator.events.page import Page
from orchestrator.events.types import Answered, Record
from workers.protocol import JobError

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


class Jobs(ABC):
    """The jobs at an address.

    Every method that names a job raises `NoSuchJob`, `NoController` or `ControllerSilent` if the job does not answer,
    and `Refused` if its controller refuses. A command that is sent twice with one `id` is done once; the same id for
    another command raises `CommandIdReused`. Without `id` a random one is used. `by` says who sends it, for the log;
    over REST the service logs the token's role and the sender's network address instead. `base` is the (epoch, version)
    of the plan that the sender decided on: `PlanChanged` is raised if the job has a newer one; None: whichever is the
    newest.
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

    async def stop(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """Stop after the step in flight, with a checkpoint."""
        return await self._send(job, "stop", {}, id, by)

    async def abort(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """End at once, without a checkpoint."""
        return await self._send(job, "abort", {}, id, by)

    async def checkpoint(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """Write a checkpoint after the step in flight."""
        return await self._send(job, "checkpoint", {}, id, by)

    async def pause(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """Pause after the step in flight, with a checkpoint, and release the ranks."""
        return await self._send(job, "pause", {}, id, by)

    async def resume(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """Resume a paused job from its checkpoint, once there is room for its ranks."""
        return await self._send(job, "resume", {}, id, by)

    async def move(
        self,
        job: str,
        layers: str,
        rank: int,
        *,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        """Move `layers`, such as `3` or `3-4`, to `rank`."""
        return await self._send(job, "move", {"layers": layers, "rank": rank, **_with(base)}, id, by)

    async def fault(
        self, job: str, drill: Mapping[str, Any], *, id: str | None = None, by: str = ""
    ) -> Command:
        """Inject the fault `drill`, a `workers.fault_injection.drill.Drill` as JSON values."""
        return await self._send(job, "fault", {"drill": dict(drill)}, id, by)

    async def drain(
        self,
        job: str,
        node: str,
        deadline_s: float = 30.0,
        *,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        """Have the job leave a node within `deadline_s` seconds: its ranks there hand their layers over, and it starts
        none there until `undrain`. Other jobs stay.

        Args:
            node: a node's id, the beginning of one, or its host.
        """
        arguments = {"node": node, "deadline_s": deadline_s, **_with(base)}
        return await self._send(job, "drain", arguments, id, by)

    async def undrain(self, job: str, node: str, *, id: str | None = None, by: str = "") -> Command:
        """Have the job use a node again that it was asked to leave.

        Args:
            node: as for `drain`.
        """
        return await self._send(job, "undrain", {"node": node}, id, by)

    async def scale(
        self,
        job: str,
        *,
        ranks: int | None = None,
        spares: int | None = None,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        """Give the job another number of ranks from now on: it shrinks at a commit, and grows once the ranks are up.

        Args:
            ranks: of one replica's pipeline, as `pipeline.ranks`; None: as many as before.
            spares: as `elastic.spares`; None: as many as before.
        """
        return await self._send(job, "scale", {"ranks": ranks, "spares": spares, **_with(base)}, id, by)

    async def freeze(
        self,
        job: str,
        *,
        method: str | None = None,
        r_max: float | None = None,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        """Change what the job freezes, from the same step on all ranks. With no monitored times of its plan, the job
        monitors first.

        Args:
            method: a `freeze.method`, `none` to freeze nothing; None: as it is.
            r_max: the largest mean freeze ratio of a stage; None: as it is.
        """
        return await self._send(job, "freeze", {"method": method, "r_max": r_max, **_with(base)}, id, by)

    @abstractmethod
    async def propose(self, job: str, partition: Sequence[int] | None = None) -> Proposal:
        """Expected effect of another partition, validated and simulated. Nothing changes.

        Args:
            partition: layers per stage; None: the planner's own best for the same ranks and schedule.
        """

    async def apply(
        self,
        job: str,
        partition: Sequence[int],
        *,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        """Have the training ranks take up `partition`, as `elastic.migration` says.

        Args:
            base: of the plan that it is to replace.
        """
        arguments = {"partition": list(partition), "base": None if base is None else list(base)}
        return await self._send(job, "plan", arguments, id, by)

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

    @abstractmethod
    async def _send(self, job: str, name: str, arguments: dict[str, Any], id: str | None, by: str) -> Command:
        """Send the command `name` of the controller, with its arguments as JSON values."""


def _with(base: tuple[int, int] | None) -> dict[str, Any]:
    """The argument of a command that names the plan which it is for."""
    return {} if base is None else {"base": list(base)}
