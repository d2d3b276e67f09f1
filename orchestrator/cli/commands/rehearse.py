"""`freshet rehearse`: its options. What they do is in `rehearsing.py`, which is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rehearse(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file.")],
    trace: Annotated[
        Path | None, typer.Option(help="CSV file of time_ms, add|remove, node: when nodes come and go.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="P:D[:B]",
            help="Make a trace up: each node is preempted with probability P every D minutes, and a new one comes"
            " after B minutes (D if unset, or `never`). An hour long, or as --window says.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Keep so many evenly spread slots of the trace; unset: pipeline.ranks."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job, one on each node; unset: as many as nodes.")
    ] = None,
    speedup: Annotated[
        float | None,
        typer.Option(help="Replay so many times as fast; unset: so fast that the trace fits into the job."),
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="A-B", help="Replay only minutes A to B of the trace.")
    ] = None,
    grace: Annotated[
        str,
        typer.Option(metavar="SECONDS", help="Tell of a loss so many seconds of the trace ahead; or `none`."),
    ] = "none",
    seed: Annotated[int, typer.Option(help="Of the synthetic trace.")] = 0,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the spec. May be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The job's folder; unset: --set job.output, else runs/NAME-rehearsal, or the next one free."
        ),
    ] = None,
    finish: Annotated[
        bool, typer.Option(help="Train to the last step after the trace, where --speedup is given.")
    ] = False,
    write_trace: Annotated[
        Path | None, typer.Option(help="Write the trace as it is replayed, but for its speed, to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Replay a spot trace against a job, on Ray nodes of this machine that are killed and added as it says."""
    from orchestrator.cli.exit_codes import INTERRUPTED
    from orchestrator.cli.rehearsing import Options, rehearse_command

    options = Options(
        spec=spec,
        trace=trace,
        synthetic=synthetic,
        nodes=nodes,
        ranks=ranks,
        speedup=speedup,
        window=window,
        grace=grace,
        seed=seed,
        overrides=tuple(overrides or ()),
        out=out,
        finish=finish,
        write_trace=write_trace,
        as_json=as_json,
    )
    try:
        code = rehearse_command(options)
    except KeyboardInterrupt:
        typer.echo("freshet: interrupted before the job was running", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)
