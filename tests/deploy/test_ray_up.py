"""The cluster files of `ray up`: Ray's own schema and preparation take them, and their workers are spot machines."""

from __future__ import annotations

from typing import Any

import pytest
from deployment import ROOT, document
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

CLOUDS = ("aws", "gcp")


def cluster(cloud: str) -> dict[str, Any]:
    return document(f"ray-up/{cloud}.yaml")


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_takes_the_cluster_file(cloud: str) -> None:
    prepared = prepare_config(cluster(cloud))
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert prepared["provider"]["type"] == cloud
    assert types["head"]["max_workers"] == 0
    assert types["spot"]["min_workers"] == 2


def test_ray_refuses_a_slip() -> None:
    given = cluster("aws")
    given["available_node_types"]["spot"]["min_worker"] = 2
    with pytest.raises(ValidationError, match="min_worker"):
        validate_config(prepare_config(given))


def test_workers_are_spot_machines_and_heads_are_not() -> None:
    aws, gcp = (cluster(cloud)["available_node_types"] for cloud in CLOUDS)
    assert aws["spot"]["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert gcp["spot"]["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    assert "InstanceMarketOptions" not in aws["head"]["node_config"]
    assert "scheduling" not in gcp["head"]["node_config"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_node_gets_what_it_installs_and_the_token(cloud: str) -> None:
    given = cluster(cloud)
    mounts = given["file_mounts"]
    assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert {remote: f"~/freshet/{local}" for remote, local in mounts.items()} == {key: key for key in mounts}
    assert all((ROOT / local).exists() for local in mounts.values() if local != "requirements/run.txt")
    packages = {"orchestrator", "workers", "planner", "dashboard"}
    assert packages | {"pyproject.toml", "README.md", "requirements/run.txt"} == set(mounts.values())
    assert any("RAY_AUTH_MODE=token" in command for command in given["setup_commands"])


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_dashboard_of_ray_listens_on_loopback(cloud: str) -> None:
    assert any("--dashboard-host=127.0.0.1" in line for line in cluster(cloud)["head_start_ray_commands"])
