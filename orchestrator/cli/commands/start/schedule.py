"""`freshet schedule`: what a schedule costs, as numbers, picture, CSV or SVG. Trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def schedule(
    name: Annotated[
        str, typer.Argument(help="gpipe, 1f1b, interleaved, zb-h1, zbv, or csv:PATH for a table of your own.")
    ],
    ranks: Annotated[int | None, typer.Option(help="Pipeline ranks, P. Not needed for csv:PATH.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches of one step, M. Not needed for csv:PATH.")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Stages per rank, for families with a choice (interleaved: 2 and up).")
    ] = None,
    f: Annotated[float, typer.Option("--f", help="Seconds of a forward, per stage and microbatch.")] = 1.0,
    i: Annotated[float, typer.Option("--i", help="Seconds of an input gradient.")] = 1.0,
    w: Annotated[
        float, typer.Option("--w", help="Seconds of a weight gradient; a full backward takes i + w.")
    ] = 1.0,
    comm: Annotated[float, typer.Option("--comm", help="Seconds of a message from rank to rank.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every start and end.")] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Write the table as PyTorch's pipelining reads it.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture.")] = None,
) -> None:
    """Show a schedule: makespan, bubble and in-flight microbatches per rank, and its picture."""
    from orchestrator.cli import schedule as command

    try:
        command.schedule(
            name, ranks, microbatches, chunks, (f, i, w), comm, as_json=as_json, csv=csv, svg=svg
        )
    except (ValueError, OSError) as error:
        problem = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        typer.echo(f"freshet schedule: {problem}", err=True)
        raise typer.Exit(2) from None
