"""Jobs that tests drive by hand: orders, plans, ranks' reports and the way to the first step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from orchestrator.events import types as events
from orchestrator.lifecycle import states
from orchestrator.lifecycle.effects import AppendToLog, Effect
from orchestrator.lifecycle.machine import handle
from orchestrator.lifecycle.states import FinishingCommit, Live, Order, Pending, Planning, State
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    Joined,
    Placed,
    PlanReady,
    RankLoaded,
    RankLost,
    Ready,
    Start,
    Stimulus,
    StoreUp,
)
from planner.freezing import FreezePlan
from planner.plan import Plan
from planner.schedule.registry import build
from planner.shards import Piece
from workers.config import ElasticConfig
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import (
    CheckpointReport,
    Outcome,
    RankPosition,
    StandbyReport,
    StepReport,
    SwitchReport,
)


def plan_of(ranks: int, layers: int = 3, **changes: object) -> Plan:
    """`layers` layers spread evenly over `ranks` ranks; the last ranks take the remainder."""
    cuts = [stage * layers // ranks for stage in range(ranks + 1)]
    fields = {
        "epoch": 1,
        "version": 1,
        "reason": "first",
        "layers": tuple(itertools.pairwise(cuts)),
        "stage_ranks": tuple(range(ranks)),
        "schedule": "1f1b",
        "chunks": 1,
        "microbatches": 2,
        "replicas": 1,
        **changes,
    }
    return Plan(**fields)  # pyright: ignore[reportArgumentType]


def order_of(ranks: int, *checkpoints: CheckpointRef, layers: int = 3, **changes: object) -> Order:
    """A job of `ranks` ranks that begins with the newest complete one of `checkpoints`."""
    plan = plan_of(ranks, layers)
    schedule = build("1f1b", ranks, 2, 1)
    fields = {
        "job": "j",
        "epoch": 1,
        "generation": 3,
        "plan": plan,
        "schedule": schedule,
        "checkpoints": checkpoints,
        "timeout_s": 30.0,
        **changes,
    }
    return Order(**fields)  # pyright: ignore[reportArgumentType]


PLAN = plan_of(2)
OLD, NEW = CheckpointRef(path="/out/4", step=4), CheckpointRef(path="/out/8", step=8)
ORDER = order_of(2)
RESUMED = order_of(2, NEW, OLD)
DAMAGE = DamagedCheckpoint(path="/out/8", file="head.safetensors", problem="its checksum differs")


def step_report(step: int, generation: int = 1) -> StepReport:
    return StepReport(
        generation=generation,
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        samples=2,
        tokens=0,
        step_s=0.1,
        bubble=0.1,
        skipped=False,
    )


def switch_report(place: int, plan: Plan, **changes: object) -> SwitchReport:
    """The rank at `place` follows `plan`."""
    fields = {
        "step": 1,
        "rank": place,
        "epoch": plan.epoch,
        "version": plan.version,
        "taken": (),
        "given": (),
        "brought_bytes": 0,
        "brought_s": 0.0,
        "stall_s": 0.0,
        "switched_s": 0.0,
        **changes,
    }
    return SwitchReport(**fields)  # pyright: ignore[reportArgumentType]


def standby_report(place: int, layers: tuple[int, ...], step: int = 2) -> StandbyReport:
    """The copies at `place` are up to date, after a switch as of `switch_report` or before it."""
    return StandbyReport(step=step, rank=place, layers=layers, bytes=0, seconds=0.0)


def checkpoint_report(step: int, path: str | None = None) -> CheckpointReport:
    return CheckpointReport(step=step, path=path or f"/out/{step}", bytes=1, seconds=0.1)


def outcome(rank: int, **changes: object) -> Outcome:
    """How `rank` of a two-rank job ended."""
    layers = {0: ((0, "a"),), 1: ((1, "b"), (2, "c"))}[rank]
    fields = {"rank": rank, "step": 9, "stopped": False, "layer_digests": layers, **changes}
    return Outcome(**fields)  # pyright: ignore[reportArgumentType]


class Job:
    """A job and all effects that it has issued."""

    def __init__(self, order: Order = ORDER) -> None:
        self.order = order
        self.state: State = Pending()
        self.effects: list[Effect] = []

    def take(self, *stimuli: Stimulus) -> Job:
        for stimulus in stimuli:
            self.state, effects = handle(self.order, self.state, stimulus)
            self.effects.extend(effects)
        return self

    @property
    def has(self) -> states.JobData:
        assert isinstance(self.state, Live)
        return self.state.job

    @property
    def without_logs(self) -> list[Effect]:
        return [effect for effect in self.effects if not isinstance(effect, AppendToLog)]

    @property
    def logged(self) -> list[events.Event]:
        return [effect.event for effect in self.effects if isinstance(effect, AppendToLog)]


def ready(rank: int) -> Ready:
    return Ready(rank, f"node{rank}", f"10.0.0.{rank}", 100 + rank)


PLANNED = PlanReady(PLAN, ORDER.schedule)
TO_PREPARED: tuple[Stimulus, ...] = (Start(), Placed(), ready(0), ready(1), PLANNED)
TO_TRAINING: tuple[Stimulus, ...] = (
    *TO_PREPARED,
    RankLoaded(0, None),
    RankLoaded(1, None),
    StoreUp("h", 7),
    Joined(1),
    Joined(0),
)


def train(job: Job) -> Job:
    """Bring `job` to its first step."""
    ranks = range(job.order.wanted)
    job.take(Start(), Placed(), *(ready(rank) for rank in ranks))
    job.take(PlanReady(job.order.plan, job.order.schedule), *(RankLoaded(rank, None) for rank in ranks))
    return job.take(StoreUp("h", 7), *(Joined(rank) for rank in ranks))


def pieces_of(layers: Iterable[int | Piece]) -> tuple[Piece, ...]:
    """Layers, or shards of them; a number is a whole layer."""
    return tuple(Piece(each) if isinstance(each, int) else each for each in layers)


def position(
    rank: int,
    step: int,
    holds: Iterable[int | Piece],
    *,
    weights: Iterable[int | Piece] = (),
    **changes: object,
) -> RankPosition:
    """The position that `rank` reports: its step, the layers, or shards of them, whose state it holds, and those of
    which it has only weights."""
    fields = {
        "rank": rank,
        "step": step,
        "holds": pieces_of(holds),
        "weights": pieces_of(weights),
        "host": f"10.0.0.{rank}",
        "port": 50 + rank,
        **changes,
    }
    return RankPosition(**fields)  # pyright: ignore[reportArgumentType]


SOLUTION = events.FreezeSolved(
    plan=FreezePlan(epoch=1, version=1, ratios=((0.5, 1.0),) * 3),
    ratios=((0, 0, 0.5), (0, 1, 1.0), (1, 0, 0.5), (1, 1, 1.0)),
    unfrozen_s=1.0,
    solved_s=0.75,
    all_frozen_s=0.5,
    outside_s=0.0,
    measured_unfrozen_s=1.0,
    measured_all_frozen_s=0.5,
    kappa=0.75,
    mean_per_stage=(0.75, 0.75),
    duals=(0.25, 0.0),
    critical=("0F0",),
    solve_s=0.01,
)


THREE = order_of(3, elastic=ElasticConfig(wait_s=60))
AT_ONCE = order_of(3, elastic=ElasticConfig(wait_s=60, migration="stop"))
"""The ranks regroup at the next commit for any change: nothing is copied ahead."""
DEAD = RankLost(1, "its process died", dead=True)
CUT_OFF = RankLost(0, "connection reset", cut_off=True)


def recovered(job: Job, plan: Plan, members: tuple[int, ...]) -> Job:
    """Bring `job`, whose commit is finished, to a new generation of `members`."""
    number = job.has.progress.round
    if isinstance(job.state, FinishingCommit):
        job.take(*(CommitFinished(rank, number) for rank in job.state.waiting))
    if isinstance(job.state, Planning):
        job.take(PlanReady(plan, build("1f1b", plan.pipeline_ranks, 2, 1), number))
    job.take(*(RankLoaded(rank, None, number) for rank in members), StoreUp("h", 8, number))
    return job.take(*(Joined(rank, number) for rank in members))
