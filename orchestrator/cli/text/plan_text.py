"""Shows a plan at a terminal: its stages, its alternatives, its freezing, its binding limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from orchestrator.analysis.outlook import MOST_SHARED, Outlook
from orchestrator.analysis.step_causes import simulated_causes
from orchestrator.pictures.heat_map import heat_map
from orchestrator.pictures.timeline_text import legend, memory_peaks, terminal
from orchestrator.prepare.layouts import PackedLayout
from orchestrator.prepare.planning import Freezing
from orchestrator.quantities import percent, seconds, significant, size
from planner.plan import PlanError
from planner.profile import ModelProfile
from planner.search.copies_cost import CopiesCost
from planner.search.search import Alternative, ChosenPlan
from planner.wording import counted, pipelines_text, shares_text

SHOWN = 12
"""Rows of alternatives; JSON has them all."""
WIDTH = 120
"""Columns of tables and timeline, if no terminal sets them."""


def show(
    console: Console,
    choice: ChosenPlan,
    freezing: Freezing,
    mode: str,
    copies: Sequence[CopiesCost],
    outlook: Outlook | None = None,
    layouts: Sequence[PackedLayout] = (),
) -> None:
    """Print everything about `choice`; `mode` is the job's redundancy, `copies` the price of its copies, `layouts` its
    pipelines once layers are frozen."""

    if not console.is_terminal:
        console.width = max(console.width, WIDTH)

    def post(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    plan, prediction = choice.plan, choice.prediction
    post(
        f"{plan.schedule}: {counted(plan.stages, 'stage')} on {counted(plan.pipeline_ranks, 'rank')}"
        f"{pipelines_text(plan.pipeline_count, plan.replicas)},"
        f" {counted(plan.microbatches, 'microbatch', 'microbatches')}"
    )
    if plan.shares:
        post(f"a step has {shares_text(plan.shares)}")
    post(plan.reason)
    post(f"profile: {prediction.profile.source}")
    post(f"gradients: {comparison_text(prediction.profile.model)}")
    console.print(_stages(choice))
    post(
        f"predicted step {seconds(prediction.step_s)}, bubble {percent(prediction.bubble)}, peak memory"
        f" {size(prediction.peak_memory_bytes)}"
    )
    post(f"redundancy {mode}: {_redundancy(choice, mode)}")
    if copies:
        console.print(_copies(copies))
    critical = frozenset(simulated_causes(prediction.simulation).critical.spans)
    console.print(terminal(prediction.simulation.timeline, console.width, critical=critical), no_wrap=True)
    console.print(legend(prediction.simulation.timeline, critical=True))
    post(memory_peaks([rank.peak for rank in prediction.memory.ranks]))
    if choice.alternatives:
        console.print(_alternatives(choice))
    if plan.pipeline_ranks > 1 and (found := _end_to_end(choice)):
        post(f"DynPipe's Algorithm 1: {found}")
    if outlook is not None:
        post(_outlook(outlook))
    if freezing.freezes:
        post(
            f"freezing: window {seconds(freezing.unfrozen_s)} -> {seconds(freezing.solved_s)} (all frozen"
            f" {seconds(freezing.all_frozen_s)}), step {seconds(freezing.prediction.step_s)}, kappa"
            f" {freezing.kappa:.3f} ({freezing.approximate_kappa:.3f} by eq. 50 of TimelyFreeze); percent of"
            " weight-gradient time frozen:"
        )
        post(heat_map(freezing.ratios, console.width))
    if layouts:
        console.print(_layouts(layouts))
    for limit in binding_limits(choice, freezing):
        post(f"limit: {limit}")


def _layouts(layouts: Sequence[PackedLayout]) -> Table:
    table = Table(title="pipelines once layers are frozen (freeze.pack)", title_justify="left", box=None)
    for column in (
        "frozen layers",
        "pipelines",
        "ranks each",
        "replicas",
        "layers per stage",
        "step",
        "unpacked",
        "over none frozen",
    ):
        table.add_column(column, justify="left" if column == "layers per stage" else "right")
    for each in layouts:
        plan, step_s = each.plan, each.plan.predicted_step_s or each.unpacked_s
        table.add_row(
            str(each.frozen),
            str(plan.pipeline_count),
            str(plan.pipeline_ranks),
            str(plan.replicas),
            _counts(plan.layers),
            seconds(step_s),
            seconds(each.unpacked_s),
            # By samples: a step of more replicas has more.
            f"{layouts[0].unpacked_s / step_s * plan.replicas / layouts[0].plan.replicas:.2f} x",
        )
    return table


def comparison_text(model: ModelProfile) -> str:
    """Whether the layers were compared with plain autograd, and which are left to it."""
    if not model.checked:
        return "not compared with plain autograd yet; the ranks do that in their first step"
    text = f"{counted(len(model.layers), 'layer')} compared with plain autograd: the same numbers"
    left = "; ".join(f"{layer.name} is left to it, as {layer.whole}" for layer in model.layers if layer.whole)
    return f"{text}; {left}" if left else text


def _redundancy(choice: ChosenPlan, mode: str) -> str:
    """The cost of a failed rank, and the cost of the redundancy."""
    if mode == "none":
        return "a lost rank ends the job"
    if mode == "checkpoint":
        return "a lost rank takes the job back to its newest checkpoint; costs nothing in a step"
    cost, step_s = choice.prediction.redundancy, choice.prediction.step_s
    if not cost.bytes_per_step:
        return "other replicas hold all that a rank can lose; no copies are sent"
    longer = f"{seconds(cost.seconds_per_step)} longer ({percent(cost.seconds_per_step / step_s)})"
    if every := choice.plan.snapshot_every:
        return (
            f"every {every} steps each rank copies its layers to host memory, and {_copies_of(choice)} of them are"
            f" fetched, {size(cost.bytes_per_step)} a step on average, which makes it {longer}; a lost rank undoes"
            f" {counted(cost.undone_steps, 'committed step')} at most; snapshots take up to {size(cost.memory_bytes)}"
            " of a host's memory"
        )
    return (
        f"a step sends {size(cost.bytes_per_step)} of gradients to {_copies_of(choice)}, which makes it {longer};"
        f" copies take up to {size(cost.memory_bytes)} of {'a host' if cost.on_host else 'a rank'}'s memory"
    )


def _copies_of(choice: ChosenPlan) -> str:
    most = max(map(len, (*choice.plan.standbys, *choice.plan.snapshots)), default=1)
    return "copies" if most == 1 else f"{most} copies of every layer"


def _copies(costs: Sequence[CopiesCost]) -> Table:
    """A row per way to keep copies, with what it costs more than no copy, and each further copy than one less."""
    table = Table(
        "copies", "taken", "step", "sent in a step", "memory", "survives", "a loss undoes", box=None
    )
    before_s: float | None = None
    for each in costs:
        more = "" if before_s is None else f" (+{seconds(max(0.0, each.step_s - before_s))})"
        undone = each.undone_steps
        table.add_row(
            str(each.copies),
            "" if not each.every else "each step" if each.every == 1 else f"every {each.every} steps",
            f"{seconds(each.step_s)}{more}",
            size(each.bytes_per_step),
            size(each.memory_bytes) + ("" if each.fits else ": does not fit"),
            "no loss" if not each.copies else f"any {counted(each.copies, 'node')}",
            "all since a checkpoint"
            if undone is None
            else f"at most {counted(undone, 'step')}"
            if undone
            else "nothing",
        )
        if each.every < 2:
            before_s = each.step_s
    return table


def binding_limits(choice: ChosenPlan, freezing: Freezing) -> Iterator[str]:
    """The limits that keep the step from being shorter, a sentence each."""
    plan, prediction = choice.plan, choice.prediction
    busy_s = prediction.simulation.busy_s
    slowest = max(range(len(busy_s)), key=lambda rank: busy_s[rank])
    yield f"rank {slowest} computes longest, {seconds(busy_s[slowest])} of {seconds(prediction.step_s)}"
    devices = prediction.profile.cluster.devices
    fullest = max(
        range(plan.pipeline_ranks),
        key=lambda rank: prediction.memory.peak_bytes[rank] / devices[rank].memory_bytes,
    )
    peak, memory = prediction.memory.peak_bytes[fullest], devices[fullest].memory_bytes
    yield f"rank {fullest} fills its memory most, {size(peak)} of {size(memory)} ({percent(peak / memory)})"
    for stage, value in enumerate(freezing.duals):
        if value > 0:
            yield f"r_max on stage {stage}: 0.01 more would shorten the window by {seconds(0.01 * value)}"


def _stages(choice: ChosenPlan) -> Table:
    """A row per stage; a rank's memory and device are in its first row."""
    plan, prediction = choice.plan, choice.prediction
    layers, cluster = prediction.profile.model.layers, prediction.profile.cluster
    table = Table("stage", "layers", "forward", "I", "W", "rank", "device", "memory", box=None)
    shown: set[int] = set()
    for stage, ((first, stop), rank) in enumerate(zip(plan.layers, plan.stage_ranks, strict=True)):
        held, device = layers[first:stop], cluster.devices[rank]
        kinds_s = (
            sum(layer.forward_s for layer in held),
            sum(layer.input_grad_s for layer in held),
            sum(layer.weight_grad_s for layer in held),
        )
        peak = prediction.memory.peak_bytes[rank]
        table.add_row(
            str(stage),
            f"{first}-{stop - 1} {held[0].name}{f' … {held[-1].name}' if len(held) > 1 else ''}",
            *(seconds(kind_s * device.slowdown) for kind_s in kinds_s),
            str(rank),
            "" if rank in shown else f"{device.name or device.kind}",
            "" if rank in shown else f"{size(peak)} of {size(device.memory_bytes)}",
        )
        shown.add(rank)
    return table


def _alternatives(choice: ChosenPlan) -> Table:
    """The alternatives, the chosen one first, then each program's own pick; programs that agree share a row."""
    names: dict[Alternative, list[str]] = {}
    for each in choice.alternatives:
        names.setdefault(replace(each, name=""), []).append(each.name)
    table = Table(
        "alternatives", "schedule", "ranks", "microbatches", "layers per stage", "step", "", box=None
    )
    ordered = sorted(names, key=lambda each: each.order(choice.plan))
    for each in ordered[:SHOWN]:
        table.add_row(
            ", ".join(names[each]),
            each.schedule,
            str(each.ranks),
            str(each.microbatches),
            _counts(each.layers),
            "" if each.predicted_step_s is None else seconds(each.predicted_step_s),
            each.why_not or "taken",
        )
    if len(ordered) > SHOWN:
        table.add_row(f"and {len(ordered) - SHOWN} more", *[""] * 6)
    return table


def _end_to_end(choice: ChosenPlan) -> str:
    """The gain of several devices per stage; empty if computing it would take long."""
    profile = choice.prediction.profile
    if len(profile.model.layers) * len(profile.cluster.devices) > MOST_SHARED:
        return ""
    try:
        found = choice.end_to_end()
    except PlanError as error:
        return str(error)
    devices = [stage.devices for stage in found.stages]
    text = (
        f"{counted(len(devices), 'stage')} on {' + '.join(map(str, devices))} devices, W(S) ="
        f" {seconds(found.iteration_s)} per microbatch, T(S) is the same for any S, as the schedule is synchronous"
    )
    return f"{text}. Not run: the engine has one device per stage" if max(devices) > 1 else text


def _outlook(outlook: Outlook) -> str:
    """The training time, and that of an asynchronous pipeline."""
    job = outlook.convergence
    text = (
        f"to a mean squared gradient norm of {significant(job.target)} (L = {significant(job.smoothness)}, ξ² ="
        f" {significant(job.second_moment)}): T = {outlook.steps:,} steps of"
        f" {outlook.samples_per_update:,} samples, whatever S, as the schedule is synchronous:"
        f" {seconds(outlook.wall_clock_s)}"
    )
    found = outlook.asynchronous
    if found is None:
        return f"{text}; asynchronous: {outlook.why_not}"
    microbatches = counted(found.microbatches_per_update, "microbatch", "microbatches")
    return (
        f"{text}; asynchronous with {counted(len(found.stages), 'stage')}, T(S) x W(S) = {found.updates:,} updates of"
        f" as many samples x {microbatches} x {seconds(found.iteration_s)} = {seconds(found.wall_clock_s)}, with"
        " stashed weights in memory; no engine here runs it yet"
    )


def _counts(layers: Sequence[tuple[int, int]] | None) -> str:
    return "" if layers is None else " ".join(str(stop - first) for first, stop in layers)
