"""Complete jobs on plain processes whose replicas share out optimizer states, and whose layers change ranks: with the
bits of whole states that stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapting_job import AdaptingJob
from fault_rows import assert_consistent
from made_profile import made_profile
from process_hosts import ElasticJob, Ran, assert_gone
from rigs import builds_nothing_while_ranks_wait, builds_slowly
from test_elastic_jobs import at_step, both, job
from test_moves import moving

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from orchestrator.lifecycle.migration import Mode
from orchestrator.lifecycle.states import JobFinished
from orchestrator.lifecycle.stimuli import Going
from orchestrator.prepare.settling import Settled
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import CopiedAhead, StandbyReport, StepReport, SwitchReport

STEPS = 24
PIPELINE = {"ranks": 4, "replicas": 2, "microbatches": 4}
LAYERS = 10
"""Five on each rank of a pipeline: of the first two, the last two move."""
SOURCES, TARGETS = (0, 2), (1, 3)


def made(folder: Path, *, shard: str = "optimizer", **sections: dict[str, Any]) -> Settled:
    """Four ranks in two pipelines, in 16 bits."""
    given = {
        "job": {"steps": STEPS, "precision": "bfloat16", **sections.pop("job", {})},
        "model": {"layers": LAYERS - 2},
        "pipeline": {**PIPELINE, "shard": shard, **sections.pop("pipeline", {})},
    }
    return job(folder, "job", **given, **sections)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = made(tmp_path_factory.mktemp("quiet"), shard="none")
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def check(ran: Ran, expected: str | None) -> None:
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.steps == list(range(1, STEPS + 1))
    assert_consistent(ran)
    assert sum(each.steps_lost for each in ran.of(events.Regrouped)) == 0
    assert expected is None or ran.state_sha256 == expected
    assert_gone(ran.pids)


@pytest.mark.parametrize(
    ("mode", "redundancy", "copy_every"),
    [
        pytest.param("live", "peer", 1, marks=pytest.mark.soak),
        ("live", "peer", 3),
        pytest.param("live", "checkpoint", 1, marks=pytest.mark.soak),
        ("deferred", "checkpoint", 1),
    ],
)
def test_layers_move_while_the_job_trains(
    tmp_path: Path, quiet: str, mode: Mode, redundancy: str, copy_every: int
) -> None:
    done = made(tmp_path, elastic={"redundancy": redundancy, "copy_every": copy_every})
    ran = ElasticJob(done, moving((3, 5), 1, mode), rig=builds_slowly).run()
    check(ran, quiet if mode == "live" else None)
    assert len(ran.of(events.Formed)) == 1
    (migrated,) = ran.of(events.Migrated)
    assert (migrated.mode, migrated.layers) == (mode, (3, 4))
    assert (migrated.source, migrated.target) == ((0, 0), (1, 1))
    # Weights and two moments in 32 bits, once for both pipelines.
    assert migrated.bytes == 12 * sum(done.outline.parameters[3:5])
    switches = ran.of(SwitchReport)
    assert {(s.rank, s.taken) for s in switches if s.taken} == {(place, (3, 4)) for place in TARGETS}
    assert {(s.rank, s.given) for s in switches if s.given} == {(place, (3, 4)) for place in SOURCES}
    last = ran.of(events.Issued)[-1].plan
    assert (last.layers, last.shards) == (((0, 3), (3, 10)), 2)
    copied, kept = ({len(places) for places in places} for places in (last.standbys, last.snapshots))
    assert copied == ({1} if (redundancy, copy_every) == ("peer", 1) else set())
    assert kept == ({1} if copy_every > 1 else set())


MOMENTS: dict[str, Callable[[ElasticJob, events.Event], bool]] = {
    "copying": lambda running, event: isinstance(event, events.Issued) and plans(running) == 2,
    "copied": lambda running, event: isinstance(event, SwitchReport),
    "taking": lambda running, event: isinstance(event, events.Issued) and plans(running) == 3,
    "taken": lambda running, event: isinstance(event, events.Migrated),
}
OFTEN = {("copied", 0), ("taken", 1)}
"""Before and after the move, in a source and in a target; `make bench` runs all cases."""
CASES = [
    pytest.param(moment, victim, marks=() if (moment, victim) in OFTEN else pytest.mark.soak)
    for moment in MOMENTS
    for victim in range(4)
]


def plans(running: ElasticJob) -> int:
    return sum(isinstance(event, events.Issued) for event in running.log)


@pytest.mark.parametrize(("moment", "victim"), CASES)
def test_a_loss_while_layers_move_costs_the_step_in_flight(
    tmp_path: Path, quiet: str, moment: str, victim: int
) -> None:
    fired: list[str] = []

    def inject(running: ElasticJob, event: events.Event) -> None:
        if not fired and MOMENTS[moment](running, event):
            fired.append(moment)
            running.signal(victim)

    ran = ElasticJob(made(tmp_path), both(moving((3, 5), 1), inject)).run()
    assert fired
    check(ran, quiet)
    assert {rank for each in ran.of(events.Regrouped) for rank in each.lost} == {victim}
    moved = bool(ran.of(events.Migrated))
    assert moved != any("is cancelled" in warned.text for warned in ran.of(events.Warned))
    assert moved or moment != "taken"


@pytest.mark.parametrize(
    ("spares", "leave"),
    [
        pytest.param(0, (0,), marks=pytest.mark.soak),
        (0, (3,)),
        (1, (2,)),
        pytest.param(1, (0, 1), marks=pytest.mark.soak),
    ],
)
def test_ranks_that_leave_with_notice_are_followed_shard_by_shard(
    tmp_path: Path, quiet: str, spares: int, leave: tuple[int, ...]
) -> None:
    """Three ranks go on in one pipeline, with whole layers put together from both shards, and one of them may be a
    spare; or a spare takes the place, and the shards. While ranks wait nothing is fetched, and no layer is built."""
    gone: list[events.Event] = []

    def go(running: ElasticJob, event: events.Event) -> None:
        up = sum(isinstance(each, events.RankStarted) for each in running.log)
        if not gone and isinstance(event, StepReport) and event.step >= 3 and up == 4 + spares:
            gone.append(event)
            running.post(Going(frozenset(leave), "file", 60.0, f"node{leave[0]}", "h"))

    done = made(tmp_path, elastic={"spares": spares, "redundancy": "checkpoint"})
    ran = ElasticJob(done, go, room=4 + spares, rig=builds_nothing_while_ranks_wait).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.fetched) == ("drain", leave, 0)
    then = ran.of(events.Issued)[-1].plan
    if spares:
        (copied,) = ran.of(CopiedAhead)
        (formed,) = ran.of(events.Formed)[1:]
        taken = then.layers_of_place(formed.generation.members.index(4))
        assert (copied.rank, copied.layers, copied.error, regrouped.joined) == (4, taken, None, (4,))
    if spares and len(leave) == 1:
        assert then.shards == 2
    else:
        assert (then.shards, then.world_size) == (1, 3)
        assert any(report.bytes for report in ran.of(StandbyReport))
    assert [warned.text for warned in ran.of(events.Warned) if "fetch" in warned.text] == []


@pytest.mark.parametrize("migration", ["live", pytest.param("stop", marks=pytest.mark.soak)])
def test_a_slow_rank_is_relieved(tmp_path: Path, quiet: str, migration: str) -> None:
    modelled = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 0.004)
    done = made(
        tmp_path,
        cluster={"device": "emulated", "emulated": modelled},
        elastic={"allow_faults": True, "migration": migration},
        adapt={"policy": "measured"},
    )

    def slow(running: ElasticJob, event: events.Event) -> None:
        if at_step(5)(event):
            for place in TARGETS:  # both: else their shares would change, not the cut
                running.call(place, "arm", Fault(kind=FaultKind.SLOW, factor=3.0))

    outline = done.outline
    profile = made_profile(outline.layers, outline.parameters, 4, weights=[0.4] * LAYERS)
    ran = AdaptingJob(done, slow, profile).run()
    check(ran, quiet)
    moves = [moved for moved in ran.of(events.Migrated) if moved.step > 5]
    assert {moved.mode for moved in moves} == {migration}
    then = ran.of(events.Issued)[-1].plan
    assert then.shards == 2
    assert len(then.layers_of_place(1)) < len(done.plan.layers_of_place(1))
