"""`What ran`, for `report.html`: the resolved spec and the plan in words. Omits what the spec lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.analysis.job_summary import model_text
from orchestrator.events.types import Finished
from orchestrator.history.job_view import JobView
from orchestrator.history.phase_bands import Band
from planner.plan import Plan
from planner.wording import counted, shares_text


@dataclass(frozen=True)
class Term:
    """A name and its description."""

    name: str
    text: str
    code: bool = False
    """Whether every character of it matters, as in a digest."""


def what_ran(run: JobView) -> tuple[Term, ...]:
    """The model, the data, the plan and the machine."""
    spec = run.spec
    terms = [
        Term("Model", model_text(spec.get("model", {}))),
        Term("Data", data_text(spec.get("data", {}))),
        Term("Optimizer", optimizer_text(spec.get("optimizer", {}))),
    ]
    if run.plan is not None:
        terms += [
            Term("Ranks", ranks_text(run.plan, len(run.nodes))),
            Term("Partition", partition_text(run.plan)),
            Term("Schedule", schedule_text(run.plan, spec.get("pipeline", {}))),
            Term("Plan", run.plan.reason),
        ]
    job = spec.get("job", {})
    threads = job.get("threads")
    device = [device_text(run), job.get("precision", "")]
    if threads is not None:
        device.append(f"{counted(threads, 'thread')} per rank")
    terms.append(Term("Device", ", ".join(part for part in device if part)))
    terms.append(Term("Seed", str(job.get("seed", ""))))
    if isinstance(run.outcome, Finished) and run.outcome.state_sha256 is not None:
        terms.append(Term("State SHA-256", run.outcome.state_sha256, code=True))
    return tuple(term for term in terms if term.text)


def plan_changes(run: JobView) -> tuple[int, ...]:
    """The steps after which another plan was issued, for the marks of curves."""
    return tuple(sorted({decision.step for decision in run.decisions if decision.step > 0}))


def visit_bands(run: JobView) -> tuple[Band, ...]:
    """The steps in which a rehearsal slowed a rank down, for the bands of curves."""
    visits = run.disturbed.visits if run.disturbed is not None else ()
    return tuple(Band(name="neighbour", first=visit.first, last=visit.last) for visit in visits)


def data_text(data: Mapping[str, Any]) -> str:
    """The source of the samples."""
    path = data.get("path") or ()
    paths = [path] if isinstance(path, str) else [str(part) for part in path]
    return ", ".join([str(data["source"]), *paths]) if "source" in data else ""


def optimizer_text(optimizer: Mapping[str, Any]) -> str:
    """The update rule with its main settings."""
    if "name" not in optimizer:
        return ""
    settings = (("lr", "peak learning rate"), ("weight_decay", "weight decay"), ("clip_norm", "clip norm"))
    parts = [str(optimizer["name"])]
    parts += [f"{words} {optimizer[key]:g}" for key, words in settings if optimizer.get(key) is not None]
    if optimizer.get("warmup_steps"):
        parts.append(counted(optimizer["warmup_steps"], "warm-up step"))
    return ", ".join(parts)


def ranks_text(plan: Plan, nodes: int) -> str:
    """The numbers of ranks, replicas and nodes."""
    text = str(plan.world_size)
    if plan.replicas > 1 and plan.pipeline_count == plan.replicas:
        text += f", {plan.replicas} replicas of {plan.pipeline_ranks}"
    elif plan.replicas > 1:
        text += f", {counted(plan.pipeline_count, 'pipeline')} of {plan.pipeline_ranks} for {plan.replicas} replicas"
    if plan.shares:
        text += f", a step with {shares_text(plan.shares)}"
    return f"{text}, on {counted(nodes, 'node')}" if nodes else text


def partition_text(plan: Plan) -> str:
    """Layers per stage, first stage first."""
    cut = " + ".join(str(stop - first) for first, stop in plan.layers)
    return f"{cut} layers in {counted(plan.stages, 'stage')}"


def schedule_text(plan: Plan, pipeline: Mapping[str, Any]) -> str:
    """The schedule family and its settings."""
    batch = counted(plan.microbatches, "microbatch", "microbatches")
    samples = pipeline.get("microbatch_size")
    parts = [plan.schedule, f"{batch} of {counted(samples, 'sample')}" if samples else batch]
    if plan.chunks > 1:
        parts.append(f"{counted(plan.chunks, 'stage')} per rank")
    if plan.recompute:
        parts.append(f"{counted(len(plan.recompute), 'layer')} recomputed")
    return ", ".join(parts)


def device_text(run: JobView) -> str:
    """The device that the ranks computed on; says if it was emulated."""
    device = run.spec.get("cluster", {}).get("device")
    if device is None:
        return ""
    return "emulated device" if run.emulated else str(device)
