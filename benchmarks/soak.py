"""Kills ranks of one job at random, hundreds of times, and checks that it costs nothing but time.

    python -m benchmarks.soak [--kills N] [--seed S]

Four ranks run as plain processes under the real lifecycle, with two spares, peer redundancy and no freezing.
Half the kills wait for a phase of a step in their rank; the others come at any moment. At the end no
committed step may be lost, no failure may cost more than one step, and the state must have the bits of an
undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
import torch

from benchmarks.parts.process_jobs import ElasticJob, Ran, Resting
from benchmarks.parts.rank_threads import run_threads
from benchmarks.parts.settled_job import settled
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from orchestrator.lifecycle.stimuli import SaveOrStop
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from workers.config import CheckpointConfig, DataConfig, ElasticConfig, ModelConfig
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.orders import Request
from workers.protocol.reports import StepReport

RANKS, SPARES = 4, 2
ANY_MOMENT = "any moment"
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
MOMENT_S = 0.5
"""A kill at a random moment comes within this time."""
PATIENCE_STEPS = 200
"""A kill that has not come after this many steps never will."""


@dataclass
class _Kill:
    """One kill, ordered or done."""

    what: str
    rank: int
    step: int
    """The newest step when the kill was ordered."""
    dead: bool = False


class Killer:
    """Kills ranks of a job one after the other, then stops it.

    Args:
        kills: how many.
    """

    def __init__(self, kills: int, seed: int) -> None:
        self._left = kills
        self._random = random.Random(seed)
        self._job = Resting(least=RANKS + SPARES, standbys=True)
        self._now: _Kill | None = None
        self._formed = True
        """Whether the job has formed a generation since the newest kill, if that kill took a member."""
        self._over = False
        self.kills_by_phase: Counter[str] = Counter()
        """The number of kills in each phase."""

    def __call__(self, running: ElasticJob, event: events.Event) -> None:
        self._job.see(event)
        now = self._now
        if isinstance(event, events.RankFailed) and now is not None:
            self._left -= 1
            if event.rank == now.rank:
                now.dead = True
                self._formed = now.rank not in self._job.members
            self.kills_by_phase[now.what if now.dead else ANY_MOMENT] += 1
        if isinstance(event, events.Regrouped):
            self._formed = True
        assert now is None or now.dead or self._job.step <= now.step + PATIENCE_STEPS, f"{now} never came"
        if self._over or not self._formed or (now is not None and not now.dead) or not self._job.at_rest:
            return
        if self._left > 0:
            self._kill(running)
        else:
            self._over = True
            running.post(SaveOrStop(Request.STOP))

    def _kill(self, running: ElasticJob) -> None:
        members, draw = self._job.members, self._random
        if draw.random() < 0.5:
            rank = draw.choice(sorted(self._job.up))
            self._now = _Kill(ANY_MOMENT, rank, self._job.step)
            asyncio.get_running_loop().call_later(draw.uniform(0, MOMENT_S), running.signal, rank)
            return
        phase = draw.choice(PHASES)
        rank = draw.choice(members)
        if phase is FaultPhase.MIGRATING:
            # Layers move to the rank that takes another's place.
            rank = min(self._job.up - set(members), default=rank)
        self._now = _Kill(phase, rank, self._job.step)
        calls = [(rank, "arm", Fault(kind=FaultKind.KILL, phase=phase))]
        # The kill is armed first; then comes the request that leads to its phase.
        match phase:
            case FaultPhase.SAVING:
                running.post(SaveOrStop(Request.CHECKPOINT))
            case FaultPhase.RECOVERING:
                calls.append((rank, "arm", Fault(kind=FaultKind.DROP_LINK)))
            case FaultPhase.MIGRATING:
                calls.append((draw.choice(members), "arm", Fault(kind=FaultKind.KILL)))
            case _:
                pass
        running.call_in_turn(*calls)


def make_job(folder: Path, ranks: int = RANKS) -> Settled:
    """A small GPT that trains until it is stopped. The undisturbed run uses one rank, which is fastest."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(300)))
    spec = Spec(
        job=JobConfig(name="soak", steps=1_000_000, sample_tokens=0, output=str(folder / "soak")),
        model=ModelConfig(family="gpt", layers=4, width=16, heads=2, context=16),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(ranks=ranks, microbatches=2, microbatch_size=1),
        checkpoint=CheckpointConfig(every_steps=50),
        elastic=ElasticConfig(redundancy="peer", spares=SPARES, grow=False, allow_faults=True)
        if ranks > 1
        else ElasticConfig(),
        cluster=ClusterConfig(address="auto", device="cpu"),
    )
    return settled(spec)


def faults_of(ran: Ran, quiet_sha256: str) -> list[str]:
    """What is wrong with the run; empty if nothing is."""
    wrong = []
    regrouped = ran.of(events.Regrouped)
    if lost := sum(each.steps_lost for each in regrouped):
        wrong.append(f"{lost} committed steps were lost")
    if many := [each.rerun for each in regrouped if each.rerun > 1]:
        wrong.append(f"{len(many)} losses cost more than one step")
    if ran.steps != list(range(1, len(ran.steps) + 1)):
        wrong.append("steps are missing or doubled")
    if ran.state_sha256 != quiet_sha256:
        wrong.append(f"the state is {ran.state_sha256}, of the undisturbed run {quiet_sha256}")
    for each in ran.of(events.RankFailed):
        if each.error.endswith("and was killed"):
            wrong.append(f"rank {each.rank} {each.error}, and nobody had killed it:\n{each.details}")
    if left := [pid for pid in ran.pids if psutil.pid_exists(pid)]:
        wrong.append(f"processes {left} are left")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(Path(folder))
        killer = Killer(options.kills, options.seed)
        begun_s = time.monotonic()
        ran = ElasticJob(job, killer, room=RANKS + SPARES).run(60.0 + 30.0 * options.kills)
        took_s = time.monotonic() - begun_s
        assert isinstance(ran.state, JobFinished), ran.state
        calm = make_job(Path(folder), ranks=1)
        quiet = run_threads(LaunchedJob(calm.config, calm.plan, calm.schedule, stop_at=ran.state.step))
    regrouped = ran.of(events.Regrouped)
    took = sorted(
        each.detect_s + each.settle_s + each.plan_s + each.move_s + each.resume_s for each in regrouped
    )
    where = ", ".join(f"{count} {what}" for what, count in sorted(killer.kills_by_phase.items()))
    print(f"{killer.kills_by_phase.total()} kills in {took_s:.0f} s: {where}")
    print(
        f"{ran.state.step} steps, {len(ran.of(StepReport))} reported; {len(regrouped)} generations formed,"
        f" {took[len(took) // 2]:.2f} s (median) to {took[-1]:.2f} s from the loss to training on;"
        f" {sum(each.rerun for each in regrouped)} steps run again,"
        f" at most {max(each.rerun for each in regrouped)} per loss;"
        f" {sum(each.steps_lost for each in regrouped)} committed steps lost"
    )
    if wrong := faults_of(ran, quiet.state_sha256):
        raise SystemExit("; ".join(wrong))
    print(f"state_sha256 {ran.state_sha256}: as undisturbed")


if __name__ == "__main__":
    main()
