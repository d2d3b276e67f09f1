"""`freshet events`: shows what happened to a job."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address, Job


def events(
    job: Job,
    after: Annotated[int, typer.Option(min=0, help="Leave out this many events; 0: none.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as events happen, until the job has ended.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each as its line of the event log.")] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Show only events of this kind, such as regrouped or warned; may be given several times."
        ),
    ] = None,
    address: Address = None,
) -> None:
    """Show the events since the job's newest start, each with its number and time."""
    from orchestrator.cli.exit_codes import INTERRUPTED
    from orchestrator.cli.job_events import events_command

    try:
        events_command(
            job, address, after=after, follow=follow, as_json=as_json, kinds=kind or (), show=typer.echo
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
