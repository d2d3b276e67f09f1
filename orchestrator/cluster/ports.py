"""Ports of this machine, and Ray nodes that know those of their agents before these run."""

from __future__ import annotations

import inspect
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

AGENTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
    "dashboard_agent_listen_port",
)
UNTOLD = "dashboard_agent_listen_port"
"""The one that Ray does not pass on to a node's raylet, which reads it from a file that the agent writes."""

QUIET_PORTS = range(20_000, 32_000)
"""Below the ports that Linux chooses from (32768 and up), above those of Ray's workers."""


@contextmanager
def agents_announced() -> Iterator[None]:
    """Inside the context, Ray nodes that this process starts know where their agents will listen.

    Else a raylet waits 15 s for each of them to say so, and ends itself then: on a busy machine they have not even been
    imported (Ray's issue 65983).
    """
    from ray._private import services
    from ray._raylet import persist_port  # pyright: ignore[reportAttributeAccessIssue]

    start_raylet = services.start_raylet
    signature = inspect.signature(start_raylet)

    def start(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        given = bound.arguments
        lacking = [agent for agent in AGENTS if not given.get(agent)]
        given.update(zip(lacking, free_ports(len(lacking)), strict=True))
        persist_port(given["session_dir"], given["node_id"], UNTOLD, given[UNTOLD])
        return start_raylet(*bound.args, **bound.kwargs)

    services.start_raylet = start
    try:
        yield
    finally:
        services.start_raylet = start_raylet


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, of those that no system gives to outgoing connections: on a busy machine it
    can take half a minute until somebody listens there."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = secrets.choice(QUIET_PORTS)
            with suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
    return ports
