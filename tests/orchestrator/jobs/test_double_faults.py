"""Two faults at once, a fault during the recovery from another, and commits that only some ranks have seen,
in complete jobs on plain processes without Ray."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fault_rows import assert_consistent
from process_hosts import ElasticJob, Ran, assert_gone
from ray_jobs import resolved
from rigs import all_gather_or_none
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.settling import Settled
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import FaultReport

STEPS = 8
FAULT_STEP = 5
"""The step in which most faults fire. The newest complete checkpoint before it is that of step 4."""
PAIRS = {0: 1, 1: 0, 2: 3, 3: 2}
"""For each of four ranks, the rank that keeps copies of its layers."""

Act = Callable[[ElasticJob, events.Event], None]


def job(folder: Path, **sections: dict[str, Any]) -> Settled:
    """A job of four ranks and eight steps, with a checkpoint after every other step."""
    given: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS, "sample_tokens": 0},
        "pipeline": {"microbatches": 2, "microbatch_size": 1},
        "checkpoint": {"every_steps": 2},
        "elastic": {"grow": False, "allow_faults": True},
    }
    for section, keys in sections.items():
        given[section] = {**given.get(section, {}), **keys}
    return resolved(tiny(folder, "job", **given))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state in which the job ends when no fault fires."""
    done = job(tmp_path_factory.mktemp("quiet"))
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def arming(faults: Mapping[int, Sequence[Fault]]) -> Act:
    """Arms the faults of each rank as soon as the rank is up, before the first step."""

    def act(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, events.RankStarted):
            for fault in faults.get(event.rank, ()):
                running.call(event.rank, "arm", fault)

    return act


def kill(phase: FaultPhase = FaultPhase.BACKWARD, step: int = FAULT_STEP) -> Fault:
    return Fault(kind=FaultKind.KILL, phase=phase, step=step)


def blind(step: int = FAULT_STEP) -> Fault:
    return Fault(kind=FaultKind.BLIND, step=step)


def check(ran: Ran, expected: str, fired: set[int]) -> None:
    """Check that the faults fired, every step has the undisturbed run's bits, and no process is left."""
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.state_sha256 == expected
    assert {report.rank for report in ran.of(FaultReport)} == fired
    assert set(ran.steps) == set(range(1, STEPS + 1))
    lost = sum(regrouped.steps_lost for regrouped in ran.of(events.Regrouped))
    assert len(ran.steps) == STEPS + lost
    assert_consistent(ran)
    assert_gone(ran.pids)


def cost(regrouped: events.Regrouped) -> int:
    """The number of lost committed steps that the reason states."""
    said = re.search(r"no remaining rank holds layers? .* which costs (\d+) committed step", regrouped.reason)
    assert said is not None, regrouped.reason
    return int(said[1])


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_rank_and_its_standby_fall_back_to_the_newest_checkpoint(
    tmp_path: Path, quiet: str, rank: int
) -> None:
    both = {rank, PAIRS[rank]}
    ran = ElasticJob(job(tmp_path), arming({each: [kill()] for each in both})).run()
    fired = {report.rank for report in ran.of(FaultReport)}
    check(ran, quiet, fired)
    assert fired <= both
    issued = ran.of(events.Issued)[0].plan
    assert {place for layer in issued.layers_of_rank(rank) for place in issued.standbys[layer]} == {
        PAIRS[rank]
    }
    lost = sum(cost(each) for each in ran.of(events.Regrouped) if each.steps_lost)
    assert lost == sum(each.steps_lost for each in ran.of(events.Regrouped))


def test_two_neighbours_cost_the_step_in_flight(tmp_path: Path, quiet: str) -> None:
    """The copies of their layers are on other ranks."""
    ran = ElasticJob(job(tmp_path), arming({1: [kill()], 2: [kill()]})).run()
    check(ran, quiet, {report.rank for report in ran.of(FaultReport)})
    assert all(each.steps_lost == 0 and each.rerun <= 1 for each in ran.of(events.Regrouped))
    assert {rank for each in ran.of(events.Regrouped) for rank in each.lost} == {1, 2}


@pytest.mark.parametrize(
    "call",
    [
        "position",
        pytest.param("finish_commit", marks=pytest.mark.soak),
        "follow",
        "host_store",
        pytest.param("join", marks=pytest.mark.soak),
        "train",
    ],
)
def test_a_kill_on_the_way_to_the_next_generation_is_recovered_from(
    tmp_path: Path, quiet: str, call: str
) -> None:
    """Rank 3 is killed when rank 2 is called to finish the commit, to follow, to join, and so on. Rank 2 has copies of
    rank 3's layers, and rank 0 of rank 1's."""
    ran = second_loss(tmp_path, call, 3)
    check(ran, quiet, {1})
    regrouped = ran.of(events.Regrouped)
    assert {rank for each in regrouped for rank in each.lost} == {1, 3}
    assert all(each.steps_lost == 0 for each in regrouped)


@pytest.mark.parametrize("call", ["finish_commit", pytest.param("follow", marks=pytest.mark.soak), "join"])
def test_the_last_holder_lost_during_the_recovery_costs_the_steps_since_the_checkpoint(
    tmp_path: Path, quiet: str, call: str
) -> None:
    ran = second_loss(tmp_path, call, 0)
    check(ran, quiet, {1})
    regrouped = ran.of(events.Regrouped)[-1]
    assert regrouped.lost in {(0, 1), (0,)}
    # Another rank may have received rank 1's layers before.
    assert regrouped.steps_lost == (cost(regrouped) if regrouped.steps_lost else 0)


def second_loss(folder: Path, call: str, victim: int) -> Ran:
    """Rank 1 is lost. Then `victim` is killed just when some rank receives `call` during the recovery."""
    running = ElasticJob(job(folder), arming({1: [kill()]}))
    passed_on, killed = running.hosts.call, []

    def called(rank: int, method: str, *arguments: Any) -> Any:
        lost = any(isinstance(event, FaultReport) for event in running.log)
        if lost and method == call and not killed:
            killed.append(victim)
            running.signal(victim)
        return passed_on(rank, method, *arguments)

    running.hosts.call = called
    ran = running.run()
    assert killed
    return ran


@pytest.mark.parametrize(
    ("blinded", "rerun"),
    [
        ((0, 3), 0),
        pytest.param((0, 1), 0, marks=pytest.mark.soak),
        pytest.param((1, 3), 0, marks=pytest.mark.soak),
        ((0, 1, 3), 1),
    ],
    ids=str,
)
def test_a_commit_that_some_have_seen_has_one_outcome(
    tmp_path: Path, quiet: str, blinded: tuple[int, ...], rerun: int
) -> None:
    """Rank 2 is killed after it has received all records, which the blinded ranks lose. If one other rank has
    them, all ranks adopt the step; if none has, all drop the step and run it again."""
    faults: dict[int, list[Fault]] = {rank: [blind()] for rank in blinded}
    act = arming({**faults, 2: [kill(FaultPhase.IN_COMMIT)]})
    ran = ElasticJob(job(tmp_path), act, rig=all_gather_or_none).run()
    check(ran, quiet, {2, *blinded})
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.lost, regrouped.rerun, regrouped.steps_lost) == ((2,), rerun, 0)
    assert ran.of(events.Formed)[1].step == FAULT_STEP - rerun


def test_if_the_rank_that_is_to_send_the_records_dies_another_one_is_asked(
    tmp_path: Path, quiet: str
) -> None:
    """Rank 2 is killed in the commit, whose records rank 1 loses. Ranks 0 and 3 have them."""
    act = arming({1: [blind()], 2: [kill(FaultPhase.IN_COMMIT)]})
    running = ElasticJob(job(tmp_path), act, rig=all_gather_or_none)
    passed_on, asked = running.hosts.call, list[int]()
    got: list[tuple[int, bool]] = []

    def called(rank: int, method: str, *arguments: Any) -> Any:
        if method == "finish_commit":
            got.append((rank, arguments[0].vector is not None))
        if method == "records":
            asked.append(rank)
            if len(asked) == 1:
                running.signal(rank)
        return passed_on(rank, method, *arguments)

    running.hosts.call = called
    ran = running.run()
    check(ran, quiet, {1, 2})
    assert asked == [0, 3]
    assert sorted(got) == [(1, True), (3, False)], "only the rank that lacks the records gets them"
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.lost, regrouped.rerun, regrouped.steps_lost) == ((0, 2), 0, 0)
    assert ran.of(events.Formed)[1].step == FAULT_STEP


def test_a_checkpoint_that_was_being_written_is_no_refuge(tmp_path: Path, quiet: str) -> None:
    """The job goes back to an earlier checkpoint, whose checksums have already arrived."""
    ran = ElasticJob(
        job(tmp_path, elastic={"redundancy": "checkpoint"}), arming({1: [kill(FaultPhase.SAVING, 6)]})
    ).run()
    check(ran, quiet, {1})
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.step in {2, 4}
    assert f"back to the checkpoint of step {regrouped.step}" in regrouped.reason
    assert cost(regrouped) == regrouped.steps_lost
    start = ran.of(events.Formed)[1].start
    assert start is not None
    assert start.step == regrouped.step


def test_peers_need_no_checkpoint_while_one_is_being_written(tmp_path: Path, quiet: str) -> None:
    ran = ElasticJob(job(tmp_path), arming({1: [kill(FaultPhase.SAVING, 6)]})).run()
    check(ran, quiet, {1})
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.steps_lost == 0
