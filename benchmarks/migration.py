"""Step times while a layer moves between four emulated ranks that train, and the cost of the switch.

    python -m benchmarks.migration [--moves N] [--width W] [--pass-ms M] [--mode live|stop|deferred ...]

Each mode runs a job that moves a layer to the next rank and back, many times. A job without moves gives the
expected bits. A step's time runs from commit to commit. The steps of a move run from its request until the
layer's last copy is where the plan puts it. All other steps but the first ones are normal.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

from benchmarks.parts.process_jobs import ElasticJob
from benchmarks.parts.settled_job import settled
from orchestrator.controller.requests.move_request import move_of_layers
from orchestrator.events import types as events
from orchestrator.lifecycle.migration import Mode, path
from orchestrator.lifecycle.states import JobFinished, Training
from orchestrator.lifecycle.stimuli import Migrate
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from workers.config import DataConfig, ElasticConfig, EmulatedConfig, ModelConfig
from workers.protocol.reports import StepReport, SwitchReport

RANKS = 4
PARTITION = (3, 4, 3, 3)
"""Layers per stage. After a move the fullest stage has as many layers as before, so a step takes as long."""
LAYERS = sum(PARTITION)
PASS_MS = 12.0
"""Time of each pass (forward, input gradient, weight gradient) of one layer and microbatch. It is long enough
for two slow cores to run four ranks and to pack, send and receive what moves."""
WARM_UP = 5
CALM_STEPS = 6
"""Steps between two moves."""


@dataclass
class Mover:
    """Moves a layer there and back while a job trains."""

    mode: Mode | None
    moves: int
    committed_s: dict[int, float] = field(default_factory=dict)
    """Commit time of each step."""
    asked: list[int] = field(default_factory=list)
    """The newest step when each move was requested."""
    over: list[int] = field(default_factory=list)
    """The step after which each move was complete."""
    plans: int = 0
    """Plans that the newest move goes through."""
    last: int = 0
    """Version of the newest move's last plan."""

    def take(self, running: ElasticJob, event: events.Event) -> None:
        match event:
            case StepReport(step=step, committed_s=committed_s):
                self.committed_s[step] = committed_s
                calm = step - (self.over[-1] if self.over else WARM_UP)
                if self.mode and len(self.asked) == len(self.over) < self.moves and calm >= CALM_STEPS:
                    self._ask(running, step)
            case SwitchReport(step=step, version=version):
                self._followed(step, version)
            case events.Migrated(mode="stop", step=step):
                self.over.append(step + 1)
            case _:
                pass

    def _ask(self, running: ElasticJob, step: int) -> None:
        state = running.loop.state
        assert isinstance(state, Training)
        assert self.mode is not None
        job, replanner = state.job, running.setup.replanner
        there = len(self.asked) % 2 == 0
        # The last layer of the second stage goes to the third, and back.
        layer = job.progress.plan.layers[1][1] - 1 if there else job.progress.plan.layers[2][0]
        move = move_of_layers(
            job, replanner, (layer, layer + 1), 2 if there else 1, mode=self.mode, asked_s=time.time()
        )
        self.asked.append(step)
        self.last = job.progress.version + len(path(job.progress.plan, move.plan))
        running.post(Migrate(move))

    def _followed(self, step: int, version: int) -> None:
        if version == self.last and len(self.over) < len(self.asked):
            self.over.append(step + 1)

    def steps_s(self) -> dict[int, float]:
        """For each step, the time from the commit before to its own."""
        return {
            after: self.committed_s[after] - self.committed_s[before]
            for before, after in pairwise(sorted(self.committed_s))
        }

    def moving(self) -> set[int]:
        """Steps that began or ended while a layer moved."""
        return {
            step
            for asked, over in zip(self.asked, self.over, strict=False)
            for step in range(asked + 1, over + 1)
        }


def job(folder: Path, name: str, mode: Mode, given: argparse.Namespace) -> Settled:
    pass_s = given.pass_ms / 1e3
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(2000)))
    spec = Spec(
        job=JobConfig(name=name, output=str(folder / name), steps=given.steps, sample_tokens=0),
        model=ModelConfig(family="gpt", layers=LAYERS - 2, width=given.width, heads=4, context=16),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(ranks=RANKS, microbatches=8, microbatch_size=1, partition=PARTITION),
        cluster=ClusterConfig(
            device="emulated",
            emulated=EmulatedConfig(forward_s=pass_s, input_grad_s=pass_s, weight_grad_s=pass_s),
        ),
        elastic=ElasticConfig(migration=mode, grow=False),
    )
    return settled(spec)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moves", type=int, default=6)
    parser.add_argument("--steps", type=int, default=90, help="of each job; enough for all the moves")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--pass-ms", type=float, default=PASS_MS, help="of a layer and microbatch")
    parser.add_argument("--mode", action="append", choices=get_args(Mode))
    given = parser.parse_args(arguments)
    print(
        f"{RANKS} emulated ranks, {LAYERS} layers of width {given.width}, passes of {given.pass_ms:g} ms;"
        f" peer redundancy; {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f};"
        f" torch {torch.__version__}; {date.today()}"
    )
    header = (
        f"{'mode':<9} {'moves':>5} {'bytes':>10} {'median step':>11} {'p95':>6} {'worst while moving':>18}"
    )
    print(f"{header} {'over 1.15':>9} {'stall':>8} {'to move':>8} {'steps':>5}  bits")
    bits = ""
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("quiet", *(given.mode or get_args(Mode))):
            row, sha256 = measured(Path(folder), mode, given)
            bits = bits or sha256
            print(f"{row}  {'the same' if sha256 == bits else 'others'}", flush=True)


def measured(folder: Path, mode: Any, given: argparse.Namespace) -> tuple[str, str]:
    quiet = mode == "quiet"
    mover = Mover(None if quiet else mode, given.moves)
    running = ElasticJob(job(folder, mode, "live" if quiet else mode, given), mover.take)
    ran = running.run(limit_s=900.0)
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.state.state_sha256 is not None
    taken, moving = mover.steps_s(), mover.moving()
    calm = sorted(s for step, s in taken.items() if step > WARM_UP and step not in moving)
    normal = median(calm)
    p95 = calm[int(0.95 * (len(calm) - 1))] / normal
    row = f"{mode:<9}"
    if not quiet:
        during = [s for step, s in taken.items() if step in moving]
        told = ran.of(events.Migrated)
        slow = sum(s > 1.15 * normal for s in during)
        size = max((one.bytes or 0 for one in told), default=0)
        row += f" {len(told):>5} {size or '-':>10} {normal * 1e3:>8.0f} ms {p95:>6.2f}"
        row += f" {max(during) / normal:>18.2f} {f'{slow} of {len(during)}':>9}"
        row += f" {max(one.stall_s for one in told) * 1e3:>5.0f} ms"
        row += f" {median(one.seconds for one in told):>6.2f} s {median(one.steps for one in told):>5g}"
    else:
        row += f" {'-':>5} {'-':>10} {normal * 1e3:>8.0f} ms {p95:>6.2f}" + " " * 53
    return row, ran.state.state_sha256


if __name__ == "__main__":
    main()
