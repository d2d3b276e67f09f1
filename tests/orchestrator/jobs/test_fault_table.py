"""Every phase x every kind of rank x every way to fail x every way to keep state: one outcome each, and the same bits.

The rows with the same way to fail and the same way to keep state run one after the other in one job. `make
test` runs a job for each way to keep state, with rows that cover each pair of the other three dimensions; `make
bench` runs all rows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from fault_rows import Row, Running, Table, Told, assert_consistent
from process_hosts import ElasticJob, Ran, assert_gone
from ray_jobs import resolved
from resting import Resting
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.requests.move_request import move_of_layers
from orchestrator.events import types as events
from orchestrator.lifecycle.moves import expected
from orchestrator.lifecycle.states import JobFinished, Live
from orchestrator.lifecycle.stimuli import Migrate
from orchestrator.prepare.settling import Settled
from planner.arrivals import arrivals
from planner.wording import counted
from workers.checkpoint.folder import checkpoints
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.errors import JobError

pytestmark = pytest.mark.timeout(900)

PHASES = (
    FaultPhase.FORWARD,
    FaultPhase.BACKWARD,
    FaultPhase.BEFORE_COMMIT,
    FaultPhase.IN_COMMIT,
    FaultPhase.AFTER_COMMIT,
    FaultPhase.SAVING,
    FaultPhase.MIGRATING,
    FaultPhase.RECOVERING,
)
KINDS = (FaultKind.KILL, FaultKind.STOP, FaultKind.RAISE)
WHERE = ("first", "middle", "last")
KEEPING = ("peer", "checkpoint", "replicas", "shards", "snapshots")
COVER = dict(
    zip(
        KEEPING,
        (FaultKind.KILL, FaultKind.STOP, FaultKind.RAISE, FaultKind.KILL, FaultKind.STOP),
        strict=True,
    )
)
"""The way to fail of the job that `make test` runs for each way to keep state."""
PRECISION = {"shards": "bfloat16"}
RANKS, SPARES = 4, 2
EVERY_STEPS = {"snapshots": 40}
"""Steps between checkpoints, 2 unless named."""
COPY_EVERY = 3
HANG_S = 2.0
LIMIT_S = 800.0


@dataclass(frozen=True)
class OneJob:
    """What all rows of one job share."""

    keeping: str
    kind: FaultKind
    whole: bool
    """Whether the job runs all rows, or only those of `COVER`."""

    def __str__(self) -> str:
        return f"{self.keeping}-{self.kind}" + ("-whole" if self.whole else "")

    def table(self) -> list[tuple[FaultPhase, str]]:
        rows = [
            (phase, where) for phase in PHASES for where in WHERE if self.whole or self._covers(phase, where)
        ]
        # The ranks of the first replica write the checkpoints.
        return [
            row
            for row in rows
            if self.keeping != "replicas" or row[0] is not FaultPhase.SAVING or row[1] == "first"
        ]

    def _covers(self, phase: FaultPhase, where: str) -> bool:
        """Each phase in one job of each kind, at another rank in each kind; layers migrate in each kind of `TABLES`."""
        row = PHASES.index(phase)
        jobs = [keeping for keeping, kind in COVER.items() if kind is self.kind]
        place = (row + KINDS.index(self.kind) + 2) % 3
        return self.keeping == jobs[(row + 1) % len(jobs)] and WHERE.index(where) == place

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Marks that have one process run the job once."""
        return [pytest.mark.xdist_group(str(self)), *([pytest.mark.soak] if self.whole else [])]


ALL = [OneJob(keeping, kind, False) for keeping, kind in COVER.items()]
ALL += [OneJob(keeping, kind, True) for keeping in KEEPING for kind in KINDS]
JOBS = [pytest.param(one, marks=one.marks, id=str(one)) for one in ALL]
ROWS = [
    pytest.param(one, *row, marks=one.marks, id=f"{one}-{'-'.join(row)}")
    for one in ALL
    for row in one.table()
]


def job(folder: Path, keeping: str, kind: FaultKind | None = None) -> Settled:
    """A job of four ranks and two spares."""
    pipeline: dict[str, Any] = {"microbatches": 2, "microbatch_size": 1}
    if keeping in ("replicas", "shards"):
        pipeline |= {"replicas": 2}
    if keeping == "shards":
        pipeline |= {"shard": "optimizer"}
    spec = tiny(
        folder,
        "job",
        job={"steps": 100_000, "sample_tokens": 0, "precision": PRECISION.get(keeping, "float32")},
        # Enough for each row that moves some.
        model={"layers": 8} if keeping == "checkpoint" else {},
        pipeline=pipeline,
        checkpoint={"every_steps": EVERY_STEPS.get(keeping, 2)},
        elastic={
            "redundancy": "checkpoint" if keeping == "checkpoint" else "peer",
            "copy_every": COPY_EVERY if keeping == "snapshots" else 1,
            "copies_in": "host" if keeping == "shards" else "auto",
            "spares": SPARES,
            "grow": False,
            "allow_faults": True,
            "hang_timeout_s": HANG_S if kind is FaultKind.STOP else 30.0,
        },
    )
    return resolved(spec)


@dataclass(frozen=True)
class FaultedJob:
    """A job after all its rows."""

    ran: Ran
    told: dict[Row, Told]
    quiet_sha256: str
    """The state of an undisturbed run of the same job at the same step."""
    output: str


RunFaults = Callable[[OneJob], FaultedJob]


class MovingTable(Table):
    """A table for jobs in which a layer moves because the table requests it: no rank keeps copies, or states are shared
    out."""

    def _migrate(self, running: Running, row: Row, rank: int) -> None:
        assert isinstance(running, ElasticJob)
        state = running.loop.state
        assert isinstance(state, Live)
        # A move of the row before, in which something was raised, may still be under way.
        plan, place = expected(state.job)[0], state.job.membership.members.index(rank)
        first, stop = plan.layers[plan.place(place).rank]
        given = [(first - 1, first), (stop, stop + 1), (first - 2, first), (stop, stop + 2)]
        for layers in given:
            try:
                move = move_of_layers(
                    state.job, running.setup.replanner, layers, rank, mode="live", asked_s=time.time()
                )
            except JobError:
                continue
            if all(target != place for _, target in arrivals(plan, move.plan)):
                continue  # its copies take over, and nothing is fetched
            ends = row.kind is not FaultKind.RAISE
            told = Told(rank, self.job.members, self.job.step, self.job.saved, ends=ends)
            self._inject(running, row, told)
            running.post(Migrate(move))
            return
        raise AssertionError(f"no layer can move to rank {rank} by {plan}")


class FetchingTable(Table):
    """A table for jobs whose ranks fetch snapshots all the time: there the fault need not be led up to, and what is
    raised is asked for again."""

    def _migrate(self, running: Running, row: Row, rank: int) -> None:
        ends = row.kind is not FaultKind.RAISE
        told = Told(rank, self.job.members, self.job.step, self.job.saved, ends=ends)
        self._inject(running, row, told)


TABLES = {"checkpoint": MovingTable, "shards": MovingTable, "snapshots": FetchingTable}


def run_with_faults(folder: Path, one: OneJob) -> FaultedJob:
    """Run a job with the faults of its rows to the end."""
    keeping, kind = one.keeping, one.kind
    done = job(folder, keeping, kind)
    copied = keeping in ("peer", "shards", "snapshots")
    resting = Resting(least=RANKS, standbys=copied, checkpoint=keeping == "checkpoint")
    acting = TABLES.get(keeping, Table)([Row(phase, where, kind) for phase, where in one.table()], resting)
    ran = ElasticJob(done, acting, room=RANKS + SPARES).run(LIMIT_S)
    assert isinstance(ran.state, JobFinished), ran.state
    calm = job(folder / "calm", keeping)
    quiet = run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule, stop_at=ran.state.step))
    return FaultedJob(ran, acting.told, quiet.state_sha256, done.config.job.folder)


@pytest.fixture(scope="module")
def inject(tmp_path_factory: pytest.TempPathFactory) -> RunFaults:
    """Runs each job once, even if it fails."""
    known: dict[OneJob, FaultedJob | Exception] = {}

    def faulted(one: OneJob) -> FaultedJob:
        if one not in known:
            try:
                known[one] = run_with_faults(tmp_path_factory.mktemp("faulted"), one)
            except Exception as error:
                known[one] = error
        found = known[one]
        if isinstance(found, Exception):
            raise found
        return found

    return faulted


@pytest.mark.parametrize(("one", "phase", "where"), ROWS)
def test_a_fault_has_one_outcome(inject: RunFaults, one: OneJob, phase: FaultPhase, where: str) -> None:
    keeping, kind = one.keeping, one.kind
    told = inject(one).told[Row(phase, where, kind)]
    assert told.fired is not None, "it never fired"
    assert (told.fired.rank, told.fired.phase) == (told.rank, phase)
    if not told.ends:
        assert (told.failed, told.regrouped) == ([], [])
        return
    assert told.failed == [rank for rank in (told.lost, told.rank) if rank is not None]
    (regrouped,) = told.regrouped
    lost = told.lost if told.lost is not None else None if kind is FaultKind.RAISE else told.rank
    assert (regrouped.cause, regrouped.lost) == (("retry", ()) if lost is None else ("loss", (lost,)))
    assert regrouped.rerun <= 1
    if keeping == "checkpoint" and kind is not FaultKind.RAISE:
        assert f"back to the checkpoint of step {regrouped.step}" in regrouped.reason
        assert regrouped.step >= told.checkpoint
        assert f"costs {counted(regrouped.steps_lost, 'committed step')}" in regrouped.reason
    elif keeping == "snapshots" and kind is not FaultKind.RAISE:
        assert regrouped.step >= told.checkpoint
        if regrouped.steps_lost:
            # A checkpoint may be the newer of the two.
            back = rf"back to the (snapshot|checkpoint) of step {regrouped.step}, which costs"
            assert re.search(f"{back} {counted(regrouped.steps_lost, 'committed step')}", regrouped.reason)
        else:
            assert "back to" not in regrouped.reason
    else:
        assert regrouped.steps_lost == 0


@pytest.mark.parametrize("one", JOBS)
def test_all_end_with_the_bits_of_the_quiet_run(inject: RunFaults, one: OneJob) -> None:
    faulted = inject(one)
    ran = faulted.ran
    assert ran.state_sha256 == faulted.quiet_sha256
    assert_consistent(ran)
    again = sum(regrouped.steps_lost for regrouped in ran.of(events.Regrouped))
    assert isinstance(ran.state, JobFinished)
    assert len(ran.steps) == ran.state.step + again
    assert set(ran.steps) == set(range(1, max(ran.steps) + 1))
    gone_back = [formed.step for formed in ran.of(events.Formed) if formed.snapshot]
    if one.keeping != "snapshots" or one.kind is FaultKind.RAISE:
        assert gone_back == []


@pytest.mark.parametrize("one", JOBS)
def test_nothing_is_left_of_them(inject: RunFaults, one: OneJob) -> None:
    """No process is left, and so no port; the folder contains only complete checkpoints."""
    faulted = inject(one)
    assert_gone(faulted.ran.pids)
    whole = {ref.path for ref in checkpoints(faulted.output)}
    written = {str(path) for path in (Path(faulted.output) / "checkpoints").iterdir()}
    assert written == whole


def test_the_rows_of_make_test_cover_every_way_to_keep_state_and_every_pair_of_the_others() -> None:
    cover = [(one.kind, *row) for one in ALL if not one.whole for row in one.table()]
    whole = [(one.kind, *row) for one in ALL if one.whole for row in one.table()]
    for first, second in combinations(range(3), 2):
        assert {(row[first], row[second]) for row in cover} == {(row[first], row[second]) for row in whole}
    assert {one.keeping for one in ALL if not one.whole and one.table()} == set(KEEPING)
