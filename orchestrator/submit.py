"""A job from the driver's side: check it, connect, hand it to a controller, follow it to its end.

Whatever can be told wrong is told before any actor starts. What is shown and what is returned to whom is up
to the command line and `trainer.py`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import cluster, events
from orchestrator.folder import JobFolder, Marker, starting_points, undamaged
from orchestrator.freeze_history import FreezeHistory
from orchestrator.interrupts import Interrupts
from orchestrator.preparation import Prepared, prepare
from orchestrator.replay import recorded
from orchestrator.resolve import Resolved
from orchestrator.resumption import adopt
from orchestrator.spec import Spec
from orchestrator.spec_checks import AUTO, check
from orchestrator.states import Order
from orchestrator.survey import Survey, absolute, survey
from workers.protocol import CheckpointRef, JobError, Request

Observer = Callable[[events.Record], None]

POLL_S = 0.5
"""How long the driver waits for events before it looks for signals."""
PATIENCE_S = 5.0
"""How long a busy controller may take to answer before the driver looks whether the cluster still stands."""
DEFAULT_CPU = 1.0
"""What a rank reserves at most where the spec does not say."""


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


def run(
    spec: Spec,
    *,
    resume: bool,
    observe: Observer,
    say: Callable[[str], None],
    profile: Path | None = None,
    replay: Path | None = None,
) -> Run:
    """Run a job to its end, with Ctrl-C for an orderly stop and a second one for an end at once.

    Args:
        resume: go on from the newest checkpoint in the job's folder.
        profile: plan with this file instead of measuring.
        replay: freeze as this event log says, and decide nothing anew.
        observe: is given every event as it comes.
        say: is given phases in words.

    Raises:
        JobError: something that the user can mend.
        KeyboardInterrupt: a signal came before the job was running.
    """
    spec = absolute(spec)
    check(spec)
    folder = JobFolder(spec.job.folder)
    folder.admit(spec.job.name, resume=resume)
    if resume and (earlier := folder.marker()) is not None:
        spec = adopt(spec, earlier.spec)
    with Interrupts() as interrupts:
        opening = _Opening(spec)
        with cluster.connected(spec.cluster.address, cpus=_cpus(spec)) as connection:
            prepared = prepare(spec, opening.result(), folder, resume=resume, profile_file=profile, say=say)
            resolved = prepared.resolved
            start = starting_points(resolved.config) if resume else ()
            if start and start[0].step == spec.job.steps and undamaged(start[0]):
                say(f"nothing to do: {folder.location} is trained to step {spec.job.steps}")
                end = events.Finished(step=spec.job.steps, stopped=False, state_sha256=None)
                return _run(resolved, end, folder, interrupted=False)
            freezing = folder.freeze_history() if start else FreezeHistory()
            if replay is not None:
                freezing = recorded(replay, resolved)
            _make_way(spec.job.name)
            marker = folder.claim(spec.job.name, resolved.spec.model_dump(mode="json"))
            interrupts.hold()
            controller = _submit(prepared, folder, start, marker, freezing)
            following = _Following(spec.job.name, controller, connection, interrupts)
            end = following.run(observe, say)
    if isinstance(end, events.Failed) and end.user_error:
        raise JobError(end.reason)
    return _run(resolved, end, folder, interrupted=interrupts.count > 0)


def _cpus(spec: Spec) -> float:
    """What the job needs of a local cluster, which has all of this machine anyway."""
    per_rank = spec.cluster.resources_per_rank or {}
    ranks = 1 if spec.pipeline.ranks == AUTO else spec.pipeline.ranks
    return ranks * per_rank.get("CPU", DEFAULT_CPU)


def _run(
    resolved: Resolved, end: events.Finished | events.Failed, folder: JobFolder, *, interrupted: bool
) -> Run:
    return Run(
        spec=resolved.spec,
        partition=resolved.counts,
        end=end,
        events_path=folder.fetch_events(),
        interrupted=interrupted,
    )


class _Opening:
    """The survey of model and data, in a thread: importing torch takes as long as Ray takes to start."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._found: Survey | BaseException | None = None
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def result(self) -> Survey:
        """What was found; waits for it. Raises what opening raised."""
        self._thread.join()
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found

    def _open(self) -> None:
        try:
            self._found = survey(self._spec)
        except BaseException as error:
            self._found = error


def _make_way(name: str) -> None:
    """See that no controller bears the name of the job; one whose job has ended goes.

    Raises:
        JobError: a job of that name is running.
    """
    import ray
    from ray.exceptions import RayActorError

    from orchestrator.controller import find

    if (running := find(name)) is None:
        return
    try:
        status: Any = ray.get(running.status.remote())
    except RayActorError:  # it went just now
        return
    if status.state not in ("finished", "failed"):
        raise JobError(
            f"a job {name!r} is running in this cluster (step {status.step} of {status.steps}, in"
            f" {status.output}): stop it with `freshet stop {name}`, or choose another job.name"
        )
    ray.kill(running)


def _submit(
    prepared: Prepared,
    folder: JobFolder,
    start: tuple[CheckpointRef, ...],
    marker: Marker,
    freezing: FreezeHistory,
) -> Any:
    """Start the job's controller and give it the job.

    Raises:
        JobError: no controller can be created, or another one holds the folder.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from orchestrator.controller import Controller
    from orchestrator.crew import Crew
    from orchestrator.folder import MARKER

    resolved = prepared.resolved
    spec, name = resolved.spec, resolved.spec.job.name
    crew = Crew(
        config=resolved.config,
        per_rank=resolved.per_rank,
        wait_s=spec.cluster.wait_s,
        timeout_s=spec.cluster.timeout_s,
        marker=(MARKER, marker.to_bytes()),
        replanner=prepared.replanner,
        secret=secrets.token_bytes(32),
        profile=prepared.profile,
    )
    _, generation = folder.incarnations()
    order = Order(
        job=name,
        epoch=resolved.plan.epoch,
        generation=generation + 1,
        plan=resolved.plan,
        schedule=resolved.schedule,
        elastic=resolved.config.elastic,
        checkpoints=start,
        timeout_s=spec.cluster.timeout_s,
        considered=prepared.considered,
        freezing=freezing,
    )
    remote: Any = ray.remote(Controller)
    controller = remote.options(
        name=name,
        namespace=cluster.NAMESPACE,
        lifetime="detached",
        # Killed, it is started again, and goes on from its log.
        max_restarts=-1,
        num_cpus=0,
        # Beside the driver, whose files it shares. Not softly: Ray then takes any node, spot instances too.
        scheduling_strategy=NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        ),
    ).remote(order, crew, spec.model_dump(mode="json"))
    try:
        ray.get(controller.start.remote())
    except RayTaskError as error:
        ray.kill(controller)
        if isinstance(error.cause, JobError):
            raise error.cause from None
        raise
    except RayError as error:
        ray.kill(controller)
        cause = str(error).strip().rpartition("\n")[2]
        raise JobError(
            f"the job's controller could not be started: {cause}; see that all nodes have the same Freshet, Ray and"
            ' Python, or start without them with cluster.address = "local"'
        ) from error
    return controller


class _Following:
    """The driver's side of a running job: events come out, signals go in."""

    def __init__(
        self, job: str, controller: Any, connection: cluster.Connection, interrupts: Interrupts
    ) -> None:
        self._job = job
        self._controller = controller
        self._connection = connection
        self._interrupts = interrupts
        self._obeyed = 0
        """Signals that were passed on."""

    def run(self, observe: Observer, say: Callable[[str], None]) -> events.Finished | events.Failed:
        """Pass everything on until the job has ended."""
        import ray
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

        from orchestrator.ray_hosts import reap

        heard, over = 0, False
        end: events.Finished | events.Failed | None = None
        while not over:
            if self._connection.broken():
                return events.Failed(reason="Ray's processes on this machine were killed", user_error=False)
            self._pass_signals_on(say)
            try:
                page: Any = ray.get(self._controller.read.remote(heard, POLL_S), timeout=POLL_S + PATIENCE_S)
            except GetTimeoutError:
                continue
            except ActorUnavailableError:  # it is started again
                time.sleep(POLL_S)
                continue
            except RayActorError as error:
                if not self._connection.broken():
                    reap(self._job)
                return events.Failed(reason=f"the controller died: {error}", user_error=False)
            heard, over = page.next, page.over
            for record in page.records:
                observe(record)
                if isinstance(record.event, events.Finished | events.Failed):
                    end = record.event
        ray.kill(self._controller)
        assert end is not None
        return end

    def _pass_signals_on(self, say: Callable[[str], None]) -> None:
        if self._interrupts.count <= self._obeyed:
            return
        first = self._obeyed == 0 and self._interrupts.count == 1
        self._obeyed = self._interrupts.count
        if first:
            say("stopping after this step, with a checkpoint; once more to end at once")
            self._controller.request.options(max_task_retries=-1).remote(Request.STOP)
        else:
            say("ending at once, without a checkpoint")
            self._controller.abort.options(max_task_retries=-1).remote()
