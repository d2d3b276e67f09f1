"""Kills two ranks of one job in one instant, a hundred times, and checks that no committed step is lost.

    python -m benchmarks.double_losses [--losses N] [--copies N] [--seed S]

Four ranks, each on a node of its own, run as plain processes under the real lifecycle, with two spares and
`elastic.copies = 2`. Each loss takes a rank and one that keeps copies of its layers, at any moment of a step: of some
layers one holder is left. The next loss comes once new processes have replaced the old ones and every copy is current
again. At the end the state must have the bits of an undisturbed run. With `--copies 1` the benchmark shows what the
second copy saves: the same losses take the job back to its checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
import torch

from benchmarks.parts.process_jobs import ElasticJob, Ran, Resting
from benchmarks.parts.rank_threads import run_threads
from benchmarks.parts.settled_job import settled
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished, Training
from orchestrator.lifecycle.stimuli import SaveOrStop
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from planner.plan import Plan
from workers.config import CheckpointConfig, DataConfig, ElasticConfig, ModelConfig
from workers.launch.ranks import LaunchedJob
from workers.protocol.orders import Request
from workers.protocol.reports import StepReport

RANKS, SPARES = 4, 2
MOMENT_S = 0.1
"""A loss comes at a random moment within this time, which holds several steps."""
CALM_STEPS = 5
"""Steps of a generation before the next loss."""


@dataclass
class DoubleLoss:
    """Two ranks that are killed in one instant."""

    ranks: frozenset[int]
    last_holders: int
    """Layers of which one holder is left."""
    killed_s: float = 0.0
    """Seconds since the Unix epoch."""
    apart_s: float = 0.0
    """Between the two signals."""
    regrouped: events.Regrouped | None = None
    committed_s: float | None = None
    """The first commit of the next generation."""


class Killer:
    """Kills pairs of ranks one after the other, then stops the job.

    Args:
        losses: how many pairs.
    """

    def __init__(self, losses: int, seed: int) -> None:
        self._left = losses
        self._random = random.Random(seed)
        self._job = Resting(least=RANKS + SPARES, standbys=True)
        self._steps = 0
        self._over = False
        self.losses: list[DoubleLoss] = []

    def __call__(self, running: ElasticJob, event: events.Event) -> None:
        self._job.see(event)
        now = self.losses[-1] if self.losses else None
        match event:
            case events.Regrouped():
                self._steps = 0
                if now is not None and now.regrouped is None:
                    now.regrouped = event
            case StepReport():
                self._steps += 1
                if now is not None and now.regrouped is not None and now.committed_s is None:
                    now.committed_s = event.committed_s
            case _:
                pass
        state = running.loop.state
        rested = self._job.at_rest and self._steps > CALM_STEPS and isinstance(state, Training)
        if self._over or not rested or (now is not None and now.committed_s is None):
            return
        if not self._left:
            self._over = True
            running.post(SaveOrStop(Request.STOP))
            return
        self._left -= 1
        assert isinstance(state, Training)
        loss = self._draw(state.job.progress.plan, state.job.membership.members)
        self.losses.append(loss)
        moment_s = self._random.uniform(0, MOMENT_S)
        asyncio.get_running_loop().call_later(moment_s, self._kill, running, loss)

    def _draw(self, plan: Plan, members: tuple[int, ...]) -> DoubleLoss:
        """A rank, and one that keeps a copy of one of its layers."""
        layer = self._random.randrange(plan.layers[-1][1])
        places = {plan.owners_of(layer)[0], self._random.choice(plan.copies_of(layer))}
        holders = [{*plan.owners_of(each), *plan.copies_of(each)} for each in range(plan.layers[-1][1])]
        last = sum(len(places & of_one) == 2 and len(of_one - places) <= 1 for of_one in holders)
        return DoubleLoss(frozenset(members[place] for place in places), last)

    @staticmethod
    def _kill(running: ElasticJob, loss: DoubleLoss) -> None:
        pids = [
            each.pid
            for each in running.log
            if isinstance(each, events.RankStarted) and each.rank in loss.ranks
        ]
        loss.killed_s = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        loss.apart_s = time.time() - loss.killed_s


def make_job(folder: Path, copies: int, ranks: int = RANKS) -> Settled:
    """A small GPT that trains until it is stopped. The undisturbed run uses one rank, which is fastest."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(300)))
    elastic = ElasticConfig()
    if ranks > 1:
        elastic = ElasticConfig(redundancy="peer", copies=copies, spares=SPARES, grow=False, attempts=1_000)
    spec = Spec(
        job=JobConfig(name="double", steps=1_000_000, sample_tokens=0, output=str(folder / "double")),
        model=ModelConfig(family="gpt", layers=6, width=16, heads=2, context=16),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(ranks=ranks, microbatches=2, microbatch_size=1),
        checkpoint=CheckpointConfig(every_steps=20),
        elastic=elastic,
        cluster=ClusterConfig(address="auto", device="cpu"),
    )
    return settled(spec)


def faults_of(ran: Ran, losses: list[DoubleLoss], copies: int, quiet_sha256: str) -> list[str]:
    """What is wrong with the run; empty if nothing is."""
    wrong = []
    dead = {each.rank for each in ran.of(events.RankFailed)}
    for loss in losses:
        if not loss.ranks <= dead:
            wrong.append(f"ranks {sorted(loss.ranks - dead)} were not killed")
        if not loss.last_holders:
            wrong.append(f"the loss of ranks {sorted(loss.ranks)} takes no second holder of a layer")
    regrouped = ran.of(events.Regrouped)
    together = [each for each in losses if each.regrouped and each.ranks <= {*each.regrouped.lost}]
    if len(together) < len(losses):
        wrong.append(f"{len(losses) - len(together)} pairs were not lost in one instant")
    if copies > 1 and (lost := sum(each.steps_lost for each in regrouped)):
        wrong.append(f"{lost} committed steps were lost")
    if many := [each.rerun for each in regrouped if each.rerun > 1]:
        wrong.append(f"{len(many)} losses cost more than one step in flight")
    if {*ran.steps} != {*range(1, max(ran.steps) + 1)}:
        wrong.append("steps are missing")
    if ran.state_sha256 != quiet_sha256:
        wrong.append(f"the state is {ran.state_sha256}, of the undisturbed run {quiet_sha256}")
    if left := [pid for pid in ran.pids if psutil.pid_exists(pid)]:
        wrong.append(f"processes {left} are left")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=100)
    parser.add_argument("--copies", type=int, choices=[1, 2, 3], default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(options.losses, options.seed)
        job = make_job(Path(folder), options.copies)
        begun_s = time.monotonic()
        ran = ElasticJob(job, killer, room=RANKS + SPARES).run(60.0 + 30.0 * options.losses)
        took_s = time.monotonic() - begun_s
        assert isinstance(ran.state, JobFinished), ran.state
        calm = make_job(Path(folder), options.copies, ranks=1)
        quiet = run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule, stop_at=ran.state.step))
    losses = [loss for loss in killer.losses if loss.regrouped is not None and loss.committed_s is not None]
    regrouped = ran.of(events.Regrouped)
    back_s = sorted(loss.committed_s - loss.killed_s for loss in losses if loss.committed_s is not None)
    apart_s = max(loss.apart_s for loss in losses)
    print(
        f"copies = {options.copies}: {len(losses)} double losses in {took_s:.0f} s, the two signals at most"
        f" {apart_s * 1e6:.0f} us apart; each took the owner and a copy of {min(x.last_holders for x in losses)} to"
        f" {max(x.last_holders for x in losses)} layers"
    )
    print(
        f"{ran.state.step} steps; {sum(each.steps_lost for each in regrouped)} committed steps lost,"
        f" {sum(each.rerun for each in regrouped)} steps in flight run again; from the kill to the next commit"
        f" p50/p95/max {back_s[len(back_s) // 2]:.2f}/{back_s[int(0.95 * (len(back_s) - 1))]:.2f}/{back_s[-1]:.2f} s"
    )
    if wrong := faults_of(ran, killer.losses, options.copies, quiet.state_sha256):
        raise SystemExit("; ".join(wrong))
    print(f"state_sha256 {ran.state_sha256}: as undisturbed")


if __name__ == "__main__":
    main()
