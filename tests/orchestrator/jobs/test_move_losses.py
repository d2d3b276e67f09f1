"""Losses of a source, a target or another rank at every stage of a move of layers: the move happens
completely or not at all, and the bits are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_rows import assert_consistent
from process_hosts import ElasticJob, Ran, assert_gone
from test_elastic_jobs import both, once
from test_moves import long_job, moving

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import FaultReport, SwitchReport

STEPS = 24
SOURCE, TARGET, ASIDE = 1, 2, 3
LAYERS = (3, 5)
MOMENTS: dict[str, Callable[[ElasticJob, events.Event], bool]] = {
    "copying": lambda running, event: isinstance(event, events.Issued) and plans(running) == 2,
    "copied": lambda running, event: isinstance(event, SwitchReport),
    "taking": lambda running, event: isinstance(event, events.Issued) and plans(running) == 3,
    "taken": lambda running, event: isinstance(event, events.Migrated),
}


OFTEN = {("copying", TARGET), ("copied", SOURCE), ("taking", ASIDE), ("taken", TARGET)}
"""Cases that cover each moment and each rank; `make bench` runs all cases."""
CASES = [
    pytest.param(moment, victim, marks=() if (moment, victim) in OFTEN else pytest.mark.soak)
    for moment in MOMENTS
    for victim in (SOURCE, TARGET, ASIDE)
]


def plans(running: ElasticJob) -> int:
    return sum(isinstance(event, events.Issued) for event in running.log)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = long_job(tmp_path_factory.mktemp("quiet"), job={"steps": STEPS})
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def run(folder: Path, *acts: Callable[[ElasticJob, events.Event], None]) -> Ran:
    """A job in which layers move from rank 1 to rank 2, which has no copy of them."""
    elastic: dict[str, Any] = {"grow": False, "allow_faults": True}
    done = long_job(folder, job={"steps": STEPS}, elastic=elastic)
    return ElasticJob(done, both(moving(LAYERS, TARGET), *acts)).run()


def check(ran: Ran, expected: str, lost: set[int]) -> None:
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.steps == list(range(1, STEPS + 1))
    assert_consistent(ran)
    assert {rank for each in ran.of(events.Regrouped) for rank in each.lost} == lost
    assert all(each.steps_lost == 0 and each.rerun <= 1 for each in ran.of(events.Regrouped))
    assert ran.state_sha256 == expected
    assert_gone(ran.pids)


@pytest.mark.parametrize(("moment", "victim"), CASES)
def test_a_loss_while_layers_move_costs_the_step_in_flight(
    tmp_path: Path, quiet: str, moment: str, victim: int
) -> None:
    fired: list[str] = []

    def inject(running: ElasticJob, event: events.Event) -> None:
        if not fired and MOMENTS[moment](running, event):
            fired.append(moment)
            running.signal(victim)

    ran = run(tmp_path, inject)
    assert fired
    check(ran, quiet, {victim})
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost) == ("loss", (victim,))
    moved = bool(ran.of(events.Migrated))
    void = [warned.text for warned in ran.of(events.Warned) if "is cancelled" in warned.text]
    assert moved != bool(void)
    if moment == "copied" and not moved:
        assert "the move of layers 3, 4 is cancelled: the generation ended before they had moved" in void
    if moment == "taken":
        assert moved


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.RAISE])
def test_state_that_does_not_arrive_is_asked_for_again_unless_who_asked_is_dead(
    tmp_path: Path, quiet: str, kind: FaultKind
) -> None:
    def arm(running: ElasticJob) -> None:
        running.call(TARGET, "arm", Fault(kind=kind, phase=FaultPhase.MIGRATING))

    up = once(lambda event: isinstance(event, events.RankStarted) and event.rank == TARGET, arm)
    ran = run(tmp_path, up)
    (report,) = ran.of(FaultReport)
    assert (report.rank, report.phase) == (TARGET, FaultPhase.MIGRATING)
    assert len(ran.of(events.Migrated)) == (1 if kind is FaultKind.RAISE else 0)
    check(ran, quiet, {TARGET} if kind is FaultKind.KILL else set())
