"""`elastic.copies = 2`: a rank and a rank that keeps copies of its layers die in one instant, in complete jobs on plain
processes without Ray, and no committed step is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from process_hosts import ElasticJob, Ran, assert_gone
from test_double_faults import STEPS, Act, arming, job, kill

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.requests.move_request import move_of_layers
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFailed, JobFinished, Training
from orchestrator.lifecycle.stimuli import Migrate
from orchestrator.prepare.settling import Settled
from workers.fault_injection.kinds import FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import FaultReport, StandbyReport, StepReport, SwitchReport

OWNER = 1
"""The rank that is lost with one of its standbys."""
WARNING = "elastic.copies = 2 needs 3 failure domains, and the job has 2 nodes"


def twice(folder: Path, steps: int = STEPS) -> Settled:
    return job(folder, job={"steps": steps}, elastic={"copies": 2})


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state in which the job ends when no rank is lost."""
    done = job(tmp_path_factory.mktemp("quiet"))
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def together(ranks: set[int]) -> Act:
    """Kills all of `ranks` as soon as an armed fault fires in one of them, which waits until its report has arrived."""

    def act(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, FaultReport):
            for rank in ranks:
                running.signal(rank)

    return act


def first_copy(done: Settled) -> int:
    """A rank that keeps copies of layers of `OWNER`, which has the same number as its place."""
    return done.plan.standbys[done.plan.layers_of_rank(OWNER)[0]][0]


def check(ran: Ran, expected: str, lost: set[int]) -> None:
    """Check that `lost` died in one instant, and that this cost no committed step and no bit."""
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.state_sha256 == expected
    assert ran.steps == list(range(1, ran.state.step + 1))
    (regrouped,) = ran.of(events.Regrouped)
    assert (set(regrouped.lost), regrouped.steps_lost) == (lost, 0)
    assert regrouped.rerun <= 1
    assert_gone(ran.pids)


@pytest.mark.parametrize(
    "phase",
    [
        # Ends the step as a kill in its backward pass does.
        pytest.param(FaultPhase.FORWARD, marks=pytest.mark.soak),
        FaultPhase.BACKWARD,
        pytest.param(FaultPhase.BEFORE_COMMIT, marks=pytest.mark.soak),
        FaultPhase.IN_COMMIT,
        FaultPhase.AFTER_COMMIT,
    ],
)
def test_an_owner_and_its_first_copy_lost_in_one_instant_cost_no_committed_step(
    tmp_path: Path, quiet: str, phase: FaultPhase
) -> None:
    done = twice(tmp_path)
    lost = {OWNER, first_copy(done)}
    arm, strike = arming({rank: [kill(phase)] for rank in lost}), together(lost)

    def act(running: ElasticJob, event: events.Event) -> None:
        arm(running, event)
        strike(running, event)

    ran = ElasticJob(done, act).run()
    assert {report.phase for report in ran.of(FaultReport)} == {phase}
    # Each lost layer had one holder left: with one copy the job would have gone back to its checkpoint.
    plan = ran.of(events.Issued)[0].plan
    left = [{*plan.owners_of(layer), *plan.copies_of(layer)} - lost for layer in plan.layers_of_rank(OWNER)]
    assert min(map(len, left)) == 1
    check(ran, quiet, lost)
    assert [warned.text[: len(WARNING)] for warned in ran.of(events.Warned)] == [WARNING]


def test_layers_that_moved_have_two_copies_again(tmp_path: Path) -> None:
    """A layer moves while the job trains. As soon as the copies of the plan that follows are current, its new owner
    and one of its copies are lost."""
    done = twice(tmp_path, 40)
    moved, target = done.plan.layers_of_rank(OWNER)[0], OWNER - 1
    asked: list[int] = []
    lost: set[int] = set()
    current: set[int] = set()

    def act(running: ElasticJob, event: events.Event) -> None:
        state = running.loop.state
        if isinstance(event, StepReport) and not asked:
            assert isinstance(state, Training)
            asked.append(event.step)
            move = move_of_layers(
                state.job,
                running.setup.replanner,
                (moved, moved + 1),
                target,
                mode="live",
                asked_s=time.time(),
            )
            running.post(Migrate(move))
        if isinstance(event, SwitchReport):
            current.discard(event.rank)
        if isinstance(event, StandbyReport):
            current.add(event.rank)
        told = any(isinstance(known, events.Migrated) for known in running.log)
        if told and len(current) == 4 and not lost and isinstance(state, Training):
            if state.job.intents.migration is not None:
                return
            lost.update({target, state.job.progress.plan.copies_of(moved)[0]})
            for rank in lost:
                running.signal(rank)

    ran = ElasticJob(done, act).run()
    assert asked
    assert lost
    assert [len(places) for places in ran.of(events.Issued)[-2].plan.standbys] == [2] * 6
    calm = job(tmp_path / "calm", job={"steps": 40})
    check(ran, run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule)).state_sha256, lost)


def test_more_copies_than_nodes_are_refused_at_the_start(tmp_path: Path) -> None:
    ran = ElasticJob(twice(tmp_path), node_of=lambda rank: f"node{rank % 2}").run()
    assert isinstance(ran.state, JobFailed)
    assert ran.state.user_error
    assert ran.state.reason.startswith(WARNING)
    assert ran.steps == []
    assert_gone(ran.pids)
