"""From a failure to the next committed step: eight emulated ranks on four real Ray nodes of this machine.

    python -m benchmarks.recovery [--ranks-lost N] [--nodes-lost N] [--width W] [--seed S]

SIGKILL ends ranks at any moment of a step, or entire nodes with the two ranks on them. The survivors continue
at once. Before the next failure a new process or node has replaced the old one, and every copy is current
again. A figure runs from the signal to the commit of the next step, less a normal step.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

import psutil
import torch

from orchestrator.client.running import run
from orchestrator.events import types as events
from orchestrator.events.types import Record
from orchestrator.rehearsal.local_nodes import LocalNodes
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from tests.orchestrator.resting import Resting
from workers.config import DataConfig, ElasticConfig, EmulatedConfig, ModelConfig
from workers.protocol.reports import CheckpointReport, StepReport

RANKS, NODES = 8, 4
LAYER_S = 0.003
"""Time of each pass (forward, input gradient, weight gradient) of one layer and microbatch."""
CALM_STEPS = 5
"""Steps with the same members before a loss; their median is a normal step."""
PARTS = ("detect_s", "settle_s", "plan_s", "move_s", "resume_s")
JOB = "recovery"


@dataclass
class Loss:
    """The loss of one rank or node, and how long recovery took."""

    node: bool
    normal_s: float
    """A normal step before the loss."""
    killed_s: float = 0.0
    """Seconds since the Unix epoch."""
    regrouped: events.Regrouped | None = None
    committed_s: float | None = None
    """The first commit of the next generation."""

    @property
    def took_s(self) -> float:
        """Seconds from the kill to that commit, less a normal step."""
        assert self.committed_s is not None
        return self.committed_s - self.killed_s - self.normal_s


class Killer:
    """Kills a rank or node of a job each time that the job has come to rest, then stops the job.

    Args:
        losses: what to kill, in order: a node if True, else a rank.
    """

    def __init__(self, nodes: LocalNodes, losses: Sequence[bool], seed: int) -> None:
        self._nodes = nodes
        self._left = list(losses)
        self._random = random.Random(seed)
        self._job = Resting(least=RANKS, standbys=True)
        self._started: dict[int, events.RankStarted] = {}
        self._steps_s: list[float] = []
        self._added = NODES
        self._over = False
        self.losses: list[Loss] = []
        self.state_bytes = 0

    def __call__(self, record: Record) -> None:
        event = record.event
        self._job.see(event)
        now = self.losses[-1] if self.losses else None
        match event:
            case events.RankStarted():
                self._started[event.rank] = event
            case events.Regrouped():
                self._steps_s = []
                if now is not None and now.regrouped is None and event.lost:
                    now.regrouped = event
            case StepReport():
                self._steps_s.append(event.step_s)
                if now is not None and now.regrouped is not None and now.committed_s is None:
                    now.committed_s = event.committed_s
                    self._make_up(now)
            case CheckpointReport(error=None):
                self.state_bytes = event.bytes
            case _:
                pass
        self._go_on(now)

    def _go_on(self, now: Loss | None) -> None:
        whole = self._job.at_rest and len(self._job.members) == RANKS and len(self._steps_s) > CALM_STEPS
        if self._over or not whole or (now is not None and now.committed_s is None):
            return
        if not self._left:
            self._over = True
            self._stop()
            return
        normal_s = median(self._steps_s[-CALM_STEPS:])
        loss = Loss(self._left.pop(0), normal_s)
        self.losses.append(loss)
        kill = self._node() if loss.node else self._rank()
        threading.Timer(self._random.uniform(0, normal_s), self._kill, (loss, kill)).start()

    def _stop(self) -> None:
        # This imports Ray, which reads the nodes' environment on import.
        from orchestrator.client.blocking_client import BlockingJobClient

        BlockingJobClient().stop(JOB)

    def _rank(self) -> Callable[[], None]:
        pid = self._started[self._random.choice(self._job.members)].pid
        return lambda: os.kill(pid, signal.SIGKILL)

    def _node(self) -> Callable[[], None]:
        names = [life.name for life in self._nodes.lives() if life.down_s is None]
        name = self._random.choice(names)
        return lambda: self._nodes.kill(name)

    def _kill(self, loss: Loss, kill: Callable[[], None]) -> None:
        loss.killed_s = time.time()
        kill()

    def _make_up(self, loss: Loss) -> None:
        if loss.node:
            self._nodes.add(f"node-{self._added}", {"CPU": RANKS / NODES})
            self._added += 1


def make_spec(folder: Path, address: str, width: int) -> Spec:
    """A job of sixteen layers, two on each rank."""
    return Spec(
        job=JobConfig(name=JOB, steps=1_000_000, sample_tokens=0, output=str(folder / "run")),
        model=ModelConfig(family="gpt", layers=2 * RANKS - 2, width=width, heads=2, context=8),
        data=DataConfig(source="python-docs"),
        pipeline=PipelineConfig(ranks=RANKS, microbatches=RANKS, microbatch_size=1),
        elastic=ElasticConfig(redundancy="peer"),
        cluster=ClusterConfig(
            address=address,
            device="emulated",
            resources_per_rank={"CPU": 1.0},
            wait_s=180.0,
            emulated=EmulatedConfig(forward_s=LAYER_S, input_grad_s=LAYER_S, weight_grad_s=LAYER_S),
        ),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def show(what: str, losses: Sequence[Loss]) -> None:
    """Print how long recovery from losses of one kind took."""

    def row(values: Sequence[float]) -> str:
        return f"{percentile(values, 0.5):.2f}/{percentile(values, 0.95):.2f}/{max(values):.2f}"

    found = [loss.regrouped for loss in losses if loss.regrouped is not None]
    parts = ", ".join(f"{part.removesuffix('_s')} {row([getattr(r, part) for r in found])}" for part in PARTS)
    rest = [
        loss.took_s + loss.normal_s - sum(getattr(r, part) for part in PARTS)
        for loss, r in zip(losses, found, strict=True)
    ]
    print(
        f"{len(losses)} {what}: p50/p95/max {row([loss.took_s for loss in losses])} s beyond a normal step of"
        f" {median(loss.normal_s for loss in losses):.2f} s; {parts}, detection and first step {row(rest)} s;"
        f" {sum(r.rerun for r in found)} steps run again, {sum(r.steps_lost for r in found)} committed steps lost",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks-lost", type=int, default=20)
    parser.add_argument("--nodes-lost", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder, LocalNodes() as nodes:
        names = [f"node-{number}" for number in range(NODES)]
        for name in names:
            nodes.add(name, {"CPU": RANKS / NODES})
        nodes.wait_for(set(names), 300.0)
        kinds = [False] * options.ranks_lost + [True] * options.nodes_lost
        killer = Killer(nodes, kinds, options.seed)
        begun_load = psutil.getloadavg()[0]
        done = run(
            make_spec(Path(folder), nodes.address, options.width),
            resume=False,
            observe=killer,
            say=lambda text: None,
        )
        assert isinstance(done.end, events.Finished), done.end
    print(
        f"{RANKS} emulated ranks on {NODES} Ray nodes of one machine; state of {killer.state_bytes / 1e6:.1f} MB;"
        f" load of the machine {begun_load:.1f} at first, {psutil.getloadavg()[0]:.1f} at last"
    )
    for node, what in ((False, "ranks killed"), (True, "nodes of two ranks killed")):
        if losses := [each for each in killer.losses if each.node is node and each.committed_s is not None]:
            show(what, losses)


if __name__ == "__main__":
    main()
