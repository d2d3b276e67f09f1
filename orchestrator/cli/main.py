"""The command line. Every command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.schedule import schedule
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


@app.command()
def train(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file; docs/spec.md lists every key.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the spec. May be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in job.output.")] = False,
    summary: Annotated[
        Path | None, typer.Option(help="Write the run's numbers to this file, as JSON.")
    ] = None,
) -> None:
    """Train. Ctrl-C stops after the step in flight, with a checkpoint; a second one ends at once."""
    from orchestrator.cli.train import train_command

    try:
        code = train_command(spec, overrides or [], resume=resume, summary=summary)
    except KeyboardInterrupt:
        typer.echo("freshet: interrupted before the job was running", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A job's output folder.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> None:
    """Write the weights of a run's newest checkpoint into one safetensors file."""
    from workers.checkpoint import export as export_checkpoint
    from workers.protocol import DamagedCheckpoint

    def tell(damage: DamagedCheckpoint) -> None:
        typer.echo(f"skipped {damage.path}: {damage.file} {damage.problem}", err=True)

    try:
        step, tensors, size = export_checkpoint(str(run), str(out), tell)
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


def main() -> None:
    """Entry point of the console script."""
    # As `python -m` does: factories and sources by import path may lie in the current folder.
    sys.path.insert(0, os.getcwd())
    try:
        app()
    except JobError as error:
        typer.echo(f"freshet: {error}", err=True)
        sys.exit(USER_ERROR)
