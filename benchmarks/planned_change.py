"""How long a planned change of ranks keeps a job from training: a rank that leaves with notice, and one that comes.

    python -m benchmarks.planned_change [--state-mb S] [--rounds N] [--pass-ms M] [--mode live|stop ...] [--shard S]

Four emulated ranks train, in one pipeline, or with `--shard` in two that share out states. In each round one of them
gets a notice, and leaves; then a new rank comes. `live` copies layers to their next ranks while training goes on;
`stop` fetches them between two generations. The pause of a change
is the time between the commits on both sides of a regroup, less the longer of the two generations' median steps.
A job without changes gives the expected bits.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.parts.process_jobs import ElasticJob, Ran
from benchmarks.parts.settled_job import settled
from orchestrator.events import types as events
from orchestrator.lifecycle.stimuli import Going
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from workers.config import DataConfig, ElasticConfig, EmulatedConfig, ModelConfig
from workers.protocol.reports import StepReport

RANKS, BLOCKS, HEADS = 4, 10, 4
PASS_MS = 8.0
CALM_STEPS = 8
"""Steps between two changes."""
WARM_UP = 3
"""Steps of a generation that do not count towards its median."""
NOTICE_S = 60.0


@dataclass
class Changes:
    """Has a rank leave and another one come, in turns, while a job trains."""

    rounds: int
    asked: list[str] = field(default_factory=list)
    calm_from: int = 0

    def take(self, running: ElasticJob, event: events.Event) -> None:
        match event:
            case events.Regrouped(step=step, cause="drain" | "join" as cause):
                if self.asked and cause == self.asked[-1]:
                    self.calm_from = step
            case StepReport(step=step) if step - self.calm_from >= CALM_STEPS + WARM_UP:
                self.calm_from = step + 10**6
                self._next(running)
            case _:
                pass

    def _next(self, running: ElasticJob) -> None:
        if len(self.asked) == 2 * self.rounds:
            return
        if len(self.asked) % 2 == 0:
            self.asked.append("drain")
            formed = [event for event in running.log if isinstance(event, events.Formed)][-1]
            leaves = formed.generation.members[1]
            running.hosts.most = RANKS - 1
            running.post(Going(frozenset({leaves}), "file", NOTICE_S, f"node{leaves}", "h"))
        else:
            self.asked.append("join")
            running.hosts.most = RANKS


def job(folder: Path, name: str, mode: Any, given: argparse.Namespace) -> Settled:
    pass_s = given.pass_ms / 1e3
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(2000)))
    # Weights and two moments of 4 bytes each: a block has 12 width^2 parameters.
    width = round((given.state_mb * 1e6 / (BLOCKS * 12 * 12)) ** 0.5 / HEADS) * HEADS
    spec = Spec(
        job=JobConfig(name=name, output=str(folder / name), steps=given.steps, sample_tokens=0),
        model=ModelConfig(family="gpt", layers=BLOCKS, width=width, heads=HEADS, context=16),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(
            ranks=RANKS,
            microbatches=4,
            microbatch_size=1,
            replicas=1 if given.shard == "none" else 2,
            shard=given.shard,
        ),
        cluster=ClusterConfig(
            device="emulated",
            emulated=EmulatedConfig(forward_s=pass_s, input_grad_s=pass_s, weight_grad_s=pass_s),
        ),
        elastic=ElasticConfig(migration=mode),
    )
    return settled(spec)


@dataclass(frozen=True)
class Pause:
    """One regroup of a planned change."""

    regrouped: events.Regrouped
    pause_s: float
    normal_s: float

    @property
    def parts(self) -> str:
        each = self.regrouped
        spent = (each.detect_s, each.settle_s, each.plan_s, each.move_s, each.resume_s)
        return " + ".join(f"{1e3 * part:.0f}" for part in spent)


def pauses(ran: Ran) -> list[Pause]:
    committed_s = {report.step: report.committed_s for report in ran.of(StepReport)}
    begins = [0, *(regrouped.step for regrouped in ran.of(events.Regrouped)), max(committed_s)]
    normal_s = [
        median(committed_s[step] - committed_s[step - 1] for step in range(begin + WARM_UP, end))
        if end > begin + WARM_UP
        else 0.0
        for begin, end in pairwise(begins)
    ]
    found = []
    for number, regrouped in enumerate(ran.of(events.Regrouped)):
        normal = max(normal_s[number : number + 2])
        taken_s = committed_s[regrouped.step + 1] - committed_s[regrouped.step]
        found.append(Pause(regrouped, taken_s - normal, normal))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--state-mb", type=float, default=300.0, help="of the whole model; a rank has a quarter"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pass-ms", type=float, default=PASS_MS, help="of a layer and microbatch")
    parser.add_argument("--steps", type=int, default=150, help="of each job; enough for all the changes")
    parser.add_argument("--mode", action="append", choices=("live", "stop"))
    parser.add_argument("--shard", default="none", choices=("none", "optimizer", "gradients"))
    given = parser.parse_args(arguments)
    print(
        f"{RANKS} emulated ranks, {given.state_mb:g} MB of state; {platform.machine()}, {os.cpu_count()} cores,"
        f" load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {date.today()}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for mode in given.mode or ("stop", "live"):
            changes = Changes(given.rounds)
            ran = ElasticJob(job(Path(folder), mode, mode, given), changes.take).run(limit_s=900.0)
            for pause in pauses(ran):
                print(
                    f"{mode:<5} {pause.regrouped.cause:<6} pause {1e3 * pause.pause_s:>6.0f} ms beyond a step of"
                    f" {1e3 * pause.normal_s:.0f} ms; detect + settle + plan + move + resume: {pause.parts} ms;"
                    f" {pause.regrouped.fetched} layers fetched",
                    flush=True,
                )
            warned = Counter(warned.text for warned in ran.of(events.Warned))
            print(f"{mode:<5} {dict(warned) or 'no warning'}; bits {str(ran.state_sha256)[:12]}", flush=True)


if __name__ == "__main__":
    main()
