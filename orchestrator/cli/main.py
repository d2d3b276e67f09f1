"""The command line. Every command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.faults import fault
from orchestrator.cli.follow import follow
from orchestrator.cli.move import move
from orchestrator.cli.rehearse import rehearse
from orchestrator.cli.schedule import schedule
from orchestrator.cli.verify import verify
from workers.protocol import JobError

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

app = typer.Typer(
    name="freshet",
    help="Elastic pipeline-parallel training on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("schedule")(schedule)
app.command("rehearse")(rehearse)
app.command("verify")(verify)
app.command("fault")(fault)
app.command("follow")(follow)
app.command("move")(move)


@app.command()
def train(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file; docs/spec.md lists every key.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the spec. May be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in job.output.")] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Plan with this profile instead of measuring, see freshet profile.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Freeze as this event log says: a recorded run once more, to the bit."),
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Write the run's numbers to this file, as JSON.")
    ] = None,
) -> None:
    """Train. Ctrl-C stops after the step in flight, with a checkpoint; a second one ends at once."""
    from orchestrator.cli.train import train_command

    try:
        code = train_command(
            spec, overrides or [], resume=resume, profile=profile, replay=replay, summary=summary
        )
    except KeyboardInterrupt:
        typer.echo("freshet: interrupted before the job was running", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


@app.command()
def profile(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file.")],
    out: Annotated[Path | None, typer.Option(help="Write the profile to this file, as JSON.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the spec. May be repeated."),
    ] = None,
) -> None:
    """Measure what every layer, link and commit of a job costs, with the job's own ranks. Trains nothing."""
    from orchestrator.cli.profile import profile_command

    profile_command(spec, overrides or [], out=out)


@app.command()
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
            help="Say how many steps the target error takes, by this event log's job.curvature_every."
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


@app.command()
def timeline(
    run: Annotated[str, typer.Argument(help="A job's output folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Write it to this file: .svg, .html, or .json for Perfetto.")
    ] = None,
) -> None:
    """Show the newest measured step of a run, below its prediction where there is one."""
    from orchestrator.cli.timeline import timeline_command

    timeline_command(run, out)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A job's output folder.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> None:
    """Write the weights of a run's newest checkpoint into one safetensors file."""
    from workers.checkpoint.folder import export as export_checkpoint
    from workers.protocol import DamagedCheckpoint

    def post(damage: DamagedCheckpoint) -> None:
        typer.echo(f"skipped {damage.path}: {damage.file} {damage.problem}", err=True)

    try:
        step, tensors, size = export_checkpoint(str(run), str(out), post)
    except OSError as error:
        raise JobError(f"cannot write {out}: {error.strerror or error}") from error
    typer.echo(f"wrote {out}: {tensors} tensors of step {step}, {size} bytes")


@app.command()
def status(
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
) -> None:
    """List the jobs of a running cluster."""
    from orchestrator.cli.jobs import status_lines

    for line in status_lines(address):
        typer.echo(line)


@app.command()
def stop(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
    now: Annotated[bool, typer.Option(help="End at once, without a checkpoint.")] = False,
) -> None:
    """Stop a job of a running cluster after the step in flight, with a checkpoint."""
    from orchestrator.cli.jobs import stop_job

    stop_job(job, address, now=now)


@app.command()
def reap(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
    force: Annotated[bool, typer.Option(help="Kill it even if it is at work.")] = False,
) -> None:
    """Clear what an abandoned job left on a running cluster: its ranks, reservations and controller."""
    from orchestrator.cli.jobs import reap_job

    typer.echo(reap_job(job, address, force=force))


def main() -> None:
    """Entry point of the console script."""
    # As `python -m` does: factories and sources by import path may lie in the current folder.
    sys.path.insert(0, os.getcwd())
    try:
        app()
    except JobError as error:
        typer.echo(f"freshet: {error}", err=True)
        sys.exit(USER_ERROR)
