"""Submits jobs for clients: a process of its own measures, plans and starts each job.

In a process of its own, because preparing a job imports Torch and the user's code: neither belongs in the service.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from orchestrator.client.cluster_state import own_address
from orchestrator.client.errors import CommandIdReused, JobError
from orchestrator.spec.job_spec import Spec

if TYPE_CHECKING:
    from dashboard.jobs.live_job import LiveJob

START_S = 900.0
"""Limit for measuring, planning and starting."""
END_S = 10.0
KEPT = 50
MOST_AT_ONCE = 4


@dataclass
class PendingSubmission:
    """A job that is being submitted, or was refused."""

    job: str
    folder: str
    done: bool = False
    error: str = ""
    """Why it was refused; empty: it was accepted, or is not decided yet."""
    ended: LiveJob | None = None
    """The earlier run of the job that had ended when this was refused, if the service shows it."""

    def hides(self, job: LiveJob) -> bool:
        """Whether this is newer than what the service knows of `job`, a job of the same name."""
        return job.ended and (not self.done or (bool(self.error) and self.ended is job))


@dataclass(frozen=True)
class _Sent:
    """A submission request, kept by its idempotency key."""

    tables: Mapping[str, Any]
    resume: bool
    submission: PendingSubmission


Decided = Callable[[PendingSubmission], Awaitable[None]]
"""Called before a submission counts as decided."""


class Submissions:
    """The newest submissions.

    Args:
        address: of the cluster. This process is its driver.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._known: dict[str, PendingSubmission] = {}
        self._sent: dict[str, _Sent] = {}
        """By key, the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, job: str) -> PendingSubmission | None:
        """The newest submission of a job with this name."""
        return self._known.get(job)

    def running(self) -> list[PendingSubmission]:
        """Submissions that are undecided or were refused."""
        return [each for each in self._known.values() if not each.done or each.error]

    def earlier(self, tables: Mapping[str, Any], resume: bool, key: str | None) -> PendingSubmission | None:
        """The submission that was sent with `key` before; None if there was none.

        Raises:
            CommandIdReused: another submission had this key.
        """
        if key is None or (before := self._sent.get(key)) is None:
            return None
        if (before.tables, before.resume) != (tables, resume):
            raise CommandIdReused(
                f"key {key!r} was used to submit another spec, of job {before.submission.job!r}: choose another key"
            )
        return before.submission

    async def submit(
        self,
        tables: Mapping[str, Any],
        spec: Spec,
        *,
        resume: bool,
        key: str | None = None,
        decided: Decided | None = None,
    ) -> PendingSubmission:
        """Begin to submit the job of `spec`, whose tables are `tables`.

        Args:
            key: chosen by the sender: the same submission again, with the same key, is the first one. The newest `KEPT`
                keys are remembered.
            decided: called before the submission counts as decided.

        Raises:
            CommandIdReused: another submission had this key.
            JobError: a job of this name is being submitted already, or too many are.
        """
        name = spec.job.name
        if (earlier := self.earlier(tables, resume, key)) is not None:
            return earlier
        busy = [each.job for each in self._known.values() if not each.done]
        if name in busy:
            raise JobError(f"a job {name!r} is being submitted already: see GET /api/v1/jobs/{name}")
        if len(busy) >= MOST_AT_ONCE:
            raise JobError(
                f"{len(busy)} jobs are being submitted ({', '.join(busy)}): wait until one has begun"
            )
        submission = PendingSubmission(name, spec.job.folder)
        self._known.pop(name, None)
        self._known[name] = submission
        for old in list(self._known)[:-KEPT]:
            del self._known[old]
        if key is not None:
            self._sent[key] = _Sent(tables, resume, submission)
            for old in list(self._sent)[:-KEPT]:
                del self._sent[old]
        task = asyncio.get_running_loop().create_task(self._run(submission, tables, resume, decided))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return submission

    async def wait(self, submission: PendingSubmission, wait_s: float) -> None:
        """Wait up to `wait_s` until it is decided."""
        end_s = asyncio.get_running_loop().time() + wait_s
        while not submission.done and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End what is being submitted."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(
        self, submission: PendingSubmission, tables: Mapping[str, Any], resume: bool, decided: Decided | None
    ) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="freshet-") as folder:
                file = Path(folder) / "spec.toml"
                file.write_text(tomli_w.dumps(_without_none(tables)), encoding="utf-8")
                submission.error = await self._start(file, resume)
        except Exception as error:  # whatever it is, nobody else would tell of it
            submission.error = f"it could not be started: {error}"
        try:
            if decided is not None:
                await decided(submission)
        finally:
            submission.done = True

    async def _start(self, file: Path, resume: bool) -> str:
        """Start the job; return why it was refused, or an empty text."""
        command = [sys.executable, "-m", "orchestrator", "train", str(file), "--detach"]
        command += [
            "--set",
            f"cluster.address={own_address(self._address)}",
            *(["--resume"] if resume else []),
        ]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_S):
                _, stderr = await process.communicate()
        except TimeoutError:
            return f"it has not started within {START_S:g} s"
        finally:
            if process.returncode is None:
                # Its own processes, which measure the model, end with it.
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    async with asyncio.timeout(END_S):
                        await process.wait()
                except TimeoutError:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        if process.returncode == 0:
            return ""
        lines = stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        told = [line.removeprefix("freshet: ") for line in lines if line.startswith("freshet: ")]
        return "\n".join(told) or lines[-1]


def _without_none(value: Any) -> Any:
    """`value` with None as the string `null`, which specs read as none: TOML has no word for it."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return "null" if value is None else value
