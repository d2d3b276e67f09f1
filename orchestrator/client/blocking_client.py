"""`BlockingJobClient`: `JobClient` for code without an event loop. It adds nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.client.blocking import finish
from orchestrator.client.job_client import POLL_S, Command, JobClient, Missed, items_of
from orchestrator.events.types import Answered, Record
from orchestrator.history.job_view import JobView
from orchestrator.history.proposal import Proposal

if TYPE_CHECKING:
    from orchestrator.client.submit import SubmittedJob
    from orchestrator.controller.actor import Page
    from orchestrator.spec.job_spec import Spec


class BlockingJobClient:
    """The jobs of the cluster that this process is a driver of. `JobClient` documents each method."""

    def __init__(self, address: str = "auto") -> None:
        self.waiting = JobClient(address)
        """The client that this one waits for."""

    def submit(
        self, spec: Spec, *, resume: bool = False, profile: Path | None = None, replay: Path | None = None
    ) -> SubmittedJob:
        from orchestrator.client.submit import submit

        # In this thread, so that an interrupt ends it and nothing keeps running.
        return submit(spec, resume=resume, profile=profile, replay=replay)

    def jobs(self) -> tuple[str, ...]:
        return finish(self.waiting.jobs())

    def view(self, job: str, *, folder: str | None = None, timeout_s: float | None = None) -> JobView:
        return finish(self.waiting.view(job, folder=folder, timeout_s=timeout_s))

    def page(self, job: str, after: int, wait_s: float = 0.0) -> Page:
        return finish(self.waiting.page(job, after, wait_s))

    def events(self, job: str, *, after: int = 0) -> Iterator[Record | Missed]:
        over = False
        while not over:
            page = self.page(job, after, POLL_S)
            yield from items_of(page)
            after, over = page.next, page.over

    def stop(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self.waiting.stop(job, id=id, by=by))

    def abort(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self.waiting.abort(job, id=id, by=by))

    def checkpoint(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self.waiting.checkpoint(job, id=id, by=by))

    def pause(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self.waiting.pause(job, id=id, by=by))

    def resume(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        return finish(self.waiting.resume(job, id=id, by=by))

    def move(self, job: str, layers: str, rank: int, *, id: str | None = None, by: str = "") -> Command:
        return finish(self.waiting.move(job, layers, rank, id=id, by=by))

    def freeze(
        self,
        job: str,
        *,
        method: str | None = None,
        r_max: float | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        return finish(self.waiting.freeze(job, method=method, r_max=r_max, id=id, by=by))

    def fault(self, job: str, drill: Mapping[str, Any], *, id: str | None = None, by: str = "") -> Command:
        return finish(self.waiting.fault(job, drill, id=id, by=by))

    def drain(
        self, job: str, node: str, deadline_s: float = 30.0, *, id: str | None = None, by: str = ""
    ) -> Command:
        return finish(self.waiting.drain(job, node, deadline_s, id=id, by=by))

    def scale(
        self,
        job: str,
        *,
        ranks: int | None = None,
        spares: int | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        return finish(self.waiting.scale(job, ranks=ranks, spares=spares, id=id, by=by))

    def propose(self, job: str, partition: Sequence[int] | None = None) -> Proposal:
        return finish(self.waiting.propose(job, partition))

    def apply(
        self,
        job: str,
        partition: Sequence[int],
        *,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        return finish(self.waiting.apply(job, partition, base=base, id=id, by=by))

    def outcome(self, command: Command, *, timeout_s: float | None = None) -> Answered:
        return finish(self.waiting.outcome(command, timeout_s=timeout_s))

    def reap(self, job: str, *, force: bool = False) -> str:
        return finish(self.waiting.reap(job, force=force))

    def ranks(self) -> dict[str, int]:
        return finish(self.waiting.ranks())

    def dismiss(self, job: str) -> None:
        finish(self.waiting.dismiss(job))
