"""Ordinary noise of two real ranks: a job that adapts changes no plan for it, and its recording replays to the same.

    python -m benchmarks.ordinary_noise [--minutes M] [--out FOLDER] [--replay FILE]

Two CPU ranks, each with a Torch thread and a core, train a small GPT for M minutes with `[adapt] policy = "measured"`
and `record = true`. No neighbour is started; what else the machine does is its noise. `noise` is the standard
deviation of the logarithm of a rank's slowdown, of whole steps and of their halves. `--replay` only reads a recording.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from statistics import median, stdev

import torch

from benchmarks.parts.process_jobs import AdaptingJob, ElasticJob
from benchmarks.parts.settled_job import without_plan
from benchmarks.parts.targets import at_most
from orchestrator.events import types as events
from orchestrator.history.folder import JobFolder
from orchestrator.lifecycle.stimuli import Aborted
from orchestrator.prepare.planning import first_plan
from orchestrator.prepare.profiling import obtain
from orchestrator.prepare.settling import Settled, with_plan
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from planner.adapt.recording import Began, Entry, Planned, entries
from planner.adapt.replaying import ReplayedDecision, replayed
from planner.adapt.speeds import slowdown_of
from planner.plan import Plan
from planner.profile import Profile
from workers.config import AdaptConfig, DataConfig, ElasticConfig, ModelConfig
from workers.protocol.reports import StepReport

RANKS = 2
LOAD_EVERY_S = 60.0
STEPS = 10_000_000
"""More than are trained."""


def job(folder: Path) -> tuple[Settled, Profile]:
    """The job, and its profile as it is measured before any step."""
    text = folder / "text.txt"
    folder.mkdir(parents=True, exist_ok=True)
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(2000)))
    spec = Spec(
        job=JobConfig(name="noise", output=str(folder / "run"), steps=STEPS, sample_tokens=0),
        model=ModelConfig(family="gpt", layers=6, width=128, heads=4, context=64),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(
            ranks=RANKS, microbatches=8, microbatch_size=2, partition="dynpipe", schedule="1f1b"
        ),
        cluster=ClusterConfig(device="cpu", address="local"),
        elastic=ElasticConfig(grow=False),
        adapt=AdaptConfig(policy="measured", record=True),
    )
    spec, outline = without_plan(spec)
    profile = obtain(spec, outline, ranks=RANKS, afresh=True, cache=folder / "profiles")
    return with_plan(spec, outline, first_plan(spec, profile).plan, epoch=1), profile


def record(minutes: float, folder: Path) -> Path:
    """Train for so long; return the recording."""
    made, profile = job(folder)
    ends_s = time.monotonic() + 60 * minutes
    said_s = -math.inf

    def act(running: ElasticJob, event: events.Event) -> None:
        nonlocal said_s
        now_s = time.monotonic()
        if isinstance(event, StepReport):
            if now_s - said_s >= LOAD_EVERY_S:
                said_s = now_s
                print(
                    f"{datetime.now():%H:%M:%S} step {event.step:,} ({event.step_s * 1e3:.0f} ms),"
                    f" load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
            if now_s >= ends_s:
                running.post(Aborted())
        elif isinstance(event, events.SpeedsChanged | events.Adapted | events.Warned | events.Migrated):
            print(f"{datetime.now():%H:%M:%S} load {os.getloadavg()[0]:.1f} {event}", flush=True)

    ran = AdaptingJob(made, act, profile).run(limit_s=60 * minutes + 600)
    took = [report.step_s for report in ran.of(StepReport)]
    print(
        f"{len(took):,} steps of {median(took) * 1e3:.1f} ms in {minutes:g} minutes; moves:"
        f" {len(ran.of(events.Migrated))}; layers"
        f" {list((ran.of(events.Issued) or [made])[-1].plan.layers_per_stage)}",
        flush=True,
    )
    return JobFolder(made.config.job.folder).planner_path


def beside_recent(slowdowns: Sequence[float]) -> list[float]:
    """Each slowdown over the median of the 20 before it: without the drift of hours."""
    return [each / median(slowdowns[at - 20 : at]) for at, each in enumerate(slowdowns) if at >= 20]


def noise(slowdowns: Sequence[float]) -> float:
    return stdev(map(math.log, slowdowns)) if len(slowdowns) > 1 else math.nan


@dataclass
class Heard:
    """What a recording holds."""

    steps: set[int] = field(default_factory=set)
    measurements: int = 0
    whole: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Rank -> its slowdown in each step."""
    halves: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    changes: list[str] = field(default_factory=list)
    decisions: list[ReplayedDecision] = field(default_factory=list)
    different: int = 0
    """Answers that another planner gives otherwise."""


def heard(recording: Path) -> Heard:
    """Read a recording, and repeat it."""
    found = Heard()
    profile: Profile | None = None
    plans: dict[int, Plan] = {}

    def read() -> Iterator[Entry]:
        nonlocal profile
        for entry in entries(recording):
            if isinstance(entry, Began):
                profile = entry.start.profile
            elif isinstance(entry, Planned):
                plans[entry.number] = entry.plan
            yield entry

    for answer in replayed(read()):
        found.different += not answer.same
        if isinstance(answer, ReplayedDecision):
            found.decisions.append(answer)
            continue
        assert profile is not None
        followed = {plans[number].key: plans[number] for number in answer.took.plans}
        found.changes += answer.took.heard.changes
        for seen in answer.took.batch:
            found.measurements += 1
            found.steps.add(seen.step)
            if (plan := followed.get(seen.plan)) is None:
                continue
            for times, into in ((seen.times, found.whole), *((half, found.halves) for half in seen.halves)):
                slowdown, _ = slowdown_of(
                    profile, plan, plan.place(seen.place).rank, times, frozen=seen.frozen
                )
                if slowdown is not None:
                    into[seen.rank].append(slowdown)
    return found


def tell(recording: Path) -> None:
    found = heard(recording)
    print(
        f"{len(found.steps):,} steps, {found.measurements:,} measurements;"
        f" {recording.stat().st_size / 1e6:.1f} MB recorded"
    )
    for rank, slowdowns in sorted(found.whole.items()):
        print(
            f"rank {rank}: slowdown {median(slowdowns):.2f} (median); noise {noise(slowdowns):.1%} of a step,"
            f" {noise(found.halves[rank]):.1%} of a half; beside the 20 before"
            f" {noise(beside_recent(slowdowns)):.1%}"
        )
    moves = [each for each in found.decisions if each.decision.plan is not None]
    for said in found.changes:
        print(f"  {said}")
    print(f"{len(found.changes)} changes of speed detected, {len(found.decisions)} decisions;", end=" ")
    print(at_most(f"{len(moves)} of them to move", len(moves), 0))
    print(at_most(f"replayed: {found.different} answers differ", found.different, 0), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, help="keep the job's folder here")
    parser.add_argument("--replay", type=Path, help="a recording; nothing is trained")
    given = parser.parse_args(arguments)
    print(
        f"{RANKS} CPU ranks of one Torch thread and core each; {platform.machine()}, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {date.today()}",
        flush=True,
    )
    if given.replay is not None:
        tell(given.replay)
        return
    with tempfile.TemporaryDirectory() as scratch:
        tell(record(given.minutes, given.out or Path(scratch)))


if __name__ == "__main__":
    main()
