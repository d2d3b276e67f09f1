"""The compose file: Docker Compose itself reads it, and it opens nothing to the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deployment import DEPLOY

COMPOSE = Path(sys.executable).with_name("docker-compose")


def compose(token: str | None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_TOKEN"}
    return subprocess.run(
        [COMPOSE, "--file", DEPLOY / "compose.yaml", "config", "--format", "json"],
        env=environment | ({"RAY_AUTH_TOKEN": token} if token else {}),
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    done = compose("a-token")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)["services"]


def test_there_are_a_head_two_workers_and_the_service(services: dict[str, Any]) -> None:
    assert services.keys() == {"head", "worker-1", "worker-2", "service"}
    for name, service in services.items():
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert name == "head" or service["depends_on"]["head"]["condition"] == "service_healthy"


def test_no_container_can_gain_privileges_and_no_port_leaves_the_machine(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ()))


def test_workers_leave_in_order_and_have_the_time(services: dict[str, Any]) -> None:
    for name in ("worker-1", "worker-2"):
        (hook,) = services[name]["pre_stop"]
        program, leave_s = hook["command"]
        assert program == "freshet-leave"
        assert int(leave_s) < int(services[name]["stop_grace_period"].removesuffix("s"))


def test_the_service_answers_on_this_machine_and_to_its_name(services: dict[str, Any]) -> None:
    """The first name is the one that it announces."""
    assert re.findall(r"--host-name (\S+)", services["service"]["command"][-1]) == ["localhost", "service"]


def test_without_a_token_nothing_starts() -> None:
    done = compose(None)
    assert done.returncode != 0
    assert "RAY_AUTH_TOKEN" in done.stderr
    assert "openssl rand -hex 32" in done.stderr
