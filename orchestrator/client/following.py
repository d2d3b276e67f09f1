"""The driver's side of a running job: events come out, signals go in, until it has ended.

The driver that submitted a job follows it so, and so does any other one that comes later: `freshet follow`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.client.asking import ask, joined, known_controller
from orchestrator.client.interrupts import Interrupts
from orchestrator.cluster import connection as cluster
from orchestrator.events import types as events
from orchestrator.events.folder import MARKER, JobFolder
from orchestrator.events.log import read_log
from orchestrator.history.starts import since_start
from orchestrator.spec.job_spec import Spec
from workers.protocol import JobError

Observer = Callable[[events.Record], None]

POLL_S = 0.5
"""How long the driver waits for events before it looks for signals."""
PATIENCE_S = 5.0
"""How long a busy controller may take to answer before the driver looks whether the cluster still stands."""
SILENCE_S = 30.0
"""After so long without an answer people are told, and a second signal ends the job without its controller."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a job went."""

    spec: Spec
    """As resolved."""
    partition: tuple[int, ...]
    """Layers per stage."""
    end: events.Finished | events.Failed
    events_path: Path
    interrupted: bool
    """Whether a signal to the driver asked for the end."""


def ended(spec: Spec, end: events.Finished | events.Failed, *, interrupted: bool) -> Run:
    """The run of the resolved `spec`, which came to `end`.

    Raises:
        JobError: it failed for something that the user can mend.
    """
    if isinstance(end, events.Failed) and end.user_error:
        raise JobError(end.reason)
    counts = spec.pipeline.partition
    assert not isinstance(counts, str), "a resolved spec says how many layers each stage has"
    return Run(
        spec=spec,
        partition=counts,
        end=end,
        events_path=JobFolder(spec.job.folder).fetch_events(),
        interrupted=interrupted,
    )


class Following:
    """A driver of a job that runs.

    Args:
        spec: the resolved one.
        interrupts: what signals there were.
        ours: they are passed on to the job; else they only end the following.
        past: events of the job that were heard of already.
        heard: how many there were of it before those that are to be followed.
    """

    def __init__(
        self,
        spec: Spec,
        controller: Any,
        connection: cluster.Connection,
        *,
        interrupts: Interrupts,
        ours: bool,
        past: Sequence[events.Record] = (),
        heard: int = 0,
    ) -> None:
        self.spec = spec
        self.past = past
        self._job = spec.job.name
        self._controller = controller
        self._connection = connection
        self._interrupts = interrupts
        self._ours = ours
        self._heard = heard
        self._obeyed = 0
        """Signals that were passed on."""
        self._answered_s = time.monotonic()
        self._told = False
        """Whether people know that the controller is silent."""

    def run(self, observe: Observer, say: Callable[[str], None]) -> Run:
        """Pass everything on until the job has ended.

        Args:
            observe: is given every event as it comes.
            say: is given in words what is no event.

        Raises:
            JobError: the job failed for something that the user can mend.
            KeyboardInterrupt: a signal came, and the job is not ours.
        """
        end = self._follow(observe, say)
        return ended(self.spec, end, interrupted=self._ours and self._interrupts.count > 0)

    def _follow(self, observe: Observer, say: Callable[[str], None]) -> events.Finished | events.Failed:
        import ray
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

        end, over = _end_among(self.past), False
        while not over:
            if self._connection.broken():
                return events.Failed(reason="Ray's processes on this machine were killed", user_error=False)
            self._pass_signals_on(say)
            if self._silent(say) and self._interrupts.count > 1:
                return self._without_controller()
            try:
                page: Any = ray.get(
                    self._controller.read.remote(self._heard, POLL_S), timeout=POLL_S + PATIENCE_S
                )
            except GetTimeoutError:
                continue
            except ActorUnavailableError:  # it is started again
                time.sleep(POLL_S)
                continue
            except RayActorError as error:
                return self._end_after(error, observe)
            self._answered_s, self._told = time.monotonic(), False
            self._heard, over = page.next, page.over
            for record in page.records:
                observe(record)
            end = _end_among(page.records) or end
        ray.kill(self._controller)
        assert end is not None
        return end

    def _end_after(self, error: Exception, observe: Observer) -> events.Finished | events.Failed:
        """How the job ended whose controller is gone: as its log says, where another driver was first to hear of it."""
        from orchestrator.cluster.ray_hosts import reap

        died = events.Failed(reason=f"the controller died: {error}", user_error=False)
        if self._connection.broken():
            return died
        records = self._logged()
        if (end := _end_among(records)) is not None:
            for record in records[self._heard :]:
                observe(record)
            return end
        reap(self._job)
        return died

    def _logged(self) -> Sequence[events.Record]:
        """What the log holds of the job since it was submitted; nothing if it cannot be read."""
        try:
            return since_start(list(read_log(JobFolder(self.spec.job.folder).fetch_events())))
        except (OSError, ValueError):
            return ()

    def _silent(self, say: Callable[[str], None]) -> bool:
        """Whether nothing has been heard of the controller for long; people are told once."""
        silent = time.monotonic() - self._answered_s > SILENCE_S
        if silent and not self._told:
            self._told = True
            or_so = ", or Ctrl-C twice" if self._ours else ""
            say(
                f"the job's controller has not answered for {SILENCE_S:g} s: it hangs, or is being started again. The"
                f" ranks train on; freshet reap {self._job} --force{or_so} ends them"
            )
        return silent

    def _without_controller(self) -> events.Failed:
        """End the job whose controller does nothing any more."""
        import ray

        from orchestrator.cluster.ray_hosts import reap

        ray.kill(self._controller)
        reap(self._job)
        silent_s = time.monotonic() - self._answered_s
        reason = f"ended at once: its controller had not answered for {silent_s:.0f} s; go on with --resume"
        return events.Failed(reason=reason, user_error=False)

    def _pass_signals_on(self, say: Callable[[str], None]) -> None:
        signals = self._interrupts.count
        if signals <= self._obeyed:
            return
        if not self._ours:
            raise KeyboardInterrupt
        first = self._obeyed == 0 and signals == 1
        self._obeyed = signals
        if first:
            say("stopping after this step, with a checkpoint; once more to end at once")
            self._command("stop")
        else:
            say("ending at once, without a checkpoint")
            self._command("abort")

    def _command(self, name: str) -> None:
        """Send a command and wait for nothing: the events tell what comes of it."""
        call = self._controller.command.options(max_task_retries=-1)
        call.remote(secrets.token_hex(8), name, {})


def _end_among(records: Sequence[events.Record]) -> events.Finished | events.Failed | None:
    ends = [record.event for record in records if isinstance(record.event, events.Finished | events.Failed)]
    return ends[-1] if ends else None


@contextmanager
def attached(job: str, address: str) -> Iterator[Following]:
    """A driver of the running `job` from here on, beside the one that submitted it or in its place. Signals are not
    passed on: the job is not ours.

    Raises:
        JobError: there is no such cluster or job, its controller does not answer, or its folder is not to be seen.
    """
    with Interrupts() as interrupts, joined(address) as connection:
        controller = known_controller(job, address)
        status = ask(job, controller, "status")
        page = ask(job, controller, "read", 0, 0.0)
        marker = JobFolder(status.output).marker()
        if marker is None or marker.name != job:
            raise JobError(
                f"{status.output} on this machine holds no {MARKER} of job {job!r}: follow it where its folder is to be"
                " seen, such as the machine it was started on"
            )
        try:
            spec = Spec.model_validate(dict(marker.spec))
        except ValidationError as error:
            raise JobError(f"{status.output}/{MARKER} is not one of this version: {error}") from error
        # An exception that a signal raises anywhere may be raised where Ray swallows it.
        interrupts.hold()
        yield Following(
            spec,
            controller,
            connection,
            interrupts=interrupts,
            ours=False,
            past=page.records,
            heard=page.next,
        )
