"""A disturbed job, on plain processes: its rank is slow in the steps of the visits, its log says so, its bits stay; and
which specs cannot be disturbed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
from adapting_job import AdaptingJob
from lifecycle_jobs import step_report
from made_profile import made_profile
from process_hosts import ElasticJob
from resolving import resolve_spec
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.analysis.interference_time import interference_time
from orchestrator.client.following import JobResult, Observer
from orchestrator.events import types as events
from orchestrator.events.log import EventLog, read_log
from orchestrator.events.rehearsed import DisturbedSteps
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import fold
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.rehearsal.interference import disturbable, disturber, interference, train_disturbed
from orchestrator.spec.job_spec import Spec
from workers.fault_injection.fault import Fault
from workers.launch.ranks import LaunchedJob
from workers.protocol.errors import JobError

PASS_S = 0.01
"""Long beside what other work on the machine takes of a pass."""
STEPS = 50
VISITS = (DisturbedSteps(first=11, last=20), DisturbedSteps(first=31, last=40))


def emulated(folder: Path, pass_s: float = PASS_S, **job: Any) -> Spec:
    modelled = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), pass_s)
    return tiny(
        folder,
        "a",
        job={"steps": STEPS, "timeline_every": 0, **job},
        pipeline={"ranks": 2, "microbatches": 2},
        adapt={"policy": "measured"},
        cluster={"device": "emulated", "emulated": modelled},
    )


def test_a_job_is_disturbed_in_its_visits_adapts_and_keeps_its_bits(tmp_path: Path) -> None:
    faults: Queue[tuple[int, Fault]] = Queue()

    def play(spec: Spec, observe: Observer) -> JobResult:
        made = resolve_spec(spec, outline_model(absolute(spec)), {}, epoch=1)
        log = EventLog(JobFolder(spec.job.folder).events_path)

        def keep(event: events.Event) -> None:
            record = events.Record(time_s=time.time(), event=event)
            log.append(record)
            observe(record)

        def act(running: ElasticJob, event: events.Event) -> None:
            keep(event)
            with suppress(Empty):
                while True:
                    rank, fault = faults.get_nowait()
                    running.call(rank, "arm", fault)

        outline = made.outline
        profile = made_profile(
            outline.layers, outline.parameters, 2, weights=[PASS_S / 0.01] * len(outline.layers)
        )
        keep(events.Submitted(job="a", epoch=1, spec=made.spec.model_dump(mode="json"), resume=False))
        ran = AdaptingJob(made, act, profile).run()
        assert isinstance(ran.state, JobFinished)
        log.close()
        end = events.Finished(step=ran.state.step, stopped=False, state_sha256=ran.state_sha256)
        path = JobFolder(spec.job.folder).events_path
        return JobResult(spec=made.spec, partition=(3, 3), end=end, events_path=path, interrupted=False)

    spec = disturbable(emulated(tmp_path), None, 2, lambda text: None)
    plan = interference(spec, "heavy", None, None, None)
    assert (plan.rank, plan.visits) == (1, VISITS)
    said: list[str] = []
    done = train_disturbed(
        spec,
        plan,
        play,
        arm=lambda rank, fault: faults.put((rank, fault)),
        observe=lambda record: None,
        say=said.append,
    )
    # The rest of the tests may run beside it.
    assert [text for text in said if not text.startswith("this machine is disturbed")] == [
        "emulated devices: rank 1 gets 3 times slower by an injected fault, 2 times",
    ]
    run = fold(read_log(done.events_path))
    assert run.disturbed is not None
    assert (run.disturbed.rank, run.disturbed.visits) == (1, VISITS)
    (trial,) = interference_time([run]).trials
    assert [answer.first for answer in trial.answers] == [11, 31]
    # A busy machine may slow the ranks down beside that.
    assert all(answer.slowdown is not None and answer.slowdown > 2 for answer in trial.answers)
    assert trial.moves >= 1
    still = emulated(tmp_path / "quiet", pass_s=0.0)
    quiet = resolve_spec(still, outline_model(absolute(still)), {}, epoch=1)
    assert isinstance(done.end, events.Finished)
    assert (
        done.end.state_sha256
        == run_threads(LaunchedJob(quiet.config, quiet.plan, quiet.schedule)).state_sha256
    )


def test_real_ranks_have_a_core_each_unless_somebody_asks_for_more(tmp_path: Path) -> None:
    said: list[str] = []
    here = {"address": "local"}
    spec = tiny(tmp_path, "a", job={"steps": 60, "validate_every": 5}, cluster=here)
    spec = disturbable(spec, None, 2, said.append)
    assert (spec.pipeline.ranks, spec.cluster.pin_cores, spec.cluster.address) == (2, True, "local")
    assert (spec.job.validate_every, spec.job.sample_tokens) == (0, 0)
    text, bound = said
    assert text.startswith("2 ranks instead of 4: each has one of this machine's 2 cores")
    assert bound.startswith("each rank is bound to one core, as with cluster.pin_cores = true")
    said.clear()
    pinned = here | {"pin_cores": True}
    asked = disturbable(tiny(tmp_path, "a", cluster=pinned), 4, 2, said.append)
    assert (asked.pipeline.ranks, said) == (4, [])
    # A cut that is given needs its ranks.
    given = tiny(tmp_path, "a", pipeline={"ranks": 4, "partition": (1, 2, 2, 1)}, cluster=pinned)
    cut = disturbable(given, None, 2, said.append)
    assert (cut.pipeline.ranks, said) == (4, [])
    modelled = disturbable(emulated(tmp_path), None, 1, said.append)
    assert (modelled.pipeline.ranks, modelled.cluster.pin_cores) == (2, False)
    assert not any("core" in text for text in said)
    assert modelled.elastic.allow_faults
    plan = interference(spec, "light", "disk", None, None)
    comes = disturber(spec, plan, lambda rank, fault: None, said.append)
    assert comes.disturbed().by.startswith("a light neighbour (disk) on core ")
    comes.close()


def test_a_job_of_another_cluster_is_disturbed_on_this_machine_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = {"address": "10.0.0.1:6379", "pin_cores": True}
    spec = disturbable(tiny(tmp_path, "a", cluster=cluster), 2, 2, said.append)
    assert spec.cluster.address == "local"
    words = (
        "on this machine alone, where the neighbour comes: cluster.address = '10.0.0.1:6379' does not count"
    )
    assert said == [words]


def test_what_cannot_be_disturbed_is_refused(tmp_path: Path) -> None:
    for spec, cores, said in (
        (tiny(tmp_path, "a", cluster={"device": "cuda"}), 2, "does not slow a GPU down"),
        (tiny(tmp_path, "a"), 1, r"nowhere to move its layers.*this machine has 1 core"),
    ):
        with pytest.raises(JobError, match=said):
            disturbable(spec, None, cores, lambda text: None)
    spec = disturbable(emulated(tmp_path), None, 2, lambda text: None)
    real = disturbable(tiny(tmp_path, "a", job={"steps": 60}), None, 2, lambda text: None)
    for of, level, kind, rank, said in (
        (spec, "severe", None, None, "--interference severe: expected light or heavy"),
        (spec, "heavy", "disk", None, "--kind disk: no neighbour disturbs emulated devices"),
        (real, "heavy", "noise", None, "--kind noise: expected compute, hashes, memory"),
        (real, "heavy", None, 2, "--rank 2: the job has ranks 0 to 1"),
    ):
        with pytest.raises(JobError, match=said):
            interference(of, level, kind, rank, None)


def test_a_job_that_is_not_through_in_time_is_stopped_and_says_so(tmp_path: Path) -> None:
    stopped = threading.Event()
    said: list[str] = []

    def play(spec: Spec, observe: Observer) -> JobResult:
        path = JobFolder(spec.job.folder).events_path
        path.parent.mkdir(parents=True)
        log = EventLog(path)
        step = 0
        while not stopped.wait(0.001):
            step += 1
            record = events.Record(time_s=time.time(), event=step_report(step))
            log.append(record)
            observe(record)
        end = events.Finished(step=step, stopped=True, state_sha256=None)
        log.append(events.Record(time_s=time.time(), event=end))
        log.close()
        return JobResult(spec=spec, partition=(3, 3), end=end, events_path=path, interrupted=False)

    spec = emulated(tmp_path)
    plan = interference(spec, "heavy", None, 1, 10)
    done = train_disturbed(
        spec,
        plan,
        play,
        arm=lambda rank, fault: None,
        observe=lambda record: None,
        say=said.append,
        stop=stopped.set,
        limit_s=0.05,
    )
    (disturbed,) = [
        record.event for record in read_log(done.events_path) if isinstance(record.event, events.Disturbed)
    ]
    assert disturbed.out_of_time
    assert disturbed.others is not None
    assert any(text.startswith("time is over: the job is stopped at step ") for text in said)
