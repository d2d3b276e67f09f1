"""Runs `freshet plan`: plans a job, says why, and starts nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from orchestrator.analysis.outlook import Outlook, convergence_of, outlook
from orchestrator.cli.text.plan_text import show
from orchestrator.pictures.forms import check_suffix
from orchestrator.prepare.layouts import PackedLayout, layouts
from orchestrator.prepare.model_outline import ModelOutline, absolute
from orchestrator.prepare.on_paper import PaperCluster, paper_profile
from orchestrator.prepare.planning import Freezing, first_plan, freezing, price_of_copies
from orchestrator.prepare.profiling import profile_of, read, trusted
from orchestrator.prepare.settling import (
    elastic_of,
    on_cluster,
    opened,
    step_samples,
    with_plan,
    with_steps,
)
from orchestrator.quantities import significant
from orchestrator.report.step.plan_page import write_timeline
from orchestrator.spec.job_spec import Spec, load
from orchestrator.spec.rules import check
from planner.plan import Plan
from planner.profile import Profile
from planner.search.copies_cost import CopiesCost
from planner.search.search import Alternative, ChosenPlan
from planner.wording import counted
from workers.protocol.errors import JobError


@dataclass(frozen=True, kw_only=True)
class JobLength:
    """Length of a job."""

    steps: int
    step_samples: int
    train_samples: int
    epochs: float

    @staticmethod
    def of(spec: Spec, found: ModelOutline, plan: Plan) -> JobLength:
        """The length of a spec that has its steps."""
        steps, samples = spec.job.steps, step_samples(spec, plan)
        return JobLength(
            steps=steps,
            step_samples=samples,
            train_samples=found.train_samples,
            epochs=steps * samples / found.train_samples,
        )

    def __str__(self) -> str:
        samples = counted(self.train_samples, "training sample")
        return (
            f"job: {counted(self.steps, 'step')} of {counted(self.step_samples, 'sample')},"
            f" {significant(self.epochs)} epochs of {samples}"
        )


def plan_command(
    path: Path,
    overrides: Sequence[str],
    *,
    profile: Path | None,
    on: PaperCluster | None = None,
    as_json: bool,
    timeline: Path | None,
    estimates: Path | None = None,
    target_error: float | None = None,
) -> None:
    """Print the plan of the spec at `path`, and write its timeline if asked.

    Raises:
        JobError: something that the user can fix.
    """
    spec = check(absolute(load(path, overrides)))
    if timeline is not None:
        check_suffix(timeline, "--timeline")
    convergence = None
    if target_error is not None and estimates is None:
        raise JobError("--target-error needs --estimates, the event log of a run with job.curvature_every")
    if estimates is not None:
        convergence = convergence_of(estimates, lr=spec.optimizer.lr, target=target_error)
    spec, found = opened(spec)
    spec, measured = _measured(spec, found, profile, on)
    begun_s = time.perf_counter()
    choice = first_plan(spec, measured)
    spec = with_steps(spec, found, choice.plan)
    length = JobLength.of(spec, found, choice.plan)
    frozen = freezing(spec, choice)
    mode, copies = elastic_of(spec, choice.plan).redundancy, price_of_copies(spec, choice)
    assert mode is not None
    packed = layouts(with_plan(spec, found, choice.plan, epoch=0, profile=measured))
    solve_s = time.perf_counter() - begun_s
    foreseen = None if convergence is None else outlook(choice, convergence)
    if timeline is not None:
        write_timeline(timeline, choice, frozen)
    if as_json:
        told = as_dict(choice, frozen, mode, copies, solve_s, foreseen, packed)
        typer.echo(json.dumps({**told, **asdict(length)}))
        return
    show(Console(highlight=False), choice, frozen, mode, copies, foreseen, packed)
    typer.echo(str(length))


def _measured(
    spec: Spec, found: ModelOutline, profile: Path | None, on: PaperCluster | None
) -> tuple[Spec, Profile]:
    """The spec, settled by its cluster, and the profile to plan it with."""
    if on is not None:
        spec = on_cluster(spec, {"GPU": float("inf")})
        return spec, paper_profile(spec, len(found.layers), on)
    if profile is not None:
        given = trusted(read(profile, found), lambda text: typer.echo(text, err=True))
        has_gpus = given.cluster.devices[0].kind == "cuda"
        return on_cluster(spec, {"GPU": float("inf") if has_gpus else 0.0}), given
    return profile_of(spec, found, say=lambda text: typer.echo(text, err=True))


def as_dict(
    choice: ChosenPlan,
    frozen: Freezing,
    mode: str,
    copies: Sequence[CopiesCost],
    solve_s: float,
    foreseen: Outlook | None = None,
    packed: Sequence[PackedLayout] = (),
) -> dict[str, Any]:
    """The plan as JSON values.

    `partition` holds the layers per stage as [first, stop); `ranks` counts the ranks of all replicas; `shares` are the
    microbatches of a step in each pipeline, if they are uneven; times of `freeze`
    are makespans of one window, `kappa` is their ratio, and `ratios` are shares of weight-gradient time. `redundancy`
    is the cost of copies of layers on other ranks: bytes that all ranks together send in a step, seconds that they add
    to a step, memory on the rank that keeps most, and the most committed steps that a lost rank undoes; the numbers
    above include it. Its `copies` hold the same, the step and whether it fits, for no copy, for snapshots every so many
    steps (`every`), and for each further copy that follows every step. `gradients` says whether layers were compared
    with plain autograd, and why some are left to it. `convergence` is present if a run's estimates were given;
    `layouts`, the pipelines for each number of frozen layers, if the job's layout follows them.
    """
    plan, prediction = choice.plan, choice.prediction
    return {
        "partition": [list(layers) for layers in plan.layers],
        "ranks": plan.world_size,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "shares": list(plan.shares),
        "predicted_step_s": prediction.step_s,
        "bubble": prediction.bubble,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "alternatives": [_alternatives(each) for each in choice.alternatives],
        "solve_s": solve_s,
        "redundancy": {
            "mode": mode,
            **asdict(prediction.redundancy),
            "copies": [asdict(each) for each in copies],
        },
        "freeze": {
            "unfrozen_s": frozen.unfrozen_s,
            "solved_s": frozen.solved_s,
            "all_frozen_s": frozen.all_frozen_s,
            "ratios": [list(ratio) for ratio in frozen.ratios],
            "mean_per_stage": list(frozen.mean_per_stage),
            "kappa": frozen.kappa,
        },
        **({} if foreseen is None else {"convergence": _convergence(foreseen)}),
        **({"layouts": [_layout(each) for each in packed]} if packed else {}),
    }


def _layout(each: PackedLayout) -> dict[str, Any]:
    plan = each.plan
    return {
        "frozen": each.frozen,
        "pipelines": plan.pipeline_count,
        "ranks": plan.pipeline_ranks,
        "replicas": plan.replicas,
        "schedule": plan.schedule,
        "partition": [list(layers) for layers in plan.layers],
        "predicted_step_s": plan.predicted_step_s,
        "unpacked_step_s": each.unpacked_s,
    }


def _convergence(foreseen: Outlook) -> dict[str, Any]:
    found = foreseen.asynchronous
    return {
        "smoothness": foreseen.convergence.smoothness,
        "second_moment": foreseen.convergence.second_moment,
        "steps": foreseen.steps,
        "samples": foreseen.steps * foreseen.samples_per_update,
        "wall_clock_s": foreseen.wall_clock_s,
        "asynchronous": None
        if found is None
        else {
            "stages": len(found.stages),
            "updates": found.updates,
            "samples": found.updates * foreseen.samples_per_update,
            "microbatches_per_update": found.microbatches_per_update,
            "iteration_s": found.iteration_s,
            "wall_clock_s": found.wall_clock_s,
        },
    }


def _alternatives(each: Alternative) -> dict[str, Any]:
    return {
        "name": each.name,
        "schedule": each.schedule,
        "ranks": each.ranks,
        "microbatches": each.microbatches,
        "partition": None if each.layers is None else [list(layers) for layers in each.layers],
        "predicted_step_s": each.predicted_step_s,
        "why_not": each.why_not,
    }
