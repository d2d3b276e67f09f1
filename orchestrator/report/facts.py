"""`What ran`, for `report.html`: the resolved spec and the plan in words. Leaves out what the spec lacks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from orchestrator.events.types import Finished
from orchestrator.history.job_view import JobView
from orchestrator.quantities import counted
from planner.plan import Plan


def facts(run: JobView) -> str:
    """What ran, as a list of terms."""
    spec = run.spec
    entries = [
        ("Model", model_text(spec.get("model", {}))),
        ("Data", data_text(spec.get("data", {}))),
        ("Optimizer", optimizer_text(spec.get("optimizer", {}))),
    ]
    if run.plan is not None:
        entries += [
            ("Ranks", ranks_text(run.plan, len(run.nodes))),
            ("Partition", partition_text(run.plan)),
            ("Schedule", schedule_text(run.plan, spec.get("pipeline", {}))),
            ("Plan", run.plan.reason),
        ]
    job = spec.get("job", {})
    threads = job.get("threads")
    device = [device_text(run), job.get("precision", "")]
    if threads is not None:
        device.append(f"{counted(threads, 'thread')} per rank")
    entries.append(("Device", ", ".join(part for part in device if part)))
    entries.append(("Seed", str(job.get("seed", ""))))
    items = "".join(f"<div><dt>{term}</dt><dd>{escape(text)}</dd></div>" for term, text in entries if text)
    if isinstance(run.outcome, Finished) and run.outcome.state_sha256 is not None:
        digest = escape(run.outcome.state_sha256)
        items += f'<div><dt>State SHA-256</dt><dd class="mono">{digest}</dd></div>'
    return f'<section><h2>What ran</h2><dl class="card facts">{items}</dl></section>'


def model_text(model: Mapping[str, Any]) -> str:
    """The model in a few words."""
    if model.get("factory"):
        return str(model["factory"])
    if not model.get("family"):
        return ""
    parts = [str(model["family"])]
    parts += [f"{model['layers']} blocks"] if "layers" in model else []
    parts += [f"width {model['width']}"] if "width" in model else []
    if model["family"] != "vit" and "context" in model:
        parts.append(f"context {model['context']}")
    return ", ".join(parts)


def data_text(data: Mapping[str, Any]) -> str:
    """Where the samples came from."""
    path = data.get("path") or ()
    paths = [path] if isinstance(path, str) else [str(part) for part in path]
    return ", ".join([str(data["source"]), *paths]) if "source" in data else ""


def optimizer_text(optimizer: Mapping[str, Any]) -> str:
    """The update rule with its chief settings."""
    if "name" not in optimizer:
        return ""
    settings = (("lr", "peak learning rate"), ("weight_decay", "weight decay"), ("clip_norm", "clip norm"))
    parts = [str(optimizer["name"])]
    parts += [f"{words} {optimizer[key]:g}" for key, words in settings if optimizer.get(key) is not None]
    if optimizer.get("warmup_steps"):
        parts.append(counted(optimizer["warmup_steps"], "warm-up step"))
    return ", ".join(parts)


def ranks_text(plan: Plan, nodes: int) -> str:
    """How many ranks, in how many replicas, on how many nodes."""
    text = str(plan.world_size)
    if plan.replicas > 1:
        text += f", {plan.replicas} replicas of {plan.pipeline_ranks}"
    return f"{text}, on {counted(nodes, 'node')}" if nodes else text


def partition_text(plan: Plan) -> str:
    """Layers per stage, first stage first."""
    cut = " + ".join(str(stop - first) for first, stop in plan.layers)
    return f"{cut} layers in {counted(plan.stages, 'stage')}"


def schedule_text(plan: Plan, pipeline: Mapping[str, Any]) -> str:
    """The family, and what it was given."""
    batch = counted(plan.microbatches, "microbatch", "microbatches")
    samples = pipeline.get("microbatch_size")
    parts = [plan.schedule, f"{batch} of {counted(samples, 'sample')}" if samples else batch]
    if plan.chunks > 1:
        parts.append(f"{plan.chunks} stages per rank")
    if plan.recompute:
        parts.append(f"{counted(len(plan.recompute), 'layer')} recomputed")
    return ", ".join(parts)


def device_text(run: JobView) -> str:
    """What the ranks computed on; says so if it was emulated."""
    device = run.spec.get("cluster", {}).get("device")
    if device is None:
        return ""
    return "emulated device" if run.emulated else str(device)
