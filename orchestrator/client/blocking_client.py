"""Clients for code without an event loop. They add nothing: `Jobs` and `JobClient` document each method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.job_summary import JobSummary
from orchestrator.client.blocking import finish
from orchestrator.client.job_client import JobClient
from orchestrator.client.jobs import POLL_S, Command, Jobs, Missed, items_of
from orchestrator.events.page import Page
from orchestrator.events.types import Answered, Record
from orchestrator.history.job_view import JobView
from orchestrator.history.proposal import Proposal
from planner.profile import Profile

if TYPE_CHECKING:
    from orchestrator.client.submit import SubmittedJob
    from orchestrator.spec.job_spec import Spec


class BlockingJobs:
    """The jobs that `client` reaches."""

    def __init__(self, client: Jobs) -> None:
        self._client = client

    def submit(
        self, spec: Spec, *, resume: bool = False, profile: Path | None = None, replay: Path | None = None
    ) -> SubmittedJob:
        return finish(self._client.submit(spec, resume=resume, profile=profile, replay=replay))

    def jobs(self) -> tuple[str, ...]:
        return finish(self._client.jobs())

    def summaries(self) -> tuple[JobSummary, ...]:
        return finish(self._client.summaries())

    def view(self, job: str, *, folder: str | None = None, timeout_s: float | None = None) -> JobView:
        return finish(self._client.view(job, folder=folder, timeout_s=timeout_s))

    def profile(self, job: str) -> Profile | None:
        return finish(self._client.profile(job))

    def page(self, job: str, after: int, wait_s: float = 0.0) -> Page:
        return finish(self._client.page(job, after, wait_s))

    def events(self, job: str, *, after: int = 0) -> Iterator[Record | Missed]:
        over = False
        while not over:
            page = self.page(job, after, POLL_S)
            yield from items_of(page)
            after, over = page.next, page.over

    def stop(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self._client.stop(job, id=id, by=by))

    def abort(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self._client.abort(job, id=id, by=by))

    def checkpoint(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self._client.checkpoint(job, id=id, by=by))

    def pause(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self._client.pause(job, id=id, by=by))

    def resume(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self._client.resume(job, id=id, by=by))

    def move(
        self,
        job: str,
        layers: str,
        rank: int,
        *,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        return finish(self._client.move(job, layers, rank, base=base, id=id, by=by))

    def fault(self, job: str, drill: Mapping[str, Any], *, id: str | None = None, by: str = "") -> Command:
        return finish(self._client.fault(job, drill, id=id, by=by))

    def drain(
        self,
        job: str,
        node: str,
        deadline_s: float = 30.0,
        *,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        return finish(self._client.drain(job, node, deadline_s, base=base, id=id, by=by))

    def undrain(self, job: str, node: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self._client.undrain(job, node, id=id, by=by))

    def scale(
        self,
        job: str,
        *,
        ranks: int | None = None,
        spares: int | None = None,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        return finish(self._client.scale(job, ranks=ranks, spares=spares, base=base, id=id, by=by))

    def freeze(
        self,
        job: str,
        *,
        method: str | None = None,
        r_max: float | None = None,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        return finish(self._client.freeze(job, method=method, r_max=r_max, base=base, id=id, by=by))

    def propose(self, job: str, partition: Sequence[int] | None = None) -> Proposal:
        return finish(self._client.propose(job, partition))

    def apply(
        self,
        job: str,
        partition: Sequence[int],
        *,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        return finish(self._client.apply(job, partition, base=base, id=id, by=by))

    def outcome(self, command: Command, *, timeout_s: float | None = None) -> Answered:
        return finish(self._client.outcome(command, timeout_s=timeout_s))


class BlockingJobClient(BlockingJobs):
    """The jobs of the cluster that this process is a driver of."""

    def __init__(self, address: str = "auto") -> None:
        self.waiting = JobClient(address)
        """The client that this one waits for."""
        super().__init__(self.waiting)

    def submit(
        self, spec: Spec, *, resume: bool = False, profile: Path | None = None, replay: Path | None = None
    ) -> SubmittedJob:
        from orchestrator.client.submit import submit

        # In this thread, so that an interrupt ends it and nothing keeps running.
        return submit(spec, resume=resume, profile=profile, replay=replay)

    def reap(self, job: str, *, force: bool = False) -> str:
        return finish(self.waiting.reap(job, force=force))

    def ranks(self) -> dict[str, int]:
        return finish(self.waiting.ranks())

    def dismiss(self, job: str) -> None:
        finish(self.waiting.dismiss(job))
