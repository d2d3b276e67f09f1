"""Complete jobs on plain processes whose replicas share out optimizer states: what happens to ranks changes no bit."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_hosts import ElasticJob
from test_elastic_jobs import (
    at_step,
    both,
    check,
    check_that_a_drain_that_leaves_too_few_loses_no_step,
    job,
    once,
)
from test_freeze_control import ControlledJob

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.requests.move_request import move_of_layers
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.states import Training
from orchestrator.lifecycle.stimuli import Going, Migrate, PauseAsked, ResumeAsked
from orchestrator.prepare.settling import Settled
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import CheckpointReport, FreezeStarted

PIPELINE = {"ranks": 4, "replicas": 2}


def shared(folder: Path, **sections: dict[str, Any]) -> Settled:
    """Four ranks in two pipelines, in 16 bits, with copies of shards."""
    pipeline = {**PIPELINE, "shard": "optimizer", **sections.pop("pipeline", {})}
    precision = {"precision": "bfloat16", **sections.pop("job", {})}
    return job(folder, pipeline=pipeline, job=precision, **sections)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state in which the job ends with whole states, when no fault fires."""
    done = job(tmp_path_factory.mktemp("quiet"), pipeline=PIPELINE, job={"precision": "bfloat16"})
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def test_a_quiet_job_has_the_bits_of_whole_states(tmp_path: Path, quiet: str) -> None:
    done = shared(tmp_path)
    ran = ElasticJob(done).run()
    check(ran, quiet)
    (issued,) = ran.of(events.Issued)
    assert issued.plan.shards == 2
    assert {len(places) for _, places in issued.plan.copied} == {1}
    (warned,) = ran.of(events.Warned)
    assert 'pipeline.shard = "optimizer" saves no memory here: between 2 replicas' in warned.text


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.soak)])
def test_a_killed_rank_costs_the_step_in_flight_at_most(tmp_path: Path, quiet: str, rank: int) -> None:
    """Three ranks go on in other pipelines, and so with other shards."""
    ran = ElasticJob(shared(tmp_path), once(at_step(3), lambda running: running.signal(rank))).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.steps_lost) == ("loss", (rank,), 0)


@pytest.mark.soak  # Spares take places of jobs with whole states, and of ranks that leave with notice.
def test_a_spare_takes_the_place_of_who_is_lost(tmp_path: Path) -> None:
    # Enough steps for a spare to start in.
    steps = {"steps": 30}

    def inject(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.RankStarted) and event.rank == 4:
            running.signal(2)

    ran = ElasticJob(shared(tmp_path, elastic={"spares": 1}, job=steps), inject, room=5).run()
    calm = job(tmp_path / "calm", pipeline=PIPELINE, job={"precision": "bfloat16", **steps})
    assert ran.state_sha256 == run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule)).state_sha256
    assert ran.steps == list(range(1, 31))
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.lost, regrouped.joined, regrouped.steps_lost) == ((2,), (4,), 0)
    assert ran.of(events.Formed)[-1].generation.members == (0, 1, 4, 3)


def test_freezing_that_is_switched_on_goes_through_a_loss(tmp_path: Path) -> None:
    """The log has the plan that the ranks followed, and samples of the steps before."""
    settings = {"check_every": 1, "apf_threshold": 0.8, "apf_alpha": 0.5}
    made = shared(tmp_path, job={"steps": 16, "curvature_every": 2, "precision": "float32"}, freeze=settings)
    asked = ControlledJob(
        made,
        JobView(),
        {4: lambda it: it.ask(method="apf"), 10: lambda it: it.running.signal(3)},
    )
    ran = asked.run()
    assert asked.said == ["freezes by apf from a commit on"]
    assert [failed.rank for failed in ran.of(events.RankFailed)] == [3]
    assert 3 in asked.view.curvature.samples
    (started,) = ran.of(FreezeStarted)
    whole = replace(made.plan, shard="none", standbys=())
    work = LaunchedJob(made.config, whole, made.schedule, freeze_plans=(started.plan,))
    expected = run_threads(work)
    assert ran.state_sha256 == expected.state_sha256
    assert ran.state_sha256 != run_threads(replace(work, freeze_plans=())).state_sha256


def test_ranks_that_are_to_go_hand_over_and_go(tmp_path: Path, quiet: str) -> None:
    go = once(at_step(3), lambda running: running.post(Going(frozenset({1, 2}), "file", 30.0, "n", "h")))
    ran = ElasticJob(shared(tmp_path, elastic={"migration": "stop"}), go).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.rerun) == ("drain", (1, 2), 0)
    assert ran.of(events.RankFailed) == []


def test_layers_move_between_two_steps(tmp_path: Path, quiet: str) -> None:
    def move(running: ElasticJob) -> None:
        state = running.loop.state
        assert isinstance(state, Training)
        plan = state.job.progress.plan
        stop = plan.layers[0][1]
        asked = move_of_layers(
            state.job, running.setup.replanner, (stop, stop + 1), 0, mode="stop", asked_s=time.time()
        )
        running.post(Migrate(asked))

    ran = ElasticJob(shared(tmp_path), once(at_step(3), move)).run()
    check(ran, quiet)
    assert ran.of(events.RankFailed) == []
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.rerun) == ("move", (), 0)
    (migrated,) = ran.of(events.Migrated)
    assert (migrated.mode, migrated.bytes) == ("stop", None)
    assert 0 <= migrated.steps <= regrouped.step - 3
    plans = [issued.plan for issued in ran.of(events.Issued)]
    assert len({plan.layers for plan in plans}) == 2
    assert all(plan.shards == 2 and len(plan.copied) == 12 for plan in plans)


@pytest.mark.soak  # A drain that leaves too few ranks writes the same checkpoint and takes it up again.
def test_a_pause_gives_the_ranks_back_and_a_resume_ends_with_the_same_bits(
    tmp_path: Path, quiet: str
) -> None:
    def resume(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.Paused):
            running.post(ResumeAsked())

    pause = once(at_step(3), lambda running: running.post(PauseAsked()))
    ran = ElasticJob(shared(tmp_path), both(pause, resume)).run()
    check(ran, quiet)
    (paused,) = ran.of(events.Paused)
    assert paused.step in [saved.step for saved in ran.of(CheckpointReport) if saved.error is None]


@pytest.mark.parametrize("redundancy", ["peer", pytest.param("checkpoint", marks=pytest.mark.soak)])
def test_a_drain_that_leaves_too_few_writes_whole_layers_first(
    tmp_path: Path, quiet: str, redundancy: str
) -> None:
    """Every shard's only holders may be among those that leave."""
    done = shared(tmp_path, elastic={"min_ranks": 4, "redundancy": redundancy})
    check_that_a_drain_that_leaves_too_few_loses_no_step(done, quiet)
