"""Slow ranks: how soon the load has moved, and how near the step then comes to the best cut there is.

    python -m benchmarks.adaptation [--factor F ...] [--slow K ...] [--pass-ms M] [--layers N] [--ranks N]
        [--microbatches N] [--counted N] [--schedule NAME]

Each case is a job of emulated ranks of which some become slow for good. It runs with `[adapt] policy = "measured"` and
"off", and with the best cut from the beginning. That one has the least simulated step of all cuts that give the slow
ranks some number of layers each and spread the rest as evenly as they go. The limit of perfect balance is the work over
the sum of the speeds.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks.parts.process_jobs import AdaptingJob, ElasticJob, Ran, made_profile
from benchmarks.parts.targets import at_most
from orchestrator.events import types as events
from orchestrator.lifecycle.states import Finished
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.prepare.resolve import Resolved, resolve
from orchestrator.prepare.settling import settle
from orchestrator.spec.checks import check
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.simulation.predict import predict
from workers.config import AdaptConfig, DataConfig, ElasticConfig, EmulatedConfig, ModelConfig
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.protocol import FaultReport, StepReport

MICROBATCHES = 8
WARM_UP = 6
"""Steps before ranks become slow: their first speeds are known by then."""
SETTLED = 8
"""Steps after that which are not counted."""
COUNTED = 6
"""The last steps, of which the median is taken."""


def job(
    folder: Path,
    policy: str,
    steps: int,
    given: argparse.Namespace,
    counts: tuple[int, ...] | None = None,
) -> Resolved:
    """The emulated job of this benchmark; with `counts` layers per rank, else as many for each."""
    pass_s = given.pass_ms / 1e3
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(2000)))
    per_rank = given.layers // given.ranks
    spec = Spec(
        job=JobConfig(name=policy, output=str(folder / policy), steps=steps, sample_tokens=0),
        model=ModelConfig(family="gpt", layers=given.layers - 2, width=16, heads=2, context=16),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(
            ranks=given.ranks,
            microbatches=given.microbatches,
            microbatch_size=1,
            schedule=given.schedule,
            partition=counts or (per_rank,) * given.ranks,
        ),
        cluster=ClusterConfig(
            device="emulated",
            emulated=EmulatedConfig(forward_s=pass_s, input_grad_s=pass_s, weight_grad_s=pass_s),
        ),
        elastic=ElasticConfig(grow=False, allow_faults=True),
        adapt=AdaptConfig.model_validate({"policy": policy}),
    )
    spec = absolute(spec)
    return resolve(settle(check(spec), outline_model(spec), {}), epoch=1)


def profile_of(made: Resolved, given: argparse.Namespace) -> Profile:
    outline = made.outline
    weights = [given.pass_ms / 10] * given.layers
    return made_profile(outline.layers, outline.parameters, given.ranks, weights=weights)


def run(
    folder: Path,
    policy: str,
    slow: Sequence[int],
    factor: float,
    given: argparse.Namespace,
    counts: tuple[int, ...] | None = None,
) -> Ran:
    """A job whose ranks `slow` become slow: after the warm-up where it adapts, else after the first step."""
    warm_up, settled = (WARM_UP, SETTLED) if policy != "off" else (1, 2)
    made = job(folder, policy, warm_up + settled + given.counted, given, counts)

    def act(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, StepReport) and event.step == warm_up:
            for rank in slow:
                running.call(rank, "arm", Fault(kind=FaultKind.SLOW, factor=factor))

    ran = AdaptingJob(made, act, profile_of(made, given)).run(limit_s=900.0)
    assert isinstance(ran.state, Finished), ran.state
    return ran


def settled_s(ran: Ran, counted: int) -> float:
    """The median of the last steps."""
    return median(report.step_s for report in ran.of(StepReport)[-counted:])


def cuts(layers: int, ranks: int, slow: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Layers per rank: each slow rank the same number, the others the rest, extras at the front, the middle or the
    end."""
    fast = [rank for rank in range(ranks) if rank not in slow]
    for few in range(1, layers // ranks + 1):
        rest = layers - few * len(slow)
        each, extra = divmod(rest, len(fast))
        for begin in range(len(fast) - extra + 1):
            counts = [few] * ranks
            for number, rank in enumerate(fast):
                counts[rank] = each + (begin <= number < begin + extra)
            yield tuple(counts)


def best_cut(
    made: Resolved, profile: Profile, slow: Sequence[int], factor: float
) -> tuple[float, tuple[int, ...]]:
    """The least simulated step of all `cuts`, and the layers per rank with which it is reached."""
    devices = tuple(
        replace(device, slowdown=factor if rank in slow else 1.0)
        for rank, device in enumerate(profile.cluster.devices)
    )
    slowed = replace(profile, cluster=replace(profile.cluster, devices=devices))
    plan, found = replace(made.plan, standbys=()), []
    for counts in cuts(plan.layers[-1][1], plan.pipeline_ranks, slow):
        cut = replace(plan, layers=tuple(pairwise((0, *accumulate(counts)))))
        found.append((predict(slowed, cut, schedule_of(cut)).step_s, counts))
    return min(found)


def measured(slow: Sequence[int], factor: float, given: argparse.Namespace) -> str:
    """The row of one case."""
    with tempfile.TemporaryDirectory() as folder:
        made = job(Path(folder), "off", 1, given)
        best, counts = best_cut(made, profile_of(made, given), slow, factor)
        adapted = run(Path(folder), "measured", slow, factor, given)
        idle = run(Path(folder), "off", slow, factor, given)
        knows = settled_s(run(Path(folder), "off", slow, factor, given, counts), given.counted)
    began = min(fault.step for fault in adapted.of(FaultReport))
    moved = [event for event in adapted.of(events.Migrated) if event.step >= began]
    after, off = settled_s(adapted, given.counted), settled_s(idle, given.counted)
    limit = 1 - (given.ranks / (given.ranks - len(slow) + len(slow) / factor)) / factor
    in_force = f"in force after {moved[0].step - began + 1} steps" if moved else "no move"
    took = {report.step: report.step_s for report in adapted.of(StepReport)}
    last = moved[0].step if moved else began
    lost = sum(max(0.0, took[step] - after) for step in range(began, last + 1)) / after
    return (
        f"{len(slow)} slow, factor {factor:g}: {after * 1e3:6.0f} ms, off {off * 1e3:6.0f} ms:"
        f" {1 - after / off:.1%} below (limit {limit:.1%}); "
        + at_most(f"over the best cut {after / knows:.3f}", after / knows, 1.05)
        + f" ({after / best:.3f} as simulated, whose own {1 - best / off:.1%} below); {in_force},"
        f" {lost:.1f} steps lost against an oracle;"
        f" layers {list(adapted.of(events.Issued)[-1].plan.layers_per_stage)}, best {list(counts)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factor", type=float, action="append")
    parser.add_argument("--slow", type=int, action="append", help="how many ranks become slow")
    parser.add_argument("--pass-ms", type=float, default=4.0, help="of a layer and microbatch")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--counted", type=int, default=COUNTED, help="last steps of each job")
    parser.add_argument(
        "--schedule", default="1f1b", choices=("gpipe", "1f1b", "zb-h1"), help="one stage per rank"
    )
    given = parser.parse_args(arguments)
    print(
        f"{given.ranks} emulated ranks, {given.layers} equal layers, {given.microbatches} microbatches, passes of"
        f" {given.pass_ms:g} ms, {given.schedule}; {platform.machine()}, {os.cpu_count()} cores,"
        f" load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {date.today()}"
    )
    for count in given.slow or (1, 2):
        slow = [2, 5][:count]
        for factor in given.factor or (1.1, 1.8, 3.2):
            print(measured(slow, factor, given), flush=True)


if __name__ == "__main__":
    main()
