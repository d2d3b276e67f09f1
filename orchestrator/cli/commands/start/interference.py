"""`freshet interference`: measures how neighbours slow stages down on this machine, and fits a model to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

interference = typer.Typer(
    name="interference",
    help="Measure how neighbours slow stages down on this machine, and fit a model that predicts it.",
    no_args_is_help=True,
)

Device = Annotated[
    Literal["cpu", "cuda"], typer.Option(help="What the stages run on; each has a model of its own.")
]

Windows = Annotated[
    Path | None, typer.Option(help="File of measured windows; without it the one of this user's cache.")
]
Model = Annotated[
    Path | None, typer.Option(help="File of the model; without it the one of this user's cache.")
]


@interference.command()
def collect(
    windows: Windows = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Windows of each stage beside each neighbour; unset: 2, or 1 with --brief."),
    ] = None,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief", help="A fifth of the windows, as for the model that a job makes at first use."
        ),
    ] = False,
    device: Device = "cpu",
) -> None:
    """Measure stages alone and beside real neighbours: of cores, memory, caches, network, disk; on CUDA also matrix
    products and copies; light, steady and heavy."""
    from orchestrator.cli.exit_codes import INTERRUPTED
    from orchestrator.cli.interference import collect_command

    try:
        collect_command(windows, rounds, brief, device)
    except KeyboardInterrupt:
        typer.echo("freshet: interrupted; nothing was written, and no neighbour is left", err=True)
        raise typer.Exit(INTERRUPTED) from None


@interference.command()
def fit(windows: Windows = None, model: Model = None, device: Device = "cpu") -> None:
    """Fit a random forest, judge it and its rivals by neighbours that they have not seen, and store it."""
    from orchestrator.cli.interference import fit_command

    fit_command(windows, model, device)


@interference.command()
def report(
    model: Model = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("interference-model.html"),
    device: Device = "cpu",
) -> None:
    """Write a page about the model: its error by kind of neighbour, its rivals, calibration, features, latency."""
    from orchestrator.cli.interference import report_command

    report_command(model, out, device)
