"""`freshet plan`: says what a job would do, or what another cut would bring a running one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Address, GivenProfile, Json, Overrides, Wait
from workers.protocol.errors import JobError

NETWORK_GBIT = "400"


def plan(
    spec: Annotated[Path | None, typer.Argument(help="The job's TOML file.")] = None,
    overrides: Overrides = None,
    profile: GivenProfile = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERxDEVICE",
            help="Plan for devices that need not be there, such as 8xh100, one per machine: times from the model's"
            " shapes and their data sheets.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="GBIT/S",
            help="With --on: of the link between any two machines; or link, for devices of one machine that are"
            " connected as their maker connects them. [default: 400]",
        ),
    ] = None,
    as_json: Json = False,
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
    job: Annotated[
        str | None,
        typer.Option(help="In place of a spec, this running job: what another cut would bring it."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="With --job: layers per stage; unset: the planner's best for the same ranks.",
        ),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="With --job: move the layers, if the job's plan is still the same."),
    ] = False,
    wait: Wait = False,
    address: Address = None,
) -> None:
    """Say what a job would do and why: stages, step time, memory, freeze ratios, alternatives. Trains nothing. With
    --job, say what another cut would bring a running job: step time, memory, layers that move. Nothing changes without
    --apply."""
    if (spec is None) == (job is None):
        raise JobError("plan what? Give a spec, or --job and the name of a running job")
    if job is not None:
        if overrides or profile or on or network or timeline or estimates or target_error is not None:
            raise JobError(
                "--set, --profile, --on, --network, --timeline, --estimates and --target-error go with a spec, not"
                " with --job"
            )
        from orchestrator.cli.plan_of_job import plan_of_job

        plan_of_job(job, address, partition, apply=apply, wait=wait, as_json=as_json, show=typer.echo)
        return
    if partition is not None or apply or wait:
        raise JobError("--partition, --apply and --wait go with --job, not with a spec")
    assert spec is not None
    if on is not None and profile is not None:
        raise JobError("--on and --profile both say what to plan with: give one of them")
    if network is not None and on is None:
        raise JobError("--network goes with --on")
    from orchestrator.cli.plan import plan_command
    from orchestrator.prepare.on_paper import PaperCluster

    plan_command(
        spec,
        overrides or [],
        profile=profile,
        on=None if on is None else PaperCluster.parse(on, NETWORK_GBIT if network is None else network),
        as_json=as_json,
        timeline=timeline,
        estimates=estimates,
        target_error=target_error,
    )
