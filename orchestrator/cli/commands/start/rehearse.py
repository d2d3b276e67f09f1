"""`freshet rehearse`: replays a spot trace against a job, or slows one of its ranks down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Overrides


def rehearse(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file.")],
    trace: Annotated[
        Path | None, typer.Option(help="CSV file of time_ms, add|remove, node: when nodes come and go.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="P:D[:B]",
            help="Make up a trace: each node is preempted with probability P every D minutes, and a new one comes"
            " after B minutes (D if unset, or `never`). It lasts an hour, or as --window says.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many slots of the trace to keep, evenly spread; unset: pipeline.ranks."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks of the job; unset: one on each node of a trace, else pipeline.ranks (real ranks beside a"
            " neighbour: at most one per core).",
        ),
    ] = None,
    speedup: Annotated[
        float | None,
        typer.Option(
            help="How many times as fast to replay; unset: so fast that the trace fits into the job."
        ),
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="A-B", help="Replay only minutes A to B of the trace.")
    ] = None,
    grace: Annotated[
        str,
        typer.Option(
            metavar="SECONDS", help="Give notice of each loss so many seconds of the trace ahead; or `none`."
        ),
    ] = "none",
    seed: Annotated[int, typer.Option(help="Seed of the synthetic trace.")] = 0,
    interference: Annotated[
        str | None,
        typer.Option(
            metavar="light|heavy",
            help="A neighbour slows one rank down, again and again: a process on its core, or a fault if devices are"
            " emulated. The job is trained without and with adaptation.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="--interference: how the job adapts, as in adapt.policy; unset: the job's own, or measured if that is"
            " off. Give several to train with each."
        ),
    ] = None,
    beside_off: Annotated[
        bool,
        typer.Option("--beside-off/--no-beside-off", help="--interference: train without adaptation first."),
    ] = True,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="--interference: what the neighbour does: compute (the default), hashes, memory, fill, pages, cache,"
            " random, network, pipe, disk or files.",
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="--interference: the rank that it slows down; unset: 1.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="--interference: the neighbour is away for so many steps and there for as many, in turn; unset: it"
            " comes twice.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="--interference: stop each job that would train for longer than its part of so many minutes."
            " [default: 10]",
        ),
    ] = None,
    dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard", help="--interference: serve the job's page meanwhile, and print its address."
        ),
    ] = False,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The job's folder; unset: that of --set job.output, else runs/NAME-rehearsal, or the next free one."
            " --interference: the folder of all jobs' folders; unset: runs/NAME-interference, or the next free one."
        ),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option("--finish", help="Train to the last step after the trace, where --speedup is given."),
    ] = False,
    write_trace: Annotated[
        Path | None,
        typer.Option(help="Write the trace to this file, as it is replayed but at its own speed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Replay a spot trace against a job: Ray nodes of this machine are killed and added as the trace says. Or let a
    neighbour slow one rank down, with --interference."""
    from orchestrator.cli.exit_codes import INTERRUPTED
    from orchestrator.cli.rehearsing import RehearsalOptions, rehearse_command
    from orchestrator.cli.rehearsing_interference import InterferenceOptions, interference_command
    from workers.protocol.errors import JobError

    options = RehearsalOptions(
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
    of_neighbour = {
        "--policy": policy,
        "--no-beside-off": not beside_off or None,
        "--kind": kind,
        "--rank": rank,
        "--every": every,
        "--minutes": minutes,
        "--dashboard": dashboard or None,
    }
    alone = [name for name, value in of_neighbour.items() if value is not None]
    if interference is None and alone:
        raise JobError(f"{alone[0]} goes with a neighbour: name one with --interference light or heavy")
    try:
        if interference is None:
            code = rehearse_command(options)
        else:
            given = InterferenceOptions(
                level=interference,
                kind=kind,
                rank=rank,
                every=every,
                policies=tuple(policy or ()),
                beside_off=beside_off,
                dashboard=dashboard,
                **({} if minutes is None else {"minutes": minutes}),
            )
            code = interference_command(options, given)
    except KeyboardInterrupt:
        typer.echo("freshet: interrupted before the job was running", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)
