"""Complete jobs on plain processes of which a rank runs out of memory: a smaller plan runs the step again."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_hosts import ElasticJob, Ran
from relieved_job import RelievedJob
from rigs import MEMORY_BYTES, memory_falls
from test_elastic_jobs import at_step, job, once

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFailed
from orchestrator.prepare.planning import replanner_of
from orchestrator.prepare.settling import Settled
from planner.plan import Plan, recomputable
from planner.profile import Profile
from planner.search.recut import predicted
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.launch.profile import ProfileRequest, profile_processes
from workers.launch.ranks import LaunchedJob
from workers.profiling.measured import combine
from workers.protocol.reports import CheckpointReport, FaultReport, MemoryLow

# One process takes the profile for all tests.
pytestmark = pytest.mark.xdist_group("test_memory_jobs")

SHORT = 1
"""The place, and so the rank, that runs out of memory."""
STEPS = 8


def made(folder: Path, replicas: int = 1, shard: str = "none", **sections: dict[str, Any]) -> Settled:
    return job(
        folder,
        **sections,
        model={"layers": 8, "width": 32, "context": 32},
        pipeline={"microbatch_size": 8, "replicas": replicas, "shard": shard},
        elastic={"allow_faults": True, "grow": False},
        cluster={"device": "cpu"},
    )


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    config = made(tmp_path_factory.mktemp("profile")).config
    measured = combine(profile_processes(ProfileRequest(config=config, ranks=2, budget_s=0.0)), config)
    even = tuple(
        replace(layer, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01, update_s=0.0)
        for layer in measured.model.layers
    )
    return replace(measured, model=replace(measured.model, layers=even))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = made(tmp_path_factory.mktemp("quiet"))
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def run(resolved: Settled, profile: Profile | None, limit_bytes: int) -> Ran:
    """Run the job; from its fourth step or so on, tensors of the rank `SHORT` may take `limit_bytes`."""
    fault = Fault(kind=FaultKind.OOM, limit_bytes=limit_bytes)
    act = once(at_step(3), lambda running: running.call(SHORT, "arm", fault))
    return RelievedJob(resolved, act, profile=profile).run()


def peak_bytes(profile: Profile, resolved: Settled, plan: Plan | None = None) -> int:
    prediction = predicted(replanner_of(replace(resolved, profile=profile)), plan or resolved.plan, ("",) * 4)
    assert prediction is not None
    return prediction.memory.peak_bytes[SHORT]


def test_a_step_that_ran_out_of_memory_runs_again_under_a_smaller_plan(
    tmp_path: Path, profile: Profile, quiet: str
) -> None:
    resolved = made(tmp_path)
    peak = peak_bytes(profile, resolved)
    limit = int(0.9 * peak)
    ran = run(resolved, profile, limit)
    assert ran.state_sha256 == quiet
    assert ran.steps == list(range(1, STEPS + 1))
    (fired,) = ran.of(FaultReport)
    assert (fired.rank, fired.fault) == (SHORT, f"oom beyond {limit:,} bytes")
    (failed,) = ran.of(events.RankFailed)
    assert re.fullmatch(
        r"out of memory: [\d,]+ bytes could not be allocated beside the [\d,]+ that its tensors took, with [\d,]+ free",
        failed.error,
    )
    (short,) = ran.of(events.OutOfMemory)
    held, needed = short.shortage.held_bytes, short.shortage.needed_bytes
    assert held is not None
    assert needed is not None
    assert held <= limit < held + needed
    (limited,) = ran.of(events.MemoryLimited)
    assert limited.limit_bytes == int(0.95 * held)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.rerun, regrouped.steps_lost) == ("memory", (), 1, 0)
    assert ran.of(events.Formed)[-1].failures == 0, "a smaller plan is no failure that may recur for ever"
    _, smaller = ran.of(events.Issued)
    assert len(smaller.plan.layers_of_place(SHORT)) == 1
    assert len(resolved.plan.layers_of_place(SHORT)) == 2


def test_with_no_plan_small_enough_the_job_ends_with_the_numbers_and_a_checkpoint(
    tmp_path: Path, profile: Profile
) -> None:
    resolved = made(tmp_path)
    full = int(1.1 * peak_bytes(profile, resolved))
    devices = tuple(replace(device, memory_bytes=full) for device in profile.cluster.devices)
    ran = run(resolved, replace(profile, cluster=replace(profile.cluster, devices=devices)), 100_000)
    assert isinstance(ran.state, JobFailed)
    said = ran.state.reason
    assert re.search(
        r"no plan for 4 ranks: .* needs [\d,]+ bytes on rank 1, [\d,]+ more than the [\d,]+ it may", said
    )
    assert said.startswith("rank 1: out of memory: ")
    assert "What would help: a smaller pipeline.microbatch_size, more ranks (pipeline.ranks)" in said
    (saved,) = ran.of(CheckpointReport)
    assert f"The checkpoint of step {saved.step} stays: --resume goes on from it" in said
    assert saved.step >= 3
    assert not ran.of(events.Paused)


def test_without_a_profile_all_layers_recompute_and_beyond_that_the_job_ends(
    tmp_path: Path, profile: Profile, quiet: str
) -> None:
    resolved = made(tmp_path)
    recomputing = replace(resolved.plan, recompute=recomputable(10))
    limit = int(1.1 * peak_bytes(profile, resolved, recomputing))
    assert limit < 0.9 * peak_bytes(profile, resolved)
    ran = run(resolved, None, limit)
    assert ran.state_sha256 == quiet
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.cause == "memory"
    assert ran.of(events.Issued)[-1].plan.recompute == recomputable(10)
    assert [event.limit_bytes for event in ran.of(events.MemoryLimited)] == [None]

    ran = run(made(tmp_path / "less"), None, 100_000)
    assert isinstance(ran.state, JobFailed)
    assert "out of memory: " in ran.state.reason
    assert (
        "no smaller plan is known. What would help: pipeline.recompute = true, a smaller" in ran.state.reason
    )
    assert len(ran.of(events.Regrouped)) == 1


@pytest.mark.parametrize(
    ("replicas", "shard"), [pytest.param(1, "none", marks=pytest.mark.soak), (2, "optimizer")]
)
def test_layers_move_away_before_an_allocation_fails(
    tmp_path: Path, profile: Profile, replicas: int, shard: str
) -> None:
    """The rank sees the fall at its next microbatch; the controller moves layers at once, while training goes on."""
    begun_s: list[float] = []

    def act(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.Issued) and running.loop.state.__class__.__name__ == "Training":
            begun_s.append(time.time())

    resolved = made(tmp_path, replicas, shard, job={"steps": 20}, adapt={"policy": "measured"})
    ran = RelievedJob(resolved, act, profile=profile, rig=memory_falls).run()
    (low,) = ran.of(MemoryLow)
    assert (low.rank, low.place) == (SHORT, SHORT)
    assert low.step >= 4
    assert low.left_bytes == 100_000
    assert low.reserve_bytes == MEMORY_BYTES // 20
    (limited,) = ran.of(events.MemoryLimited)
    assert limited.limit_bytes == peak_bytes(profile, resolved) - (low.reserve_bytes - low.left_bytes)
    assert not ran.of(events.RankFailed)
    assert not ran.of(events.Regrouped)
    (moved,) = ran.of(events.Migrated)
    last = ran.of(events.Issued)[-1].plan
    assert last.shard == shard
    assert len(last.layers_of_place(SHORT)) < len(resolved.plan.layers_of_place(SHORT))
    assert peak_bytes(profile, resolved, last) <= limited.limit_bytes
    print(
        f"from the fall to the first plan of the move: {begun_s[0] - low.seen_s:.3f} s, in force at {moved.step}"
    )
    done = made(tmp_path / "quiet", replicas, job={"steps": 20})
    assert ran.state_sha256 == run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256
