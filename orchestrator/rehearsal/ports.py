"""Ports for Ray nodes of this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack

OF_AGENTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
    "dashboard_agent_listen_port",
)


def agent_ports() -> dict[str, int]:
    """Options of a node on which Ray need not wait for its agents.

    Without them a node waits 15 s until its agents say where they listen, and gives itself up then: on a busy machine
    they have not even been imported (Ray's issue 65983).
    """
    return dict(zip(OF_AGENTS, free_ports(len(OF_AGENTS)), strict=True))


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
