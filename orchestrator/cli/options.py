"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Job = Annotated[str, typer.Argument(help="The job's name.")]
Address = Annotated[
    str | None,
    typer.Option(
        help="A Ray cluster, as in cluster.address, or the URL of a Freshet service.",
        show_default="FRESHET_ADDRESS, else the only cluster of this machine",
    ),
]
ClusterAddress = Annotated[str, typer.Option(help="The cluster, as in cluster.address.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Id = Annotated[
    str | None,
    typer.Option(help="The command's id: sent twice with one id, it is done once; unset: a new one."),
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the outcome.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the spec. May be repeated."),
]
GivenProfile = Annotated[
    Path | None, typer.Option(help="Plan with this profile instead of measuring, see freshet profile.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in job.output.")]
