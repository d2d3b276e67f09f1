"""`freshet dashboard`: serves the REST interface and the pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.client.shadowing import refusal, shadowing
from workers.protocol.errors import JobError


def dashboard(
    address: Annotated[
        str | None, typer.Option(help="The cluster, as in cluster.address; with --runs, none by default.")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Show the past runs in this folder, with no cluster unless --address names one."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0, which is all of them, wants --host-name too.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8270,
    host_name: Annotated[
        list[str] | None,
        typer.Option(help="Another name or address under which the service is reached, such as a proxy's."),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="Where the tokens are; made if not there.")] = None,
    audit_log: Annotated[Path | None, typer.Option(help="Where controls are logged.")] = None,
    trust_specs: Annotated[
        bool, typer.Option("--trust-specs", help="Take specs that import code or name any file.")
    ] = False,
    root: Annotated[
        list[Path] | None, typer.Option(help="A folder in which submitted specs may name files.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM), for HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    any_port: Annotated[
        bool, typer.Option("--any-port", help="Take another port if this one is taken.")
    ] = False,
    until_input_ends: Annotated[
        bool, typer.Option("--until-input-ends", hidden=True, help="End when standard input does.")
    ] = False,
) -> None:
    """Serve the pages and the REST interface of a cluster's jobs, or of past runs, until interrupted."""
    if (hidden := shadowing(sys.path, ("dashboard",))) is not None:
        raise JobError(refusal(hidden, "this command, which imports"))
    from dashboard.server import serve
    from dashboard.service.settings import AUDIT, TOKENS, ServiceSettings

    serve(
        ServiceSettings(
            address=address if address is not None else (None if runs else "auto"),
            runs=tuple(runs or ()),
            host=host,
            port=port,
            any_port=any_port,
            until_input_ends=until_input_ends,
            hosts=tuple(host_name or ()),
            tokens=token_file or TOKENS,
            audit=audit_log or AUDIT,
            trust_specs=trust_specs,
            roots=tuple(root) if root else (Path.cwd(),),
            tls_certificate=tls_cert,
            tls_key=tls_key,
        ),
        typer.echo,
    )
