"""Throughput of a job's plan after a failure, over that of the best plan for the remaining ranks.

    python -m benchmarks.shrink [--families ...] [--replicas 1,2] [--losses 1,2,4] [--steps N]
        [--rounds N] [--simulated]

The job has eight emulated ranks and 24 layers of uneven times. A controller makes its plan within tens of
milliseconds. The search for the best plan takes seconds, over the same family and over all of them. Both
plans are simulated, and where they differ both run on emulated ranks. Neither keeps copies of layers. Figures
are of emulated devices.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import process_time

import torch

from benchmarks.parts.configs import changed
from benchmarks.parts.two_rank_job import WARM_UP, make_job, profile_of
from planner.ir import Schedule
from planner.partition import parameter
from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.registry import build, families
from planner.search.evaluate import Evaluator
from planner.search.replan import Replanner
from planner.search.search import END_TO_END, THOROUGH, ChosenPlan, PlanWish, choose, choose_among
from planner.search.shapes import shapes
from planner.simulation.predict import predict
from workers.config import EmulatedConfig, ModelConfig
from workers.launch.ranks import LaunchedJob, run_processes
from workers.protocol.reports import StepReport

RANKS, LAYERS, MICROBATCHES = 8, 24, 16
AUTO = "auto"
BLOCK_S, EMBEDDING_S, HEAD_S = 0.02, 0.004, 0.032
"""Time of each pass (forward, input gradient, weight gradient) of one layer and microbatch."""


@dataclass(frozen=True)
class Compared:
    """The plans after the loss of `lost` ranks."""

    lost: int
    plan: Plan
    schedule: Schedule
    best: ChosenPlan
    """The best plan of the requested family, if the job's plan is of that family; else the best of all."""
    best_of_all: ChosenPlan
    replanned_s: float
    """Processor time of making the plan."""


def emulated_job(family: str, steps: int, folder: Path) -> LaunchedJob:
    """The job that is profiled and that runs under each plan."""
    times = (EMBEDDING_S, *[BLOCK_S] * (LAYERS - 2), HEAD_S)
    job = make_job(
        family,
        steps,
        folder,
        device="emulated",
        emulated=EmulatedConfig(forward_s=times, input_grad_s=times, weight_grad_s=times),
        model=ModelConfig(family="gpt", layers=LAYERS - 2, width=16, heads=2, context=8),
        microbatch_size=1,
        microbatches=MICROBATCHES,
    )
    chunks = families()[family].default_chunks
    schedule = build(family, RANKS, MICROBATCHES, chunks)
    plan = replace(
        job.plan,
        layers=parameter.partition([1] * LAYERS, schedule.stages),
        stage_ranks=families()[family].placement(RANKS, chunks),
    )
    return replace(job, plan=plan, schedule=schedule)


def best_plan(
    profile: Profile, ranks: int, microbatches: int, replicas: int, family: str | None
) -> ChosenPlan:
    """The best plan that a long search finds for `ranks` ranks with `replicas` replicas."""
    judges = [
        Evaluator(profile, shape, replicas=replicas, recompute=(), pipelines=pipelines)
        for pipelines in range(1, min(replicas, ranks) + 1)
        for size in range(1, ranks // pipelines + 1)
        for shape in shapes(
            layers=LAYERS, most_ranks=size, ranks=size, name=family, chunks=None, microbatches=microbatches
        )[0]
    ]
    return choose_among(judges, END_TO_END, effort=THOROUGH)


def compare(profile: Profile, family: str, replicas: int, losses: list[int]) -> list[Compared]:
    """The plans after each loss."""
    microbatches = MICROBATCHES // replicas
    asked = None if family == AUTO else family
    first = choose(
        profile,
        PlanWish(ranks=RANKS // replicas, schedule=asked, microbatches=microbatches, replicas=replicas),
    )
    found = []
    for lost in losses:
        ranks = RANKS - lost
        replanner = Replanner(
            first=first.plan,
            schedule=first.schedule,
            parameters=tuple(layer.parameters for layer in profile.model.layers),
            copies=0,
            profile=profile,
        )
        begun_s = process_time()
        plan, schedule = replanner.plan_for(
            ranks, epoch=1, version=2, reason=f"{lost} ranks were lost", domains=("",) * ranks
        )
        replanned_s = process_time() - begun_s
        best_of_all = best_plan(profile, ranks, microbatches, replicas, None)
        own = plan.schedule == asked
        best = best_plan(profile, ranks, microbatches, replicas, family) if own else best_of_all
        found.append(Compared(lost, plan, schedule, best, best_of_all, replanned_s))
    return found


def measured_s(job: LaunchedJob, plan: Plan, schedule: Schedule) -> list[float]:
    """Times of the steps after the warm-up."""
    config = changed(job.config, microbatches=plan.microbatches, replicas=plan.replicas)
    run = run_processes(replace(job, config=config, plan=plan, schedule=schedule))
    return [r.step_s for r in run.reports if isinstance(r, StepReport) and r.step > WARM_UP]


def simulated_s(profile: Profile, plan: Plan, schedule: Schedule) -> float:
    return predict(profile, plan, schedule).step_s


def show(job: LaunchedJob, profile: Profile, each: Compared, family: str, rounds: int) -> float:
    """Print one comparison, measured in `rounds` rounds.

    Returns:
        Throughput of the plan over that of the best one, measured or simulated.
    """
    ours_s = simulated_s(profile, each.plan, each.schedule)
    best_s, all_s = each.best.prediction.step_s, each.best_of_all.prediction.step_s
    share = best_s / ours_s
    text = (
        f"{family:12} {RANKS} - {each.lost} ranks, {each.plan.replicas} replicas: {each.plan.schedule}"
        f" {each.plan.pipeline_count} x {each.plan.pipeline_ranks}, planned in {1e3 * each.replanned_s:.0f} ms;"
        f" simulated {ours_s:.3f} s/step, best {best_s:.3f} ({share:.3f}), best of all families {all_s:.3f}"
        f" ({all_s / ours_s:.3f})"
    )
    best = each.best
    same = (each.plan.layers, each.plan.schedule) == (best.plan.layers, best.plan.schedule)
    steps_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(min(rounds, 1) if same else rounds):
        steps_s[0].extend(measured_s(job, each.plan, each.schedule))
        if not same:
            steps_s[1].extend(measured_s(job, best.plan, best.schedule))
    if steps_s[0]:
        text += f"; measured {median(steps_s[0]):.3f}, "
        if same:
            text += "the best is the same plan"
        else:
            share = median(steps_s[1]) / median(steps_s[0])
            text += f"best {median(steps_s[1]):.3f} ({share:.3f})"
    print(text, flush=True)
    return share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default="auto,1f1b,interleaved,zb-h1,zbv")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--losses", default="1,2,4")
    parser.add_argument("--steps", type=int, default=5, help="measured of each plan")
    parser.add_argument("--rounds", type=int, default=2, help="in which a plan and the best one take turns")
    parser.add_argument("--simulated", action="store_true", help="measure nothing but the profile")
    options = parser.parse_args()
    print(f"torch {torch.__version__}; {RANKS} emulated ranks, {LAYERS} layers")
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        profile: Profile | None = None
        for family in options.families.split(","):
            job = emulated_job("1f1b" if family == AUTO else family, options.steps + WARM_UP, Path(folder))
            profile = profile or profile_of(job)
            for replicas in map(int, options.replicas.split(",")):
                losses = [int(lost) for lost in options.losses.split(",")]
                for each in compare(profile, family, replicas, losses):
                    # Windows of several replicas in one pipeline are simulated only.
                    whole = each.plan.windows == each.best.plan.windows == 1
                    shares.append(
                        show(
                            job,
                            profile,
                            each,
                            family,
                            0 if options.simulated or not whole else options.rounds,
                        )
                    )
    print(f"least throughput over that of the best plan for the same ranks: {min(shares):.3f}")


if __name__ == "__main__":
    main()
