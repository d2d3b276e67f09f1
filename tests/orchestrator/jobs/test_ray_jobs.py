"""Jobs on a real Ray cluster of two nodes: the same bits as without Ray, control in flight, clean ends."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from pace import patient
from ray._private.state import state
from ray.core.generated.gcs_pb2 import TaskEvents
from ray_jobs import Log, assert_nothing_left, state_sha256
from resolving import resolve_spec, settle_spec
from tiny_jobs import STEPS, tiny

from orchestrator.cli.jobs import status_lines
from orchestrator.cli.steering import steer
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.cluster.placement import preferring
from orchestrator.commands.cancel import Cancel
from orchestrator.controller.actor import Controller
from orchestrator.controller.ranks.runtime import Runtime
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.history.job_view import fold
from orchestrator.prepare.measuring import call_all, measure_on_cluster
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.prepare.profiling import key_of, obtain
from orchestrator.spec.job_spec import JobConfig, Spec
from orchestrator.trainer import PipelineTrainer
from workers.actor import CONTROL
from workers.control.rank_error import RankError
from workers.process.stacks import stacks
from workers.protocol.errors import JobError
from workers.protocol.reports import CheckpointReport, StepReport
from workers.transport.waiter import Waiter

SLOW = {"device": "emulated", "emulated": {"forward_s": 0.04, "input_grad_s": 0.02, "weight_grad_s": 0.02}}

KEEP = {"every_steps": 2, "keep": 3}


@pytest.fixture(autouse=True)
def nothing_left(two_nodes: None) -> Iterator[None]:
    yield
    assert_nothing_left()


@pytest.fixture(scope="module")
def expected(two_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    return state_sha256(tiny(folder, "plain", pipeline={"ranks": 1}))


def recorded_tasks() -> set[str]:
    """Names of the tasks of which the cluster keeps records, once it has a record of a task that runs now."""

    @ray.remote
    def probe() -> None:
        return

    ray.get(probe.remote())
    deadline = time.monotonic() + patient(30)
    while True:
        records = state._connect_and_get_accessor().get_task_events()
        names = {TaskEvents.FromString(record).task_info.name for record in records}
        if any(name.endswith("probe") for name in names):
            return names
        assert time.monotonic() < deadline, names
        time.sleep(0.1)


def test_a_job_spreads_over_the_nodes_and_has_the_bits_of_replicas_without_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job on Ray has two pipelines of two ranks each, the other one two pipelines of one rank each."""
    log = Log()
    spec = tiny(tmp_path, "whole", job={"curvature_every": 2}, pipeline={"replicas": 2})
    result = PipelineTrainer(spec, observe=log).fit()
    shown = capsys.readouterr().out
    assert f"step {STEPS}/{STEPS}  loss" in shown, "a script sees how its job gets on"
    expected = state_sha256(tiny(tmp_path, "threads", pipeline={"ranks": 2, "replicas": 2}))
    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["state_sha256"] == expected
    assert result.metrics["steps"] == STEPS
    assert result.metrics["final_loss"] < result.metrics["first_loss"]
    assert result.path == str(tmp_path / "whole")
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "manifest.json").exists()
    assert result.metrics_dataframe is not None
    assert list(result.metrics_dataframe["step"]) == list(range(1, STEPS + 1))
    nodes = {started.rank: started.node for started in log.of(events.RankStarted)}
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    zones = {started.rank: started.zone for started in log.of(events.RankStarted)}
    assert {zones[0], zones[2]} == {"east", "west"}
    records = list(read_log(tmp_path / "whole" / "events.jsonl"))
    assert [record.event for record in records] == log.events
    assert list(fold(records).curvature.samples) == [3, 5]
    log.assert_processes_gone()
    # Neither reports nor heartbeats stay in the cluster's memory.
    kept = {name for name in recorded_tasks() if name.startswith(("Controller.", "RankActor."))}
    # Calls of the ranks that measure for other jobs do stay, but they are few.
    assert not kept & {"Controller.report", "Controller.read", "RankActor.ping", "RankActor.train"}


def test_a_cluster_is_measured_by_ranks_that_leave_nothing_behind(tmp_path: Path) -> None:
    spec = absolute(tiny(tmp_path, "profiled", pipeline={"ranks": 2, "microbatch_size": 1}))
    found = outline_model(spec)
    settled = settle_spec(spec, found, {"CPU": 4})
    profile = obtain(settled, found, ranks=2, cache=tmp_path / "cache")
    assert tuple(layer.name for layer in profile.model.layers) == found.layers
    assert len(profile.cluster.devices) == len(profile.cluster.links) == 2
    assert profile.key == key_of(settled, 2)
    assert_nothing_left()
    with pytest.raises(JobError, match="no room to profile: the cluster lacks"):
        measure_on_cluster(
            resolve_spec(spec, found, {}, epoch=1).config, 99, {"CPU": 1.0}, wait_s=0.1, timeout_s=10
        )


def stuck() -> Any:
    """The class of such a rank. Defined in here, so that its process need not import this module."""

    class Stuck:
        """A rank that hangs where it should measure, and dies where it should join; or its neighbour."""

        def __init__(self, neighbour: bool) -> None:
            self._neighbour = neighbour

        def profile(self) -> None:
            if self._neighbour:
                Waiter("gather").get()
            threading.Event().wait()

        def join(self) -> None:
            if self._neighbour:
                raise RankError("ChannelError: a connection to another rank is broken", cut_off=True)
            os._exit(4)

        @ray.method(concurrency_group=CONTROL)
        def stacks(self) -> str:
            return stacks()

    return Stuck


def test_a_rank_that_hangs_or_dies_while_it_is_measured_is_named_with_its_stack() -> None:
    hosted: Any = ray.remote(concurrency_groups={CONTROL: 1})  # pyright: ignore[reportCallIssue]
    neighbour, dies, hangs = (
        hosted(stuck()).options(num_cpus=0).remote(neighbour) for neighbour in (True, False, False)
    )
    ray.get([actor.stacks.remote() for actor in (neighbour, dies, hangs)])
    with pytest.raises(
        JobError, match=r"profiled: the process of rank 1 died: killed, crashed, out of memory"
    ):
        call_all([neighbour, dies], "join", 30.0)
    said = (
        r"profiled: rank 1 did not answer within 2 s .*timeout_s\); rank 0 waited for other ranks\nrank 1:\n"
    )
    with pytest.raises(JobError, match=said) as late:
        call_all([neighbour, hangs], "profile", 2.0)
    assert "threading.Event().wait()" in str(late.value)
    assert "waiter.py" not in str(late.value)
    ray.kill(neighbour)
    ray.kill(hangs)


@pytest.mark.soak  # `test_ray_commands.py` stops a job, and one goes on with other ranks below
def test_stop_while_training_and_go_on_with_other_ranks(tmp_path: Path, expected: str) -> None:
    lines: list[str] = []

    def stop_at_two(record: events.Record) -> None:
        if isinstance(record.event, StepReport) and record.event.step == 2:
            lines.extend(status_lines("auto"))
            steer("auto", "halves", Cancel(), wait=False)

    # Steps take almost a second, so that the request arrives during one.
    log = Log(stop_at_two)
    first = PipelineTrainer(tiny(tmp_path, "halves", pipeline={"ranks": 1}, cluster=SLOW), observe=log).fit()
    assert first.error is None
    assert first.metrics is not None
    stopped_at = first.metrics["steps"]
    assert 2 <= stopped_at < STEPS
    assert lines[0].startswith("halves: training, step ")
    assert log.of(events.Finished)[0].stopped
    assert [report.step for report in log.of(CheckpointReport)] == [stopped_at]
    log.assert_processes_gone()

    other = {"ranks": 2, "partition": [1, 5], "schedule": "gpipe", "recompute": True}
    resumed = Log()
    second = PipelineTrainer(tiny(tmp_path, "halves", pipeline=other), resume=True, observe=resumed).fit()
    assert second.metrics is not None
    assert second.metrics["state_sha256"] == expected
    assert [report.step for report in resumed.of(StepReport)] == list(range(stopped_at + 1, STEPS + 1))
    formed = [*log.of(events.Formed), *resumed.of(events.Formed)]
    assert [(each.generation.epoch, each.generation.number) for each in formed] == [(1, 1), (2, 2)]


def test_what_a_layer_raises_is_a_users_error_and_not_tried_again(tmp_path: Path) -> None:
    model = {"family": None, "factory": "raising_model:build"}
    log = Log()
    spec = tiny(tmp_path, "raising", model=model, pipeline={"ranks": 1})
    said = r"rank 0: the forward pass of layer \S+ raised ValueError: this layer works no more, at .*raising_model\.py:"
    with pytest.raises(JobError, match=said):
        PipelineTrainer(spec, observe=log).fit()
    failed = log.of(events.RankFailed)
    assert [failure.rank for failure in failed] == [0], "it is not tried again"
    assert "raising_model.py" in failed[0].details
    log.assert_processes_gone()


def test_a_damaged_checkpoint_is_named_and_the_one_before_used_by_other_ranks(
    tmp_path: Path, finished_run: Path, expected: str
) -> None:
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    other = {"ranks": 2, "partition": [1, 5], "schedule": "gpipe", "recompute": True}
    # This damages the checkpoint of the last step; the job must not count as fully trained by it.
    newest = max((tmp_path / "done" / "checkpoints").iterdir())
    file = next(path for path in newest.iterdir() if path.name.endswith("head.weights.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    log = Log()
    spec = tiny(tmp_path, "done", pipeline=other, checkpoint=KEEP)
    result = PipelineTrainer(spec, resume=True, observe=log).fit()
    assert result.metrics is not None
    assert result.metrics["state_sha256"] == expected
    skipped = log.of(events.Skipped)
    assert [(each.damage.path, each.damage.file) for each in skipped] == [(str(newest), file.name)]
    assert [report.step for report in log.of(StepReport)] == [5, 6]


def test_one_name_one_job_and_an_end_at_once(tmp_path: Path) -> None:
    log = Log()
    errors: list[Exception | None] = []
    endless = tiny(
        tmp_path,
        "only",
        job={"steps": 100_000},
        pipeline={"ranks": 1},
        checkpoint={"every_steps": 5},
        cluster=SLOW,
    )
    trainer = PipelineTrainer(endless, observe=log)
    thread = threading.Thread(target=lambda: errors.append(trainer.fit().error))
    thread.start()
    log.wait_for(StepReport)
    marker = tmp_path / "only" / "job.json"
    before = marker.read_bytes()
    with pytest.raises(JobError, match=r"a job 'only' is running .* `freshet cancel only`"):
        PipelineTrainer(tiny(tmp_path / "elsewhere", "only")).fit()
    assert not (tmp_path / "elsewhere" / "only" / "job.json").exists()
    log.wait_for(CheckpointReport)
    with pytest.raises(JobError, match="a job 'only' is running"):
        PipelineTrainer(endless, resume=True).fit()
    assert marker.read_bytes() == before
    with pytest.raises(JobError, match=r"no job 'onyl' is running at [0-9.:]+; did you mean 'only'"):
        steer("auto", "onyl", Cancel(abort=True), wait=False)
    steer("auto", "only", Cancel(abort=True), wait=False)
    thread.join(60)
    assert "cancelled at once, on request" in str(errors[0])
    log.assert_processes_gone()


class Unreleasing(Runtime):
    """A runtime whose cluster releases everything and then does not answer."""

    async def release(self) -> None:
        await super().release()
        raise RuntimeError("no answer")


class Unlucky(Controller):
    def _make_runtime(self) -> Runtime:
        return Unreleasing(self._setup, self._hosts, self._loop.post, self._loop.spawn)


def test_a_release_that_fails_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.controller.actor.Controller", Unlucky)
    log = Log()
    error = PipelineTrainer(tiny(tmp_path, "unlucky", pipeline={"ranks": 1}), observe=log).fit().error
    assert "the controller failed: RuntimeError: no answer" in str(error)
    assert len(log.of(events.Failed)) == 1


class Stillborn(Controller):
    def __init__(self, *pieces: bytes) -> None:
        raise ValueError("no such thing here")


def sited() -> Any:
    """The class of an actor that tells its node. Defined in here, so that its process need not import this module."""

    class Sited:
        def node(self) -> str:
            return ray.get_runtime_context().get_node_id()

    return Sited


def test_an_actor_is_on_the_node_that_it_prefers() -> None:
    nodes = [node["NodeID"] for node in ray.nodes()]
    remote: Any = ray.remote(sited())
    actors = [remote.options(num_cpus=0, **preferring(node)).remote() for node in nodes]
    assert ray.get([actor.node.remote() for actor in actors]) == nodes


def test_a_controller_that_does_not_start_is_a_job_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.controller.actor.Controller", Stillborn)
    with pytest.raises(
        JobError, match=r"controller could not be started: ValueError: no such thing here; see"
    ):
        PipelineTrainer(tiny(tmp_path, "stillborn", pipeline={"ranks": 1})).fit()


@pytest.mark.soak  # as in `test_lifecycle.py`, where it is asked of every state before the first step
def test_a_stop_as_ranks_start_ends_the_job(tmp_path: Path) -> None:
    def stop_at_once(record: events.Record) -> None:
        if isinstance(record.event, events.RankStarted):
            BlockingJobClient().stop("early")

    log = Log(stop_at_once)
    assert PipelineTrainer(tiny(tmp_path, "early", pipeline={"ranks": 1}), observe=log).fit().error is None
    (end,) = log.of(events.Finished)
    # The ranks may be quicker than the request: then their first step ends.
    assert end.stopped
    assert end.step < 6


EPOCHS = 2.5


def in_epochs(spec: Spec) -> Spec:
    """The same job with `EPOCHS` in place of steps."""
    given = spec.job.model_dump(exclude_unset=True, exclude={"steps"})
    return spec.model_copy(update={"job": JobConfig(**given, epochs=EPOCHS)})


def test_a_job_that_reaches_its_goal_is_done_before_its_epochs_and_a_resume_has_nothing_to_do(
    tmp_path: Path,
) -> None:
    spec = in_epochs(
        tiny(tmp_path, "goal", job={"validate_every": 2, "stop_at": "loss <= 100"}, pipeline={"ranks": 1})
    )
    log = Log()
    result = PipelineTrainer(spec, observe=log).fit()
    assert result.error is None
    (end,) = log.of(events.Finished)
    assert (end.step, end.stopped) == (2, False)
    assert end.reached.startswith("loss ")
    (begun,) = log.of(events.Submitted)
    assert begun.spec["job"]["steps"] == math.ceil(EPOCHS * begun.train_samples / 8) > 2
    assert result.metrics is not None
    assert result.metrics["why"] == end.reached
    assert result.metrics["epochs"] == pytest.approx(2 * 8 / begun.train_samples)
    again = Log()
    assert PipelineTrainer(spec, resume=True, observe=again).fit().error is None
    assert not again.of(events.Issued), "no plan, no rank, no step"


@pytest.mark.soak  # on threads in `test_job_patience.py`; a goal ends a job above
def test_a_job_whose_patience_is_over_is_done_before_its_epochs_and_a_resume_has_nothing_to_do(
    tmp_path: Path,
) -> None:
    """With a rate so small that no weight changes: no validation is better than the first."""
    spec = in_epochs(
        tiny(
            tmp_path,
            "patient",
            job={"validate_every": 1, "patience": 2},
            optimizer={"lr": 1e-30},
            pipeline={"ranks": 1},
        )
    )
    log = Log()
    result = PipelineTrainer(spec, observe=log).fit()
    (end,) = log.of(events.Finished)
    assert (end.step, end.stopped, end.reached) == (3, False, "")
    assert end.plateau.startswith("no better than loss ")
    assert end.plateau.endswith(" of step 1 in 2 validations")
    (begun,) = log.of(events.Submitted)
    assert begun.spec["job"]["steps"] == math.ceil(EPOCHS * begun.train_samples / 8) > 3
    assert result.metrics is not None
    assert result.metrics["why"] == end.plateau
    assert result.metrics["epochs"] == pytest.approx(3 * 8 / begun.train_samples)
    again = Log()
    assert PipelineTrainer(spec, resume=True, observe=again).fit().error is None
    assert not again.of(events.Issued)


@pytest.mark.parametrize(
    ("sections", "expected_text"),
    [
        (
            {"cluster": {"resources_per_rank": {"CPU": 1, "GPU": 1}, "wait_s": 1}},
            r"the cluster lacks 4 GPU \(4 needed, 0 there\).*Waited 1 s \(cluster.wait_s\)",
        ),
        ({"cluster": {"resources_per_rank": {"CPU": 3}, "wait_s": 1}}, "lacks 8 CPU"),
        ({"pipeline": {"ranks": 16}}, "pipeline.ranks = 16 is more than the model can fill"),
        ({"data": {"path": "/nowhere.txt"}}, "nowhere.txt"),
    ],
)
def test_what_the_user_can_mend_is_a_job_error(
    tmp_path: Path, sections: dict[str, dict[str, object]], expected_text: str
) -> None:
    with pytest.raises(JobError, match=expected_text):
        PipelineTrainer(tiny(tmp_path, "wrong", **sections)).fit()


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({}, "nothing to do"),
        ({"model": {"width": 32}}, "model.width was 16 and is 32"),
        ({"job": {"seed": 3}}, "seed was 0 and is 3"),
        ({"optimizer": {"lr": 0.5}}, r"optimizer.lr was 0.001 and is 0.5"),
        ({"pipeline": {"microbatches": 8}}, "microbatches was 4 and is 8"),
        ({"job": {"steps": 3}}, "job.steps = 3, but the newest checkpoint is of step 6"),
    ],
)
def test_what_a_resume_may_not_change(
    finished_run: Path, changes: dict[str, dict[str, object]], expected_text: str
) -> None:
    sections: dict[str, dict[str, object]] = {"pipeline": {"ranks": 1}}
    for section, keys in changes.items():
        sections[section] = {**sections.get(section, {}), **keys}
    spec = tiny(finished_run, "done", **sections)
    if not changes:
        assert PipelineTrainer(spec, resume=True).fit().error is None
        return
    with pytest.raises(JobError, match=expected_text):
        PipelineTrainer(spec, resume=True).fit()


@pytest.fixture(scope="module")
def finished_run(two_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    spec = tiny(folder, "done", pipeline={"ranks": 1}, checkpoint=KEEP)
    assert PipelineTrainer(spec).fit().error is None
    with pytest.raises(JobError, match=r"holds a run of 'done' with 6 steps: go on .* with --resume"):
        PipelineTrainer(spec).fit()
    return folder
