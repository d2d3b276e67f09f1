"""A job from the driver's side: check it, connect, hand it to a controller, follow it to its end.

Whatever can be told wrong is told before any actor starts. What is shown and what is returned to whom is up
to the command line and `trainer.py`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.client.asking import NoController, ask, controller_of, last_line
from orchestrator.client.following import Following, Observer, Run, ended
from orchestrator.client.interrupts import Interrupts
from orchestrator.cluster import connection as cluster
from orchestrator.cluster.actor_names import NAMESPACE
from orchestrator.cluster.placement import preferring
from orchestrator.controller.config import ControllerConfig
from orchestrator.events import types as events
from orchestrator.events.folder import MARKER, JobFolder, Marker, starting_points, undamaged
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.lifecycle.states import Order
from orchestrator.prepare.model_outline import ModelOutline, absolute, outline_model
from orchestrator.prepare.preparation import Prepared, prepare
from orchestrator.prepare.replay import recorded
from orchestrator.prepare.resumption import adopt
from orchestrator.spec.checks import AUTO, check
from orchestrator.spec.job_spec import Spec
from workers.protocol import CheckpointRef, JobError

START_S = 300.0
"""How long a new controller may take to be there: a busy machine starts a process for it."""
DEFAULT_CPU = 1.0
"""What a rank reserves at most where the spec does not say."""


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
            _make_way(spec.job.name)
            prepared = prepare(spec, opening.result(), folder, resume=resume, profile_file=profile, say=say)
            resolved = prepared.resolved
            start = starting_points(resolved.config) if resume else ()
            if start and start[0].step == spec.job.steps and undamaged(start[0]):
                say(f"nothing to do: {folder.location} is trained to step {spec.job.steps}")
                end = events.Finished(step=spec.job.steps, stopped=False, state_sha256=None)
                return ended(resolved.spec, end, interrupted=False)
            freezing = folder.freeze_history() if start else FreezeHistory()
            if replay is not None:
                freezing = recorded(replay, resolved)
            # Once more: measuring and planning may have taken a while.
            _make_way(spec.job.name)
            marker = folder.claim(spec.job.name, resolved.spec.model_dump(mode="json"))
            folder.keep_profile(prepared.profile.to_json() + "\n" if prepared.profile is not None else None)
            interrupts.hold()
            controller = _submit(prepared, folder, start, marker, freezing)
            following = Following(resolved.spec, controller, connection, interrupts=interrupts, ours=True)
            return following.run(observe, say)


def _cpus(spec: Spec) -> float:
    """What the job needs of a local cluster, which has all of this machine anyway."""
    per_rank = spec.cluster.resources_per_rank or {}
    ranks = 1 if spec.pipeline.ranks == AUTO else spec.pipeline.ranks
    return ranks * per_rank.get("CPU", DEFAULT_CPU)


class _Opening:
    """The survey of model and data, in a thread: importing torch takes as long as Ray takes to start."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._found: ModelOutline | BaseException | None = None
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def result(self) -> ModelOutline:
        """What was found; waits for it. Raises what opening raised."""
        self._thread.join()
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found

    def _open(self) -> None:
        try:
            self._found = outline_model(self._spec)
        except BaseException as error:
            self._found = error


def _make_way(name: str) -> None:
    """See that no controller bears the name of the job; one whose job has ended goes.

    Raises:
        JobError: a job of that name is running, or its controller does not answer.
    """
    import ray

    if (running := controller_of(name)) is None:
        return
    try:
        status = ask(name, running, "status")
    except NoController:  # it went just now
        return
    if status.state not in ("finished", "failed"):
        raise JobError(
            f"a job {name!r} is running in this cluster (step {status.step} of {status.steps}, in"
            f" {status.output}): follow it with `freshet follow {name}`, stop it with `freshet stop {name}`, or choose"
            " another job.name"
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
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    from orchestrator.cluster.ray_hosts import reap

    resolved = prepared.resolved
    spec, name = resolved.spec, resolved.spec.job.name
    setup = ControllerConfig(
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
        alternatives=prepared.alternatives,
        freezing=freezing,
    )
    controller = _create(order, setup, spec)
    try:
        ray.get(controller.start.remote(), timeout=START_S)
    except RayTaskError as error:
        ray.kill(controller)
        if isinstance(error.cause, JobError):
            raise error.cause from None
        raise
    except GetTimeoutError as error:
        ray.kill(controller)
        reap(name)
        raise JobError(
            f"the controller of job {name!r} has not started within {START_S:g} s: see that this machine has a CPU and"
            " memory to spare, then try again"
        ) from error
    except RayError as error:
        ray.kill(controller)
        raise JobError(
            f"the job's controller could not be started: {last_line(error)}; see that all nodes have the same Freshet,"
            ' Ray and Python, or start without them with cluster.address = "local"'
        ) from error
    return controller


def _create(order: Order, setup: ControllerConfig, spec: Spec) -> Any:
    """The controller's actor.

    Raises:
        JobError: another driver was faster.
    """
    import ray
    from ray.exceptions import ActorAlreadyExistsError

    from orchestrator.controller.actor import Controller

    remote: Any = ray.remote(Controller)
    name = order.job
    try:
        return remote.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            # Killed, it is started again, and goes on from its log.
            max_restarts=-1,
            num_cpus=0,
            # Each report is a call: the record of each would stay in the cluster's memory.
            enable_task_events=False,
            # Beside the driver, whose files it shares; elsewhere once that node is gone.
            **preferring(ray.get_runtime_context().get_node_id()),
        ).remote(order, setup, spec.model_dump(mode="json"))
    except ActorAlreadyExistsError as error:
        raise JobError(
            f"a job {name!r} has been started in this cluster just now: follow it with `freshet follow {name}`, stop it"
            f" with `freshet stop {name}`, or choose another job.name"
        ) from error
