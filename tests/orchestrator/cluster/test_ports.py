"""Ports of this machine, and what a Ray node is told of its agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray._private import services

from orchestrator.cluster.ports import AGENTS, QUIET_PORTS, UNTOLD, agents_announced, free_ports

NODE = "ab" * 28
"""A node's id in Ray's form."""


def test_a_raylet_knows_all_ports_of_its_agents_before_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def start_raylet(
        node_id: str,
        session_dir: str,
        metrics_agent_port: int | None = None,
        metrics_export_port: int | None = None,
        runtime_env_agent_port: int | None = None,
        dashboard_agent_listen_port: int | None = None,
    ) -> None:
        told.update(locals())

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    with agents_announced():
        services.start_raylet(NODE, str(tmp_path), metrics_agent_port=0, metrics_export_port=4321)  # pyright: ignore
    assert services.start_raylet is start_raylet
    assert told["metrics_export_port"] == 4321, "a given one stays"
    chosen = [told[agent] for agent in AGENTS if agent != "metrics_export_port"]
    assert len(set(chosen)) == 3
    assert all(port in QUIET_PORTS for port in chosen)
    assert (tmp_path / f"{UNTOLD}_{NODE}").read_text() == str(told[UNTOLD])


def test_free_ports_are_free_differ_and_lie_below_those_of_outgoing_connections() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(outgoing.read_text().split()[0]) if outgoing.exists() else QUIET_PORTS.stop
    assert max(ports) < max(first, QUIET_PORTS.stop)
