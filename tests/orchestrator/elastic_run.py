"""The event log of a realistic elastic job: losses, joins, returns to checkpoints, and a full ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from orchestrator.events.rehearsed import CopiesSaved, NodeLife, Rehearsed
from orchestrator.events.types import (
    Event,
    Finished,
    Formed,
    RankEnded,
    RankFailed,
    RankStarted,
    Record,
    Regrouped,
    Submitted,
)
from orchestrator.verify.ledger import Batches
from workers.data.dataset import Batch
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import CheckpointReport, Outcome, PrefixFrozen, StepReport
from workers.reproducibility.digest import state_digest

TRAIN_SAMPLES = 50
SPEC: dict[str, Any] = {
    "model": {"family": "gpt"},
    "job": {"name": "elastic", "seed": 5, "steps": 1000},
    "data": {"source": "elastic_run:Samples"},
    "pipeline": {"ranks": 4, "replicas": 2, "microbatches": 3, "microbatch_size": 2},
    "cluster": {"device": "emulated"},
}
BATCHES = Batches.of(SPEC)


class Samples:
    """A data set that nobody trains on."""

    train_samples = TRAIN_SAMPLES
    validation_samples = 0

    def train(self, indices: list[int]) -> Batch:
        return Batch(inputs=(torch.zeros(len(indices), 4),), targets=())

    def validation(self, indices: list[int]) -> Batch:
        raise LookupError(indices)


@dataclass
class ElasticRun:
    """A job whose events a test dictates; `clock_s` is the time of the next event."""

    records: list[Record] = field(default_factory=list)
    clock_s: float = 1000.0
    step: int = 0
    generation: int = 0
    members: tuple[int, ...] = ()
    checkpoint: int = 0
    """Step of the newest checkpoint."""
    growth: dict[int, int] = field(default_factory=dict)
    """First step -> how many times the first batch a step has from then on."""
    told: set[int] = field(default_factory=set)
    """Steps of `growth` that the log tells of."""

    @property
    def batches(self) -> Batches:
        course = BATCHES.course
        for step, times in sorted(self.growth.items()):
            course = course.grown(step, times, "linear")
        return Batches.of(SPEC, course.further)

    def grow(self, step: int) -> None:
        """Tell of the leg that begins with `step`, if one does."""
        if step in self.growth and step not in self.told:
            self.told.add(step)
            leg = self.batches.course.at(step)
            self.put(PrefixFrozen(step=step, layers=step, bound=0.0, norms=(), names=(), leg=leg))

    def put(self, event: Event) -> None:
        self.records.append(Record(time_s=self.clock_s, event=event))

    def submit(self, *, epoch: int = 1, resume: bool = False) -> None:
        self.put(Submitted(job="elastic", epoch=epoch, spec=SPEC, resume=resume))
        self.epoch = epoch

    def rank(self, rank: int) -> None:
        """A rank comes up, on a node of its own."""
        self.put(RankStarted(rank=rank, node=f"node-{rank}", host="127.0.0.1", pid=100 + rank))

    def form(self, members: tuple[int, ...], *, from_checkpoint: bool = False) -> None:
        self.generation += 1
        self.members = members
        if from_checkpoint:
            self.step = self.checkpoint
            self.told = {step for step in self.told if step <= self.step + 1}
        generation = Generation(
            number=self.generation,
            epoch=self.epoch,
            members=members,
            store_host="127.0.0.1",
            store_port=1,
            timeout_s=60,
        )
        start = None
        if from_checkpoint and self.checkpoint:
            start = CheckpointRef(path=f"checkpoints/step-{self.checkpoint:08d}-gen-1", step=self.checkpoint)
        self.put(Formed(generation=generation, start=start, step=self.step))

    def train(self, steps: int, step_s: float = 1.0) -> None:
        """Commit `steps` steps, each of which takes `step_s`."""
        for _ in range(steps):
            self.grow(self.step + 1)
            self.step += 1
            self.clock_s += step_s
            self.put(self.report(step_s))

    def report(self, step_s: float) -> StepReport:
        return StepReport(
            generation=self.generation,
            step=self.step,
            loss=2.0,
            grad_norm=1.0,
            lr=0.1,
            samples=self.batches.course.at(self.step).batch,
            tokens=0,
            step_s=step_s,
            bubble=0.1,
            skipped=False,
            committed_s=self.clock_s,
            samples_digest=self.batches.digest(self.step, TRAIN_SAMPLES),
        )

    def save(self) -> None:
        """Complete a checkpoint of the newest step."""
        self.checkpoint = self.step
        path = f"checkpoints/step-{self.step:08d}-gen-{self.generation}"
        self.put(CheckpointReport(step=self.step, path=path, bytes=10, seconds=0.1))

    def lose(self, rank: int, after_s: float = 0.5) -> None:
        """A rank dies `after_s` into the step in flight."""
        self.clock_s += after_s
        self.put(RankFailed(rank=rank, error="its process died"))

    def regroup(
        self,
        members: tuple[int, ...],
        *,
        cause: str = "loss",
        parts: tuple[float, float, float, float, float] = (0.1, 0.2, 0.3, 0.4, 0.5),
        lost: tuple[int, ...] = (),
        joined: tuple[int, ...] = (),
        from_checkpoint: bool = False,
    ) -> None:
        """Start a new generation after the five parts of its recovery."""
        before = self.step
        detect_s, settle_s, plan_s, move_s, resume_s = parts
        self.clock_s += detect_s + settle_s + plan_s + move_s
        self.form(members, from_checkpoint=from_checkpoint)
        self.clock_s += resume_s
        self.put(
            Regrouped(
                generation=self.generation,
                cause=cause,
                reason="as the test says",
                lost=lost,
                joined=joined,
                step=self.step,
                rerun=1 if cause == "loss" else 0,
                steps_lost=before - self.step,
                detect_s=detect_s,
                settle_s=settle_s,
                plan_s=plan_s,
                move_s=move_s,
                resume_s=resume_s,
            )
        )

    def finish(self, *, stopped: bool = True) -> None:
        """End the job, stopped or fully trained. Every member ends with one layer of its own."""
        digests = [f"{place:064x}" for place in range(len(self.members))]
        for place, rank in enumerate(self.members):
            outcome = Outcome(
                rank=rank, step=self.step, stopped=stopped, layer_digests=((place, digests[place]),)
            )
            self.put(RankEnded(outcome=outcome))
        self.put(Finished(step=self.step, stopped=stopped, state_sha256=state_digest(digests)))


def eventful() -> ElasticRun:
    """Four ranks train. One is lost, one joins, two are lost at once; the job returns to its checkpoint."""
    run = ElasticRun()
    run.submit()
    for rank in range(4):
        run.rank(rank)
    run.form((0, 1, 2, 3))
    run.train(4)
    run.save()
    run.lose(2)
    run.regroup((0, 1, 3), lost=(2,))
    run.train(3)
    run.rank(4)
    run.regroup((0, 1, 3, 4), cause="join", joined=(4,), parts=(0.0, 0.0, 0.1, 0.2, 0.1))
    run.train(3)
    run.lose(0)
    run.lose(1, after_s=0.0)
    run.regroup((3, 4), lost=(0, 1), from_checkpoint=True)
    run.train(8)
    run.save()
    run.finish()
    return run


def rehearse(
    run: ElasticRun,
    lives: tuple[NodeLife, ...],
    *,
    began_s: float,
    ended_s: float,
    speedup: float = 10.0,
    copies: tuple[CopiesSaved, ...] = (),
) -> None:
    run.put(
        Rehearsed(
            trace="t.csv",
            speedup=speedup,
            grace_s=None,
            began_s=began_s,
            ended_s=ended_s,
            lives=lives,
            copies=copies,
        )
    )


def life(rank: int, up_s: float, down_s: float | None = None, noticed_s: float | None = None) -> NodeLife:
    return NodeLife(name=f"slot{rank}", node=f"node-{rank}", up_s=up_s, down_s=down_s, noticed_s=noticed_s)
