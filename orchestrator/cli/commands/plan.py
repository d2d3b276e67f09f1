"""`freshet plan`: says what a job would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the spec. May be repeated."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Plan with this profile instead of measuring, see freshet profile.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the predicted step: .svg, .html, or .json for Perfetto.")
    ] = None,
    estimates: Annotated[
        Path | None,
        typer.Option(
            help="Say how many steps the target error takes, from the curvature in this event log."
            " job.curvature_every has a run measure it."
        ),
    ] = None,
    target_error: Annotated[
        float | None, typer.Option(help="Mean squared gradient norm that counts as converged.")
    ] = None,
) -> None:
    """Say what a job would do and why: stages, step time, memory, freeze ratios, alternatives. Trains nothing."""
    from orchestrator.cli.plan import plan_command

    plan_command(
        spec,
        overrides or [],
        profile=profile,
        as_json=as_json,
        timeline=timeline,
        estimates=estimates,
        target_error=target_error,
    )
