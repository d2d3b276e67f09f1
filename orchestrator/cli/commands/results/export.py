"""`freshet export`: writes a run's weights into one file."""

from __future__ import annotations

from typing import Annotated

import typer


def export(
    run: Annotated[str, typer.Argument(help="A job's output folder.")],
    out: Annotated[str, typer.Option(help="The safetensors file to write: a path or a URI.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that holds something else.")] = False,
) -> None:
    """Write the weights of a run's newest checkpoint into one safetensors file. An earlier safetensors file is
    replaced; any other file stays, unless --force is given."""
    from orchestrator.cli.exporting import export_command

    for line in export_command(run, out, force=force):
        typer.echo(line)
