"""Runs `freshet profile`: a job's own ranks measure every layer, link and commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from orchestrator.cli.text.plan_text import comparison_text
from orchestrator.prepare.model_outline import absolute
from orchestrator.prepare.profiling import profile_of, write
from orchestrator.prepare.settling import opened
from orchestrator.quantities import rate, seconds, significant, size
from orchestrator.spec.job_spec import load
from orchestrator.spec.rules import check
from planner.profile import Cluster, Profile
from planner.wording import counted
from workers.protocol.errors import JobError

WIDTH = 100
"""Columns of the tables, if no terminal sets them."""


def profile_command(path: Path, overrides: Sequence[str], *, out: Path | None) -> None:
    """Measure the job of the spec at `path`, print its costs, and write them if asked.

    Raises:
        JobError: something that the user can fix.
    """
    spec = check(absolute(load(path, overrides)))
    if out is not None and not out.resolve().parent.is_dir():
        raise JobError(f"--out {out}: there is no folder {out.resolve().parent}")
    _, profile = profile_of(*opened(spec), afresh=True, say=lambda text: typer.echo(text, err=True))
    if out is not None:
        try:
            write(profile, out)
        except OSError as error:
            raise JobError(f"measured, but cannot write --out {out}: {error.strerror or error}") from error
    show(Console(highlight=False), profile)
    if out is not None:
        typer.echo(f"wrote {out}")


def show(console: Console, profile: Profile) -> None:
    """Print `profile` as tables."""
    model, cluster = profile.model, profile.cluster
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(profile.source, markup=False)
    console.print(
        f"one microbatch of {counted(model.microbatch_size, 'sample')}, {model.precision},"
        f" {counted(model.threads, 'thread')} per rank; times in ms, memory in KiB",
        markup=False,
    )
    if model.settings:
        settings = ", ".join(f"{name} = {json.dumps(value)}" for name, value in model.settings.items())
        console.print(f"made with {settings}", markup=False, soft_wrap=True)
    console.print(_layers(profile))
    console.print(_devices(cluster))
    if len(cluster.devices) > 1:
        console.print(_links(profile))
    console.print(f"commit {seconds(cluster.commit_s)}")
    console.print(f"gradients: {comparison_text(model)}", markup=False, soft_wrap=True)
    uncovered = [f"{layer.name}.{name}" for layer in model.layers for name in layer.uncovered]
    if uncovered:
        console.print(f"gradients that take a second walk of the graph: {', '.join(uncovered)}", markup=False)


def _layers(profile: Profile) -> Table:
    table = Table(box=None)
    table.add_column("layer")
    for name in ("F", "I", "W", "update", "parameters", "activations", "held I to W", "boundary"):
        table.add_column(name, justify="right")
    layers = profile.model.layers
    for layer in layers:
        table.add_row(
            layer.name,
            *(
                _milliseconds(value)
                for value in (layer.forward_s, layer.input_grad_s, layer.weight_grad_s, layer.update_s)
            ),
            f"{layer.parameters:,}",
            _kib(layer.activation_bytes),
            _kib(layer.weight_grad_hold_bytes),
            _kib(layer.boundary_bytes),
        )
    table.add_row(
        "model",
        _milliseconds(sum(layer.forward_s for layer in layers)),
        _milliseconds(sum(layer.input_grad_s for layer in layers)),
        _milliseconds(sum(layer.weight_grad_s for layer in layers)),
        _milliseconds(sum(layer.update_s for layer in layers)),
        f"{sum(layer.parameters for layer in layers):,}",
        _kib(sum(layer.activation_bytes for layer in layers)),
        _kib(sum(layer.weight_grad_hold_bytes for layer in layers)),
        "",
    )
    return table


def _devices(cluster: Cluster) -> Table:
    table = Table("rank", "device", "memory", "machine", "slowdown", box=None)
    for rank, device in enumerate(cluster.devices):
        table.add_row(
            str(rank),
            f"{device.name} ({device.kind})",
            size(device.memory_bytes),
            device.machine,
            significant(device.slowdown),
        )
    return table


def _links(profile: Profile) -> Table:
    """The links between neighbours; the file has every pair."""
    message = max(layer.boundary_bytes for layer in profile.model.layers)
    table = Table(
        "link",
        "latency",
        "bytes/s",
        f"holds sender, {size(message)}",
        f"holds receiver, {size(message)}",
        box=None,
    )
    ranks = len(profile.cluster.devices)
    for source in range(ranks):
        for target in (source - 1, source + 1):
            if 0 <= target < ranks:
                link = profile.cluster.link(source, target)
                table.add_row(
                    f"{source} -> {target}",
                    seconds(link.latency_s),
                    rate(link.bytes_per_s),
                    seconds(link.sender_busy_s(message)),
                    seconds(link.receiver_busy_s(message)),
                )
    return table


def _milliseconds(value_s: float) -> str:
    return f"{value_s * 1e3:.3f}"


def _kib(count_bytes: int) -> str:
    return f"{count_bytes / 1024:,.1f}"
