"""Clients for code without an event loop. They add nothing: `Jobs` and `JobClient` document each method."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from orchestrator.client.blocking import finish
from orchestrator.client.job_client import JobClient
from orchestrator.client.jobs import POLL_S, Jobs, Missed, items_of
from orchestrator.commands.table import Steering
from orchestrator.events.types import Record

if TYPE_CHECKING:
    from orchestrator.client.submit import SubmittedJob
    from orchestrator.spec.job_spec import Spec

P = ParamSpec("P")
T = TypeVar("T")


def waited(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingJobs, P], T]:
    """The method of a blocking client that waits for `method` of its own client."""

    @wraps(method)
    def wait(self: BlockingJobs, *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(getattr(self.waiting, method.__name__)(*args, **kwargs))

    return wait


class BlockingJobs(Steering):
    """The jobs that `client` reaches.

    Args:
        client: the client that this one waits for.
    """

    def __init__(self, client: Jobs) -> None:
        self.waiting = client

    submit = waited(Jobs.submit)
    jobs = waited(Jobs.jobs)
    summaries = waited(Jobs.summaries)
    view = waited(Jobs.view)
    profile = waited(Jobs.profile)
    page = waited(Jobs.page)
    send = waited(Jobs.send)
    propose = waited(Jobs.propose)
    outcome = waited(Jobs.outcome)

    def events(self, job: str, *, after: int = 0) -> Iterator[Record | Missed]:
        over = False
        while not over:
            page = self.page(job, after, POLL_S)
            yield from items_of(page)
            after, over = page.next, page.over


class BlockingJobClient(BlockingJobs):
    """The jobs of the cluster that this process is a driver of."""

    def __init__(self, address: str = "auto") -> None:
        super().__init__(JobClient(address))

    def submit(
        self, spec: Spec, *, resume: bool = False, profile: Path | None = None, replay: Path | None = None
    ) -> SubmittedJob:
        from orchestrator.client.submit import submit

        # In this thread, so that an interrupt ends it and nothing keeps running.
        return submit(spec, resume=resume, profile=profile, replay=replay)

    reap = waited(JobClient.reap)
    ranks = waited(JobClient.ranks)
    dismiss = waited(JobClient.dismiss)
