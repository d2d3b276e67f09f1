"""The driver's side of a running job: reads its events and passes signals on until the job has ended.

The driver that submitted a job follows it this way, and so does a later one: `freshet follow`. Both reach the job only
through `JobClient`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.client.asking import joined
from orchestrator.client.blocking import Call
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.errors import ControllerSilent, NoController, NoSuchJob
from orchestrator.client.interrupts import Interrupts
from orchestrator.cluster import connection as cluster
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.events.page import Page
from orchestrator.events.types import Record, Submitted
from orchestrator.history.folder import MARKER, JobFolder
from orchestrator.history.unreported import unreported
from orchestrator.prepare.profile_cache import cache_folder, mark_stale
from orchestrator.spec.job_spec import Spec
from planner.wording import counted
from workers.control.rescues import patience_s
from workers.protocol.errors import JobError
from workers.protocol.reports import CheckpointReport, Rescued

Observer = Callable[[events.Record], None]

POLL_S = 0.1
"""Longest time the driver waits for events before it checks for signals and that the cluster still runs. Short: after
`ray job stop`, Ray gives a driver three seconds to pass its signal on."""
READ_S = 0.5
"""Time the controller holds the driver's request for events before it answers that there are none."""
QUIET_S = 2.0
"""After this time without an answer the driver looks whether the cluster's head answers."""
RESCUE_S = 20.0
"""Time limit for a checkpoint of ranks whose cluster, one of our own, has lost its head."""
AFTER_S = 5.0
"""Delay from the time when Ray ends a job's processes until the driver counts them as ended."""
SILENCE_S = 30.0
"""After this time without an answer the driver says so, and a second signal ends the job without its controller."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The result of a job."""

    spec: Spec
    """The resolved spec."""
    partition: tuple[int, ...]
    """Layers per stage."""
    end: events.Finished | events.Failed
    events_path: Path
    interrupted: bool
    """Whether a signal to the driver requested the end."""
    headless: bool = False
    """Whether the cluster's head did not answer at the end."""


def ended(
    spec: Spec, end: events.Finished | events.Failed, *, interrupted: bool, headless: bool = False
) -> JobResult:
    """The run of the resolved `spec` that ended with `end`.

    Raises:
        JobError: it failed for a reason that the user can fix.
    """
    if isinstance(end, events.Failed) and end.user_error:
        raise JobError(end.reason)
    counts = spec.pipeline.partition
    assert not isinstance(counts, str), "a resolved spec says how many layers each stage has"
    return JobResult(
        spec=spec,
        partition=counts,
        end=end,
        events_path=JobFolder(spec.job.folder).fetch_events(),
        interrupted=interrupted,
        headless=headless,
    )


class FollowedJob:
    """A driver of a running job.

    Args:
        spec: the resolved spec.
        interrupts: the signals so far.
        ours: whether signals are passed on to the job; otherwise they only end the following.
        past: events of the job so far.
        after: number of events before those to follow.
    """

    def __init__(
        self,
        client: BlockingJobClient,
        spec: Spec,
        connection: cluster.Connection,
        *,
        interrupts: Interrupts,
        ours: bool,
        past: Sequence[events.Record] = (),
        after: int = 0,
    ) -> None:
        self.spec = spec
        self.past = past
        self._client = client
        self._job = spec.job.name
        self._connection = connection
        self._interrupts = interrupts
        self._ours = ours
        self._after = after
        self._obeyed = 0
        """Signals that were passed on."""
        self._under_way: list[Call[Any]] = []
        """Calls whose answers are not awaited here."""
        self._answered_s = time.monotonic()
        self._told = False
        """Whether the user has been told that the controller is silent."""
        self._headless_s: float | None = None
        """Since when the cluster's head has not answered, by the monotonic clock; None: it has."""

    def run(self, observe: Observer, say: Callable[[str], None]) -> JobResult:
        """Pass events and signals on until the job has ended.

        Args:
            observe: receives every event as it arrives.
            say: receives messages that are no events.

        Raises:
            JobError: the job failed for a reason that the user can fix.
            KeyboardInterrupt: a signal came, and the job is not ours.
        """
        try:
            end = self._follow(observe, say)
        finally:
            for call in self._under_way:
                call.cancel()
        interrupted = self._ours and self._interrupts.count > 0
        return ended(self.spec, end, interrupted=interrupted, headless=self._headless_s is not None)

    def _follow(self, observe: Observer, say: Callable[[str], None]) -> events.Finished | events.Failed:
        end, over = _end_among(self.past), False
        reading: Call[Page] | None = None
        while not over:
            if self._connection.broken():
                return self._without_own_cluster(observe)
            self._pass_signals_on(say)
            if self._silent(say) and self._interrupts.count > 1:
                return self._without_controller()
            reading = reading or self._read()
            try:
                page = reading.result(POLL_S)
            except (ControllerSilent, TimeoutError) as error:
                if isinstance(error, ControllerSilent):
                    reading = None
                quiet = time.monotonic() - self._answered_s > QUIET_S
                if quiet and (lost := self._without_head(observe, say)) is not None:
                    return lost
                continue
            except (NoController, NoSuchJob) as error:
                return self._end_after(error, observe)
            reading = None
            self._answered_s, self._told, self._headless_s = time.monotonic(), False, None
            for record in (*self._missed(page, say), *page.records):
                if isinstance(record.event, events.ProfileDoubted):
                    # The cache of this machine, from which the plan was made, may be out of the controller's reach.
                    mark_stale(cache_folder(os.environ), record.event)
                observe(record)
            self._after, over = page.next, page.over
            end = _end_among(page.records) or end
        self._client.dismiss(self._job)
        assert end is not None
        return end

    def _without_head(
        self, observe: Observer, say: Callable[[str], None]
    ) -> events.Finished | events.Failed | None:
        """Pass on what the log says while the cluster's head does not answer. Return the job's end; None while it may
        be trained on."""
        if not self._connection.headless():
            self._headless_s = None
            return None
        if self._headless_s is None:
            self._headless_s = time.monotonic()
            self._told = True
            say(
                f"the head of the Ray cluster at {self._connection.address} does not answer. Unless it comes back, Ray"
                f" ends the job's processes in about {patience_s():.0f} s; the ranks write a checkpoint now, and"
                " another before that"
            )
        if (end := _end_among(self._pass_on(observe))) is not None:
            return end
        if time.monotonic() - self._headless_s < patience_s() + AFTER_S:
            return None
        why = f"the head of the Ray cluster at {self._connection.address} was lost, and the job with it"
        return self._lost(why, observe)

    def _without_own_cluster(self, observe: Observer) -> events.Failed:
        """The end of a job whose own cluster has broken down. Ranks that lost only its head write a checkpoint."""
        deadline_s = time.monotonic() + RESCUE_S
        while self._connection.headless() and time.monotonic() < deadline_s:
            if any(isinstance(record.event, Rescued) for record in self._logged()[self._after :]):
                break
            time.sleep(POLL_S)
        return self._lost("Ray's processes on this machine were killed", observe)

    def _pass_on(self, observe: Observer) -> Sequence[events.Record]:
        """Pass on what only the log says. Return all its records since the job was submitted."""
        records = self._logged()
        for record in records[self._after :]:
            observe(record)
        self._after = max(self._after, len(records))
        return records

    def _lost(self, why: str, observe: Observer) -> events.Failed:
        """The end of a job that was lost: says from where it can go on."""
        records, folder = self._pass_on(observe), self.spec.job.folder
        try:
            left = unreported(folder, records)
        except OSError:
            left = []
        for record in left:
            observe(record)
        steps = [
            record.event.step
            for record in (*records, *left)
            if isinstance(record.event, CheckpointReport) and record.event.error is None
        ]
        go_on = (
            f"--resume goes on from the checkpoint of step {max(steps)}, in {folder}"
            if steps
            else f"there is no checkpoint to go on from in {folder}"
        )
        return events.Failed(reason=f"{why}: {go_on}", user_error=False)

    def _read(self) -> Call[Page]:
        """Request the next events."""
        reading = Call(self._client.waiting.page(self._job, self._after, READ_S))
        self._under_way = [call for call in self._under_way if not call.done()] + [reading]
        return reading

    def _missed(self, page: Page, say: Callable[[str], None]) -> Sequence[events.Record]:
        """The events that the controller no longer had when `page` was read, from the log; says how many it lacks."""
        if not page.missed:
            return ()
        found = self._logged()[self._after : self._after + page.missed]
        if (lacking := page.missed - len(found)) > 0:
            say(
                f"{counted(lacking, 'event')} came faster than this driver read them; the log has none of them here"
            )
        return found

    def _end_after(self, error: Exception, observe: Observer) -> events.Finished | events.Failed:
        """The end of a job whose controller is gone: from its log, if another driver read the end first."""
        died = events.Failed(reason=f"the controller died: {error}", user_error=False)
        if self._connection.broken():
            return died
        records = self._logged()
        if (end := _end_among(records)) is not None:
            for record in records[self._after :]:
                observe(record)
            return end
        self._clear()
        return died

    def _logged(self) -> Sequence[events.Record]:
        """The log's records since the job was submitted; none if it cannot be read."""
        try:
            return since_start(list(read_log(JobFolder(self.spec.job.folder).fetch_events())))
        except (OSError, ValueError):
            return ()

    def _silent(self, say: Callable[[str], None]) -> bool:
        """Whether the controller has been silent for `SILENCE_S`; tells the user once."""
        silent = time.monotonic() - self._answered_s > SILENCE_S
        if silent and not self._told:
            self._told = True
            or_so = ", or Ctrl-C twice" if self._ours else ""
            say(
                f"the job's controller has not answered for {SILENCE_S:g} s: it hangs, or Ray is starting it again. The"
                f" ranks train on; freshet reap {self._job} --force{or_so} ends them"
            )
        return silent

    def _without_controller(self) -> events.Failed:
        """End a job whose controller no longer works."""
        self._clear()
        silent_s = time.monotonic() - self._answered_s
        reason = (
            f"ended at once: its controller had not answered for {silent_s:.0f} s; --resume goes on from its newest"
            " checkpoint, if any"
        )
        return events.Failed(reason=reason, user_error=False)

    def _clear(self) -> None:
        """End whatever is left of the job."""
        with suppress(NoSuchJob):
            self._client.reap(self._job, force=True)

    def _pass_signals_on(self, say: Callable[[str], None]) -> None:
        signals = self._interrupts.count
        if signals <= self._obeyed:
            return
        if not self._ours:
            raise KeyboardInterrupt
        first = self._obeyed == 0 and signals == 1
        self._obeyed = signals
        # The outcome arrives as events.
        if first:
            say("stopping after this step, with a checkpoint; once more to end at once")
            self._under_way.append(Call(self._client.waiting.stop(self._job)))
        else:
            say("ending at once, without a checkpoint")
            self._under_way.append(Call(self._client.waiting.abort(self._job)))


def _end_among(records: Sequence[events.Record]) -> events.Finished | events.Failed | None:
    ends = [record.event for record in records if isinstance(record.event, events.Finished | events.Failed)]
    return ends[-1] if ends else None


@contextmanager
def attached(job: str, address: str) -> Iterator[FollowedJob]:
    """Become a driver of the running `job`, beside the one that submitted it or in its place. Signals are not passed
    on: the job is not ours.

    Raises:
        JobError: there is no such cluster or job, its controller does not answer, or its folder is not visible here.
    """
    with Interrupts() as interrupts, joined(address) as connection:
        client = BlockingJobClient(connection.address)
        folder = client.view(job).folder
        page = client.page(job, 0)
        marker = JobFolder(folder).marker()
        if marker is None or marker.name != job:
            raise JobError(
                f"{folder} on this machine holds no {MARKER} of job {job!r}: follow it where its folder is to be"
                " seen, such as the machine it was started on"
            )
        try:
            spec = Spec.model_validate(dict(marker.spec))
        except ValidationError as error:
            raise JobError(f"{folder}/{MARKER} is not one of this version: {error}") from error
        # A signal that raises an exception may raise it where Ray swallows it.
        interrupts.hold()
        yield FollowedJob(
            client,
            spec,
            connection,
            interrupts=interrupts,
            ours=False,
            past=page.records,
            after=page.next,
        )


def since_start(records: Sequence[Record]) -> tuple[Record, ...]:
    """The records since the job was last submitted. A takeover is no start: the records of the controller before it
    are included."""
    starts = [
        index
        for index, record in enumerate(records)
        if isinstance(record.event, Submitted) and not record.event.takeover
    ]
    return tuple(records[starts[-1] :]) if starts else ()
