"""Submits a job: checks it, prepares it in the cluster and starts its controller. Follows nothing.

Mistakes that can be found without an actor are found before one starts.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.client.asking import ask, controller_of, last_line
from orchestrator.client.blocking import finish
from orchestrator.client.errors import NoController
from orchestrator.client.ray_calls import RayCalls
from orchestrator.client.shadowing import refusal, shadowing
from orchestrator.cluster.actor_arguments import in_pieces
from orchestrator.cluster.actor_names import NAMESPACE
from orchestrator.cluster.connection import import_paths
from orchestrator.cluster.placement import preferring
from orchestrator.controller.config import ControllerConfig
from orchestrator.events import types as events
from orchestrator.history.folder import (
    MARKER,
    JobFolder,
    Marker,
    end_at,
    is_trained,
    starting_points,
    undamaged,
)
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.history.job_view import JobView
from orchestrator.history.unreported import take_in
from orchestrator.lifecycle.states import Order
from orchestrator.prepare.first_step import own_code
from orchestrator.prepare.model_outline import ModelOutline, absolute, count_flops, import_compiler
from orchestrator.prepare.planning import replanner_of
from orchestrator.prepare.preparation import settle
from orchestrator.prepare.replay import recorded
from orchestrator.prepare.resumption import adopt
from orchestrator.prepare.settling import Settled, opened
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import AUTO, check
from orchestrator.telemetry.wanted import check_packages
from planner.wording import counted
from workers.protocol.errors import JobError
from workers.protocol.orders import CheckpointRef

START_S = 300.0
"""Limit for a new controller to start: a busy machine starts a process for it."""
LOOK_S = 0.1
"""Between two looks for a signal while it starts."""
MANY_RANKS = 4
"""With more ranks per core of this machine, the model is opened before Ray starts a process for each of them."""
DEFAULT_CPU = 1.0
"""CPUs that a rank reserves at most if the spec does not say."""
COUNT_S = 30.0
"""Most seconds that a driver which leaves its job waits for the count of a sample's operations."""
LOWEST_PRIORITY = 19
RAY_CACHE = "working_dir_files"
"""The folder in which Ray keeps its copies of working directories."""


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job that a controller has accepted."""

    name: str
    folder: str
    """The folder of its log and checkpoints."""
    spec: Spec
    """The resolved spec."""
    end: events.Finished | None = None
    """Set if there was nothing to do; then the job has no controller."""


def submit(
    spec: Spec,
    *,
    resume: bool = False,
    profile: Path | None = None,
    replay: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> SubmittedJob:
    """Submit a job to the cluster that this process is a driver of. Arguments and errors are those of `Submission`."""
    return Submission(spec, resume=resume, say=say).send(profile=profile, replay=replay)


class Submission:
    """A job that is being submitted. The constructor makes the checks that need no cluster.

    Args:
        resume: continue from the newest checkpoint in the job's folder.
        say: receives phases, in words.

    Raises:
        JobError: something that the user can fix.
    """

    def __init__(self, spec: Spec, *, resume: bool, say: Callable[[str], None]) -> None:
        spec = absolute(spec)
        self._resume = resume
        self._say = say
        self._folder = JobFolder(spec.job.folder)
        if resume:
            self._folder.admit(spec.job.name, resume=True)
            if (earlier := self._folder.marker()) is not None:
                spec = adopt(spec, earlier.spec)
        if spec.logging.recorded and spec.logging.run is None:
            named = {"run": secrets.token_hex(6)}
            spec = spec.model_copy(update={"logging": spec.logging.model_copy(update=named)})
        spec = check(spec)
        check_packages(spec.logging)
        if not resume:
            self._folder.admit(spec.job.name, resume=False)
        _check_imports(spec)
        if RAY_CACHE in Path(spec.job.folder).parts:
            say(in_ray_cache(spec.job.folder))
        self.spec = spec
        self._opening = _Opening(spec)
        self._counting: _Counting | None = None

    def check_size(self) -> None:
        """Check a job of many ranks against its model before Ray starts a process for each of them.

        Raises:
            JobError: the model has fewer layers than the job has stages, or cannot be opened.
        """
        pipeline = self.spec.pipeline
        ranks = 1 if pipeline.ranks == AUTO else pipeline.ranks // pipeline.pipeline_count
        if ranks > MANY_RANKS * (os.cpu_count() or 1):
            self._opening.result()

    def check_opened(self) -> None:
        """Raise what opening the model and the data raises, before Ray starts for nothing.

        Waits for it where a user wrote something that may be wrong: code, or the files that it reads. Elsewhere it
        goes on while Ray starts, and only what it has raised so far is raised.
        """
        if own_code(self.spec) or _own_files(self.spec):
            self._opening.result()
        self._opening.check()

    @property
    def cpus(self) -> float:
        """CPUs that the job needs of a local cluster, which has all of this machine anyway."""
        per_rank = self.spec.cluster.resources_per_rank or {}
        ranks = 1 if self.spec.pipeline.ranks == AUTO else self.spec.pipeline.ranks
        return ranks * per_rank.get("CPU", DEFAULT_CPU)

    def send(
        self,
        *,
        profile: Path | None = None,
        replay: Path | None = None,
        about_to_start: Callable[[], None] = lambda: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> SubmittedJob:
        """Measure, plan and start the job in the cluster that this process is a driver of.

        Args:
            profile: plan with this file instead of measuring.
            replay: freeze as this event log says, without new decisions.
            about_to_start: called just before the job claims its folder and starts.
            interrupted: whether a signal came since; looked at until the job's controller has accepted the job.

        Raises:
            JobError: something that the user can fix.
            KeyboardInterrupt: it was interrupted, and nothing of the job is left.
        """
        folder, name = self._folder, self.spec.job.name
        _make_way(name)
        if self._resume:
            self._take_in_left()
        settled = settle(
            *self._opening.result(), folder, resume=self._resume, profile_file=profile, say=self._say
        )
        spec = settled.spec
        start = starting_points(settled.config, settled.plan.shard) if self._resume else ()
        if start and is_trained(start[0], settled.config) and undamaged(start[0]):
            last = start[0].step
            self._say(f"nothing to do: {folder.location} is trained to step {last}")
            end = events.Finished(step=last, stopped=False, state_sha256=None)
            return SubmittedJob(name=name, folder=spec.job.folder, spec=spec, end=end)
        if start and (end := end_at(start[0], spec.goals)) and undamaged(start[0]):
            self._say(f"nothing to do: {folder.location} is done at step {end.step}, {end.why}")
            return SubmittedJob(name=name, folder=spec.job.folder, spec=spec, end=end)
        freezing = folder.freeze_history() if start else FreezeHistory()
        if replay is not None:
            freezing = recorded(replay, settled)
        # Again, because measuring and planning may have taken a while.
        _make_way(name)
        about_to_start()
        marker = folder.claim(name, spec.model_dump(mode="json"))
        folder.keep_profile(settled.profile.to_json() + "\n" if settled.profile is not None else None)
        controller = _start(settled, folder, start, marker, freezing, interrupted)
        self._counting = _Counting(spec, controller)
        self._counting.start()
        return SubmittedJob(name=name, folder=spec.job.folder, spec=spec)

    def leave(self, *, lasts: bool) -> None:
        """End what goes on beside a job that has started.

        Args:
            lasts: whether the job does: then wait for it, for `COUNT_S` at most.
        """
        if self._counting is not None:
            if lasts:
                self._counting.join(COUNT_S)
            self._counting.give_up()

    def _take_in_left(self) -> None:
        """Take into the log what the ranks left when the cluster's head was lost.

        Raises:
            JobError: the folder cannot be read or written, or another job is at work in it.
        """
        try:
            count = take_in(self._folder)
        except OSError as error:
            raise JobError(
                f"cannot take what ranks left in {self._folder.location} into the log: {error.strerror or error}"
            ) from error
        if count:
            self._say(
                f"the log has {counted(count, 'report')} more, which ranks left when the cluster's head was lost"
            )


def in_ray_cache(folder: str) -> str:
    """A warning that Ray may delete the job's folder."""
    return (
        f"warning: job.output = {folder} lies in Ray's copy of the working directory, on one node, and goes with it:"
        " name a folder that stays, which all nodes see, with --set job.output=/PATH"
    )


def _check_imports(spec: Spec) -> None:
    """Raises:
    JobError: a file of the user's would be imported in place of a package of Freshet's.
    """
    if spec.cluster.address.startswith("ray://"):  # this machine's paths mean nothing there
        return
    if (found := shadowing(import_paths())) is not None:
        raise JobError(refusal(found, "the ranks, which import"))


def _own_files(spec: Spec) -> bool:
    """Whether the job reads text, a tokenizer or weights of the user's."""
    return (
        bool(spec.data.path) or spec.data.tokenizer not in (None, "bytes") or spec.model.weights is not None
    )


class _Opening:
    """Opens model and data in a thread: importing torch takes as long as starting Ray."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._found: tuple[Spec, ModelOutline] | BaseException | None = None
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def result(self) -> tuple[Spec, ModelOutline]:
        """Wait for the spec, settled by its model, and the outline. Raises what opening raised."""
        self._thread.join()
        self.check()
        assert isinstance(self._found, tuple)
        return self._found

    def check(self) -> None:
        """Raise what opening has raised so far."""
        if isinstance(self._found, BaseException):
            raise self._found

    def _open(self) -> None:
        try:
            self._found = opened(self._spec)
        except BaseException as error:
            self._found = error


class _Counting(threading.Thread):
    """Counts what a sample of a job costs, and tells the job's controller. That imports PyTorch's compiler: no start of
    a job waits for it, and a thread of the lowest priority does it."""

    def __init__(self, spec: Spec, controller: Any) -> None:
        super().__init__(daemon=True)
        self._spec = spec
        self._controller = controller
        self._at_work = threading.Lock()
        self._given_up = False

    def run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        import_compiler()
        with self._at_work:
            if not self._given_up and (flops := count_flops(self._spec)) is not None:
                with suppress(Exception):  # the controller may be lost: it is one number in a report
                    self._controller.learn.remote(flops)

    def give_up(self) -> None:
        """Count no more: an interpreter that ends must not have this thread within torch. Wait `COUNT_S` at most."""
        self._given_up = True
        if self._at_work.acquire(timeout=COUNT_S):
            self._at_work.release()


def _make_way(name: str) -> None:
    """Make sure that no controller has the job's name; a controller whose job has ended is killed.

    Raises:
        JobError: a job of that name is running, or its controller does not answer.
    """
    import ray

    if (running := controller_of(name)) is None:
        return
    try:
        view = JobView.from_json(finish(ask(name, running, "view", calls=RayCalls())))
    except NoController:  # it has just ended
        return
    if view.outcome is None:
        raise JobError(
            f"a job {name!r} is running in this cluster (step {view.step} of {view.last_step}, in"
            f" {view.folder}): follow it with `freshet follow {name}`, end it with `freshet cancel {name}`, or choose"
            " another job.name"
        )
    ray.kill(running)


def _start(
    settled: Settled,
    folder: JobFolder,
    start: tuple[CheckpointRef, ...],
    marker: Marker,
    freezing: FreezeHistory,
    interrupted: Callable[[], bool],
) -> Any:
    """Create the job's controller, start the job, and return the controller.

    Raises:
        JobError: no controller can be created, or another one holds the folder.
        KeyboardInterrupt: `interrupted` became true before it had started. Its process starts for seconds, and a
            driver that is killed meanwhile could not stop the job.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    from orchestrator.cluster.ray_hosts import reap

    spec, name = settled.spec, settled.spec.job.name
    setup = ControllerConfig(
        config=settled.config,
        marker=(MARKER, marker.to_bytes()),
        replanner=replanner_of(settled),
        secret=secrets.token_bytes(32),
        profile=settled.profile,
        forest=settled.forest,
        unmatched=settled.outline.unmatched,
        train_samples=settled.outline.train_samples,
    )
    controller = _create(_order(settled, folder, start, freezing), setup, spec)
    try:
        _await_start(controller.start.remote(), interrupted)
    except KeyboardInterrupt:
        ray.kill(controller)
        reap(name)
        raise
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


def _order(
    settled: Settled, folder: JobFolder, start: tuple[CheckpointRef, ...], freezing: FreezeHistory
) -> Order:
    """The state that the job's lifecycle begins with."""
    spec = settled.spec
    _, generation = folder.incarnations()
    return Order(
        job=spec.job.name,
        epoch=settled.plan.epoch,
        generation=generation + 1,
        plan=settled.plan,
        schedule=settled.schedule,
        elastic=spec.elastic,
        checkpoints=start,
        timeout_s=spec.cluster.timeout_s,
        alternatives=settled.alternatives,
        freezing=freezing,
        packs=spec.freeze.pack != "off" and settled.profile is not None,
    )


def _await_start(starting: Any, interrupted: Callable[[], bool]) -> None:
    """Wait until the call `starting` is done, and raise what it raised; `GetTimeoutError` after `START_S`.

    Raises:
        KeyboardInterrupt: `interrupted` became true first.
    """
    import ray

    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if interrupted():
            raise KeyboardInterrupt
        if ray.wait([starting], timeout=LOOK_S)[0]:
            break
    ray.get(starting, timeout=0)


def _create(order: Order, setup: ControllerConfig, spec: Spec) -> Any:
    """Create the controller's actor.

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
            # After a kill, Ray restarts it, and it continues from its log.
            max_restarts=-1,
            num_cpus=0,
            # Each report is a call, whose record would stay in the cluster's memory.
            enable_task_events=False,
            # On the driver's node, whose files it shares; elsewhere once that node is gone.
            **preferring(ray.get_runtime_context().get_node_id()),
        ).remote(*in_pieces(order, setup, spec.model_dump(mode="json")))
    except ActorAlreadyExistsError as error:
        raise JobError(
            f"a job {name!r} has been started in this cluster just now: follow it with `freshet follow {name}`, end it"
            f" with `freshet cancel {name}`, or choose another job.name"
        ) from error
