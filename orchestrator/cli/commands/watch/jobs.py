"""`freshet jobs`: lists jobs with their numbers."""

from __future__ import annotations

import typer

from orchestrator.cli.options import Address, Json


def jobs(as_json: Json = False, address: Address = None) -> None:
    """List the jobs of a cluster: state, step, loss, throughput, ranks, effective training time."""
    from orchestrator.cli.jobs import jobs_command

    jobs_command(address, as_json=as_json, show=typer.echo)
