"""`RestJobClient`: the interface to the jobs that a Freshet service shows, over its REST interface.

The same methods and errors as `JobClient`, without Ray: the service is the driver of the cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.analysis.job_summary import JobSummary
from orchestrator.client.errors import JobError, NoController, NoSuchJob, ServiceError, ServiceUnreachable
from orchestrator.client.jobs import Command, Jobs, command_id
from orchestrator.client.rest_transport import RestTransport, json_of
from orchestrator.commands.command import JobCommand, PlanCommand
from orchestrator.events.page import Page
from orchestrator.events.types import Answered, Record
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import view_without_controller
from orchestrator.history.job_view import JobView
from orchestrator.history.proposal import Proposal
from planner.profile import Profile

if TYPE_CHECKING:
    from orchestrator.client.submit import SubmittedJob
    from orchestrator.spec.job_spec import Spec

HOLD_S = 20.0
"""Time the service holds a request for an outcome, or for a job's start."""
PAUSE_S = 0.5
"""Pause before the service is asked again whether a job has started."""
LONGEST_S = 60.0
"""Longest time the service holds any request."""
NOT_YET = ("submitting", "refused")
"""States of jobs that have no controller yet, or get none."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ID = re.compile(r"[\x21-\x2e\x30-\x7e]{1,200}")
_SUMMARIES = TypeAdapter(tuple[JobSummary, ...])


class RestJobClient(Jobs):
    """The jobs of the service at `address`. `orchestrator.client.jobs.Jobs` documents each method.

    Every method also raises `ServiceUnreachable` if no service answers, and `ServiceError` if it refuses a request:
    without a valid token, with a read token, too often. An answer that is lost is asked for again.

    Args:
        address: `http://HOST:PORT` or `https://HOST:PORT`.
        environment: where `FRESHET_TOKEN` or `FRESHET_TOKEN_FILE` are looked up.
        home: the folder whose `.freshet/tokens.json` is read without these.

    Raises:
        JobError: the address is none, the token must not be sent there, or its file cannot be used.
    """

    def __init__(
        self, address: str, environment: Mapping[str, str] = os.environ, home: Path | None = None
    ) -> None:
        self._service = RestTransport(address, environment, home if home is not None else Path.home())

    async def submit(
        self, spec: Spec, *, resume: bool = False, profile: Path | None = None, replay: Path | None = None
    ) -> SubmittedJob:
        from orchestrator.client.submit import SubmittedJob

        if profile is not None or replay is not None:
            raise JobError(
                "a service takes neither a profile nor a log to replay: submit the job to the cluster itself"
            )
        name = spec.job.name
        body = {"spec": spec.model_dump(mode="json", exclude_unset=True), "resume": resume}
        # With one key it is one submission, however often it is sent. It is sent until it is decided: the state of the
        # job may still be that of an earlier run.
        headers = {"Idempotency-Key": command_id(None)}
        while True:
            answer = await self._service.post("/jobs", body, headers=headers, wait_s=HOLD_S, again=True)
            sent = self._json(answer)
            if sent.get("accepted", False):
                return SubmittedJob(name=name, folder=sent["folder"], spec=spec)
            await asyncio.sleep(PAUSE_S)

    async def jobs(self) -> tuple[str, ...]:
        return tuple(each.job for each in await self.summaries() if each.state not in NOT_YET)

    async def summaries(self) -> tuple[JobSummary, ...]:
        found = self._json(await self._service.get("/jobs"))
        try:
            return _SUMMARIES.validate_python(found.get("jobs"))
        except ValidationError:
            raise self._another_version() from None

    async def view(self, job: str, *, folder: str | None = None, timeout_s: float | None = None) -> JobView:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._service.get(f"{_path(job)}/view")
        except TimeoutError:
            raise ServiceUnreachable(
                f"{self._service.address} has not answered for {timeout_s:g} s: ask again later"
            ) from None
        except (NoSuchJob, NoController):
            if folder is None:
                raise
            return await asyncio.to_thread(view_without_controller, JobFolder(folder))
        try:
            return JobView.from_json(answer.content)
        except ValueError:
            raise self._another_version() from None

    async def profile(self, job: str) -> Profile | None:
        try:
            answer = await self._service.get(f"{_path(job)}/profile")
        except ServiceError as error:
            if error.status == 404:
                return None
            raise
        return Profile.from_json(answer.text)

    async def page(self, job: str, after: int, wait_s: float = 0.0) -> Page:
        wait_s = min(wait_s, LONGEST_S)
        answer = self._json(await self._service.get(f"{_path(job)}/events", after=after, wait_s=wait_s))
        try:
            return Page(
                records=tuple(Record.from_json(json.dumps(line)) for line in answer["events"]),
                missed=answer["missed"],
                next=answer["next"],
                over=answer["over"],
            )
        except (ValueError, KeyError, TypeError):
            raise self._another_version() from None

    async def propose(self, job: str, partition: Sequence[int] | None = None) -> Proposal:
        wanted = None if partition is None else list(partition)
        answer = await self._service.post(f"{_path(job)}/plan/proposal", {"partition": wanted}, again=True)
        found = self._json(answer)
        try:
            epoch, _, version = found.pop("version").partition(".")
            return Proposal.from_json(json.dumps({**found, "base": [int(epoch), int(version)]}))
        except (ValueError, KeyError):
            raise self._another_version() from None

    _hold_s = HOLD_S

    async def _outcome(self, command: Command, wait_s: float) -> Answered | None:
        path = f"{_path(command.job)}/commands/{command.id}"
        answer = self._json(await self._service.get(path, wait_s=wait_s))
        if not answer.get("done"):
            return None
        return Answered(id=command.id, done=True, step=answer["step"], text=answer["text"])

    async def send(self, job: str, command: JobCommand) -> Command:
        id = command_id(command.id)
        if not _ID.fullmatch(id):
            raise JobError(
                f"a command id for a service has 1 to 200 ASCII characters, no spaces and no slashes: {id!r} has others"
            )
        headers = {"Idempotency-Key": id}
        if isinstance(command, PlanCommand) and command.base is not None:
            epoch, version = command.base
            headers["If-Match"] = f'"{epoch}.{version}"'
        # With one id it is safe to send it again if the answer is lost.
        path = f"{_path(job)}/{command.route or command.name}"
        answer = await self._service.post(path, command.body(), headers=headers, again=True)
        return Command(job=job, id=id, text=str(self._json(answer).get("text", "")))

    def _json(self, answer: Any) -> dict[str, Any]:
        return json_of(answer, self._service.address)

    def _another_version(self) -> ServiceUnreachable:
        return ServiceUnreachable(
            f"the service at {self._service.address} is of another version of Freshet: its answer cannot be read here"
        )


def _path(job: str) -> str:
    """Raises:
    NoSuchJob: no job can be called so.
    """
    if not _NAME.fullmatch(job):
        raise NoSuchJob(f"no job is called {job!r}: names have letters, digits, `.`, `_` and `-`")
    return f"/jobs/{job}"
