"""Complete elastic jobs on plain processes: after any loss they end with the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pace import patient
from process_hosts import ElasticJob, Ran, assert_gone
from ray_jobs import resolved
from rigs import dies_before_the_decision, never_settles
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.ranks import heartbeats, living
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFailed, JobFinished
from orchestrator.lifecycle.stimuli import Going, PauseAsked, ResumeAsked, SaveOrStop
from orchestrator.prepare.settling import Settled
from workers.launch.ranks import LaunchedJob
from workers.protocol.errors import JobError
from workers.protocol.orders import CheckpointRef, Request
from workers.protocol.reports import CheckpointReport, StepReport

STEPS = 8
EMULATED = {
    "device": "emulated",
    "emulated": {"forward_s": 0.002, "input_grad_s": 0.002, "weight_grad_s": 0.002},
}


def job(folder: Path, name: str = "job", **sections: dict[str, Any]) -> Settled:
    """A job of four ranks and eight steps."""
    given: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS, "sample_tokens": 0},
        "cluster": EMULATED,
        "elastic": {"grow": False},
    }
    for section, keys in sections.items():
        given[section] = {**given.get(section, {}), **keys}
    return resolved(tiny(folder, name, **given))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state in which the job ends when no fault fires."""
    done = job(tmp_path_factory.mktemp("quiet"))
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


Act = Callable[[ElasticJob, events.Event], None]


def once(true: Callable[[events.Event], bool], act: Callable[[ElasticJob], None]) -> Act:
    """Act on the first event for which `true` holds."""
    done: list[events.Event] = []

    def take(running: ElasticJob, event: events.Event) -> None:
        if not done and true(event):
            done.append(event)
            act(running)

    return take


def both(*acts: Act) -> Act:
    def take(running: ElasticJob, event: events.Event) -> None:
        for act in acts:
            act(running, event)

    return take


def at_step(step: int) -> Callable[[events.Event], bool]:
    return lambda event: isinstance(event, StepReport) and event.step == step


def joined(event: events.Event) -> bool:
    return isinstance(event, events.Regrouped) and event.cause == "join"


STOP = SaveOrStop(Request.STOP)


def check(ran: Ran, expected: str) -> None:
    """Check that no step is missing or doubled, no process is left, and the bits are those of `quiet`."""
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.state_sha256 == expected
    assert ran.steps == list(range(1, STEPS + 1))
    assert_gone(ran.pids)
    numbers = [formed.generation.number for formed in ran.of(events.Formed)]
    assert numbers == list(range(1, len(numbers) + 1))
    plans = [(issued.plan.epoch, issued.plan.version) for issued in ran.of(events.Issued)]
    assert all(earlier < later for earlier, later in itertools.pairwise(plans))


def test_a_quiet_job(tmp_path: Path, quiet: str) -> None:
    ran = ElasticJob(job(tmp_path)).run()
    check(ran, quiet)
    assert ran.of(events.Regrouped) == []
    (issued,) = ran.of(events.Issued)
    assert all(len(places) == 1 for places in issued.plan.standbys)


@pytest.mark.parametrize("rank", [0, *(pytest.param(rank, marks=pytest.mark.soak) for rank in (1, 3))])
def test_a_killed_rank_costs_the_step_in_flight_at_most(tmp_path: Path, quiet: str, rank: int) -> None:
    ran = ElasticJob(job(tmp_path), once(at_step(3), lambda running: running.signal(rank))).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.joined) == ("loss", (rank,), ())
    assert regrouped.steps_lost == 0
    assert [failed.rank for failed in ran.of(events.RankFailed)] == [rank]


def test_a_stopped_rank_is_hung_and_is_killed(tmp_path: Path, quiet: str) -> None:
    hung = once(at_step(3), lambda running: running.signal(2, signal.SIGSTOP))
    ran = ElasticJob(job(tmp_path, elastic={"hang_timeout_s": 5.0}), hung).run()
    check(ran, quiet)
    (failed,) = ran.of(events.RankFailed)
    assert failed.rank == 2
    assert failed.error.startswith("answered nothing for 5 s (elastic.hang_timeout_s), ")
    assert failed.error.endswith("its process is stopped, and was killed")
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.detect_s >= regrouped.silent_s >= 4.0, "it answered last before it was stopped"


def test_a_rank_that_is_stopped_and_goes_on_leaves_a_mark(
    tmp_path: Path, quiet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "STALL_S", 1.0)
    stopped_s = 1.5

    def stop(running: ElasticJob) -> None:
        running.signal(2, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(stopped_s, running.signal, 2, signal.SIGCONT)

    ran = ElasticJob(job(tmp_path), once(at_step(3), stop)).run()
    check(ran, quiet)
    assert ran.of(events.RankFailed) == []
    assert [stalled.rank for stalled in ran.of(events.Stalled) if stalled.seconds >= stopped_s - 0.1][:1] == [
        2
    ]


def test_a_rank_that_comes_to_no_end_is_killed_and_has_told_where_it_was(
    tmp_path: Path, quiet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "STACKS_S", patient(living.STACKS_S))
    kill = once(at_step(3), lambda running: running.signal(0))
    limit_s = patient(5.0)
    ran = ElasticJob(job(tmp_path), kill, rig=never_settles, timeout_s=limit_s).run()
    check(ran, quiet)
    killed, late = ran.of(events.RankFailed)
    assert (killed.rank, killed.details) == (0, "")
    assert late.rank == 2
    assert late.error.startswith(f"did not finish its commit within {limit_s:g} s (cluster.timeout_s)")
    assert late.error.endswith(", and was killed")
    assert late.details.startswith("thread MainThread:")
    assert "in wait_for_ever" in late.details


@pytest.mark.parametrize(
    "kind",
    [
        events.RankFailed,
        # `test_double_faults.py` kills ranks as they follow and join.
        pytest.param(events.Issued, marks=pytest.mark.soak),
        pytest.param(events.Formed, marks=pytest.mark.soak),
        events.Regrouped,
    ],
)
def test_a_second_loss_at_any_time_is_recovered_too(tmp_path: Path, quiet: str, kind: type) -> None:
    """It comes right after the first, while layers move, while the group forms, or as training goes on."""
    seen: list[events.Event] = []

    def again(running: ElasticJob, event: events.Event) -> None:
        if (
            any(isinstance(past, events.RankFailed) for past in running.log)
            and isinstance(event, kind)
            and not seen
        ):
            seen.append(event)
            running.signal(3)

    first = once(at_step(3), lambda running: running.signal(1))
    ran = ElasticJob(job(tmp_path), both(first, again)).run()
    assert seen
    check_steps = sorted(set(ran.steps))
    assert check_steps == list(range(1, STEPS + 1))
    assert ran.state_sha256 == quiet
    assert {rank for regrouped in ran.of(events.Regrouped) for rank in regrouped.lost} == {1, 3}


@pytest.mark.soak  # In `test_double_faults.py` they are lost in fewer steps.
def test_a_rank_and_its_standby_lost_at_once_go_back_to_the_checkpoint(tmp_path: Path, quiet: str) -> None:
    seen: list[int] = []

    def inject(running: ElasticJob, event: events.Event) -> None:
        saved = [report.step for report in running.log if isinstance(report, CheckpointReport)]
        if isinstance(event, StepReport) and saved and event.step >= saved[0] + 2 and not seen:
            seen.append(event.step)
            plan = running.resolved.plan
            (standby,) = plan.standbys[plan.layers_of_rank(1)[0]]
            running.signal(1)
            running.signal(standby)

    ran = ElasticJob(job(tmp_path, checkpoint={"every_steps": 2}, job={"steps": 16}), inject).run()
    assert isinstance(ran.state, JobFinished)
    assert seen
    lost = sum(regrouped.steps_lost for regrouped in ran.of(events.Regrouped))
    assert lost >= 1
    assert len(ran.steps) == 16 + lost
    calm = job(tmp_path / "calm", job={"steps": 16})
    assert ran.state_sha256 == run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule)).state_sha256


def test_a_spare_takes_the_place_of_who_is_lost(tmp_path: Path, quiet: str) -> None:
    def inject(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.RankStarted) and event.rank == 4:
            running.signal(2)

    spec = job(tmp_path, elastic={"spares": 1}, job={"steps": 30}, pipeline={"microbatches": 2})
    ran = ElasticJob(spec, inject, room=5).run()
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.lost, regrouped.joined) == ((2,), (4,))
    formed = ran.of(events.Formed)[-1]
    assert formed.generation.members == (0, 1, 4, 3)
    assert ran.steps == list(range(1, 31))
    calm = job(tmp_path / "calm", job={"steps": 30}, pipeline={"microbatches": 2})
    assert ran.state_sha256 == run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule)).state_sha256


def test_too_few_ranks_wait_for_room_and_go_on(tmp_path: Path, quiet: str) -> None:
    def take(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.RankFailed):
            running.hosts.most = 3
        if isinstance(event, events.Paused):
            running.hosts.most = 4

    inject = once(at_step(3), lambda running: running.signal(2))
    ran = ElasticJob(job(tmp_path, elastic={"min_ranks": 4}), both(inject, take)).run()
    check(ran, quiet)
    assert len(ran.of(events.Paused)) == 1
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.joined) == ("capacity", (2,), (4,))


def check_that_a_drain_that_leaves_too_few_loses_no_step(done: Settled, quiet: str) -> None:
    """Ranks 1 and 2 of a job with `min_ranks = 4` get notice, and are killed once a checkpoint is written; then others
    come."""

    def take(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.Paused):
            running.hosts.most = 0
        if isinstance(event, CheckpointReport) and event.error is None and not gone:
            gone.append(event.step)
            for rank in (1, 2):
                running.signal(rank)
            running.hosts.most = 8

    gone: list[int] = []
    go = once(at_step(3), lambda running: running.post(Going(frozenset({1, 2}), "file", 30.0, "n", "h")))
    ran = ElasticJob(done, both(go, take)).run()
    check(ran, quiet)
    (pause,) = ran.of(events.Paused)
    assert gone == [pause.step]
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.step, regrouped.steps_lost, regrouped.rerun) == (pause.step, 0, 0)
    assert regrouped.lost == (1, 2)


@pytest.mark.parametrize("redundancy", ["checkpoint", pytest.param("peer", marks=pytest.mark.soak)])
def test_a_drain_that_leaves_too_few_loses_no_step(tmp_path: Path, quiet: str, redundancy: str) -> None:
    """Only leaving ranks hold their layers: these are written before the ranks are gone."""
    done = job(tmp_path, elastic={"min_ranks": 4, "redundancy": redundancy})
    check_that_a_drain_that_leaves_too_few_loses_no_step(done, quiet)


def test_a_job_that_gives_up_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, quiet: str) -> None:
    inject = once(at_step(3), lambda running: running.signal(2))
    ran = ElasticJob(job(tmp_path, elastic={"min_ranks": 4, "wait_s": 0.0}), inject).run()
    assert isinstance(ran.state, JobFailed)
    (saved,) = ran.of(CheckpointReport)
    assert saved.error is None
    assert f"The checkpoint of step {saved.step} stays" in ran.state.reason
    assert saved.step == ran.steps[-1]
    done = job(tmp_path)
    start = CheckpointRef(path=saved.path, step=saved.step)
    assert run_threads(LaunchedJob(done.config, done.plan, done.schedule, start=start)).state_sha256 == quiet


def test_a_wait_for_room_ends(tmp_path: Path) -> None:
    def take(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.RankFailed):
            running.hosts.most = 0

    inject = once(at_step(3), lambda running: running.signal(2))
    spec = job(tmp_path, elastic={"min_ranks": 4, "wait_s": 0.3})
    ran = ElasticJob(spec, both(inject, take)).run()
    assert isinstance(ran.state, JobFailed)
    assert "3 ranks left, and elastic.min_ranks = 4; no capacity came within 0.3 s" in ran.state.reason


def test_ranks_that_are_to_go_hand_over_and_go(tmp_path: Path, quiet: str) -> None:
    go = once(at_step(3), lambda running: running.post(Going(frozenset({1, 2}), "file", 30.0, "n", "h")))
    ran = ElasticJob(job(tmp_path, elastic={"migration": "stop"}), go).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.rerun) == ("drain", (1, 2), 0)
    assert ran.of(events.RankFailed) == []


def test_where_all_are_to_go_the_job_pauses_with_a_checkpoint_and_loses_no_step(
    tmp_path: Path, quiet: str
) -> None:
    """All machines are gone before new ones come."""

    def paused(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.Paused):
            for rank in range(4):
                running.signal(rank)

    go = once(at_step(3), lambda running: running.post(Going(frozenset(range(4)), "file", 30.0, "n", "h")))
    ran = ElasticJob(job(tmp_path), both(go, paused)).run()
    check(ran, quiet)
    (pause,) = ran.of(events.Paused)
    assert pause.step in [saved.step for saved in ran.of(CheckpointReport) if saved.error is None]
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.step, regrouped.rerun, regrouped.steps_lost) == (pause.step, 0, 0)


def test_a_pause_gives_the_ranks_back_and_a_resume_ends_with_the_same_bits(
    tmp_path: Path, quiet: str
) -> None:
    def resume(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.Paused):
            running.post(ResumeAsked())
        if isinstance(event, events.RankStarted) and event.rank >= 4:
            held.append(set(running.runtime.homes))

    def pause_slowly(running: ElasticJob) -> None:
        end = running.hosts.end

        async def leave(rank: int) -> None:
            # The last rank takes longer to leave than the job waits between two looks for room.
            await asyncio.sleep(0.5 * rank if rank < 4 else 0.0)
            await end(rank)

        running.hosts.end = leave
        running.post(PauseAsked())

    held: list[set[int]] = []
    pause = once(at_step(3), pause_slowly)
    ran = ElasticJob(job(tmp_path), both(pause, resume)).run()
    check(ran, quiet)
    (paused,) = ran.of(events.Paused)
    assert paused.requested
    assert paused.step in [saved.step for saved in ran.of(CheckpointReport) if saved.error is None]
    # All old ranks have left when the new ones come, and those come together: room for only some of them,
    # while the last old ones leave, must not resume the job with fewer ranks.
    assert len(held) == 4
    assert set.union(*held) == {4, 5, 6, 7}
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.step) == ("resume", paused.step)
    assert (regrouped.rerun, regrouped.steps_lost) == (0, 0)


def test_a_stop_while_ranks_are_lost_is_obeyed(tmp_path: Path) -> None:
    def stop(running: ElasticJob) -> None:
        running.signal(1)
        running.post(SaveOrStop(Request.STOP))

    ran = ElasticJob(job(tmp_path, job={"steps": 500}), once(at_step(3), stop)).run()
    assert isinstance(ran.state, JobFinished)
    assert ran.state.stopped
    assert ran.steps == list(range(1, ran.state.step + 1))


def test_a_node_that_comes_is_planned_in(tmp_path: Path) -> None:
    def take(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.RankFailed):
            running.hosts.most = 3
        if isinstance(event, events.Regrouped) and event.cause == "loss":
            running.hosts.most = 4

    inject = once(at_step(3), lambda running: running.signal(1))
    spec = job(tmp_path, elastic={"grow": True}, job={"steps": 300})
    ran = ElasticJob(spec, both(inject, take, once(joined, lambda running: running.post(STOP)))).run()
    assert isinstance(ran.state, JobFinished), ran.state
    loss, join = ran.of(events.Regrouped)
    assert (loss.lost, loss.joined) == ((1,), ())
    assert (join.cause, join.lost, join.joined, join.rerun) == ("join", (), (4,), 0)
    assert ran.of(events.Formed)[-1].generation.members == (0, 2, 3, 4)
    assert ran.steps == list(range(1, ran.state.step + 1))
    calm = job(tmp_path / "calm", elastic={"grow": True}, job={"steps": 300})
    quiet = LaunchedJob(calm.config, calm.plan, calm.schedule, stop_at=ran.state.step)
    assert ran.state_sha256 == run_threads(quiet).state_sha256


def test_an_owner_killed_between_the_gradients_it_sends_ahead_and_the_decision_costs_no_committed_step(
    tmp_path: Path,
) -> None:
    """Rank 1 is lost, and rank 4 comes: it follows owners' layers, and one of them dies within a commit."""
    joining = 4

    def take(running: ElasticJob, event: events.Event) -> None:
        losses = sum(isinstance(one, events.RankFailed) for one in running.log)
        if isinstance(event, events.RankFailed):
            running.hosts.most = 3
        if isinstance(event, events.Regrouped) and losses == 1:
            running.hosts.most = 4

    def trains_again(event: events.Event) -> bool:
        return isinstance(event, StepReport) and event.generation == 3

    inject = once(at_step(3), lambda running: running.signal(1))
    stop = once(trains_again, lambda running: running.post(STOP))
    spec = job(tmp_path, elastic={"grow": True}, job={"steps": 1000})
    ran = ElasticJob(
        spec, both(inject, take, stop), rig=partial(dies_before_the_decision, folder=tmp_path)
    ).run()

    owner, step = map(int, (tmp_path / "killed").read_text().split())
    first, second = ran.of(events.Regrouped)
    assert (first.lost, second.cause, second.lost, second.joined) == ((1,), "loss", (owner,), (joining,))
    assert joining in ran.of(events.Formed)[-1].generation.members
    # Every rank dropped the step whose gradients had travelled ahead; it was run again.
    assert (second.step, second.rerun, second.steps_lost) == (step - 1, 1, 0)
    (report,) = [report for report in ran.of(StepReport) if report.step == step]
    assert report.generation == second.generation
    applied = tmp_path / "applied"
    assert f"2 {step}" not in (applied.read_text().splitlines() if applied.exists() else [])
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.steps == list(range(1, ran.state.step + 1))
    calm = job(tmp_path / "calm", elastic={"grow": True}, job={"steps": 1000})
    quiet = LaunchedJob(calm.config, calm.plan, calm.schedule, stop_at=ran.state.step)
    assert ran.state_sha256 == run_threads(quiet).state_sha256
    assert_gone(ran.pids)


def test_replicas_go_on_when_one_loses_a_rank(tmp_path: Path) -> None:
    def spec(folder: Path) -> Settled:
        return job(folder, pipeline={"ranks": 4, "replicas": 2})

    inject = once(at_step(3), lambda running: running.signal(2))
    ran = ElasticJob(spec(tmp_path), inject).run()
    calm = spec(tmp_path / "calm")
    check(ran, run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule)).state_sha256)


def test_peers_need_more_than_one_rank(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the job has 1"):
        job(tmp_path, pipeline={"ranks": 1}, elastic={"redundancy": "peer"})
