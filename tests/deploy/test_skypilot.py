"""The SkyPilot task: its fields are SkyPilot's, and its scripts are shell."""

from __future__ import annotations

import subprocess
from copy import deepcopy
from typing import Any

import pytest
from deployment import document
from jsonschema import ValidationError, validate

TEXT = {"type": "string"}
AMOUNT = {"type": ["string", "number"]}
VARIABLES = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
RESOURCES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "infra": TEXT,
        "cpus": AMOUNT,
        "memory": AMOUNT,
        "accelerators": {"type": ["string", "object"]},
        "instance_type": TEXT,
        "use_spot": {"type": "boolean"},
        "disk_size": AMOUNT,
        "image_id": {"type": ["string", "object"]},
        "job_recovery": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "strategy": {"enum": ["FAILOVER", "EAGER_NEXT_REGION"]},
                "max_restarts_on_errors": {"type": "integer", "minimum": 0},
            },
        },
    },
}
TASK = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": TEXT,
        "num_nodes": {"type": "integer"},
        "resources": RESOURCES,
        "workdir": TEXT,
        "envs": VARIABLES,
        "secrets": VARIABLES,
        "file_mounts": {"type": "object"},
        "setup": TEXT,
        "run": TEXT,
    },
}
"""After `get_task_schema` and `get_resources_schema` of SkyPilot 0.14, in sky/utils/schemas.py, less the fields that
this task could not want."""


def task() -> dict[str, Any]:
    return deepcopy(document("skypilot/train.yaml"))


def test_every_field_is_known_and_has_its_type() -> None:
    validate(task(), TASK)


def test_a_slip_is_caught() -> None:
    given = task()
    given["resources"]["spot"] = True
    with pytest.raises(ValidationError, match="spot"):
        validate(given, TASK)


def test_it_runs_on_spot_machines_with_a_token_that_the_file_does_not_hold() -> None:
    given = task()
    assert given["resources"]["use_spot"] is True
    assert given["envs"]["RAY_AUTH_MODE"] == "token"
    assert given["secrets"] == {"RAY_AUTH_TOKEN": None}


@pytest.mark.parametrize("script", ["setup", "run"])
def test_its_scripts_are_shell(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=task()[script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_leaves_the_ray_of_skypilot_alone() -> None:
    """That one has port 6380, and `ray stop` ends every Ray of a machine."""
    script = task()["run"]
    assert "--port=6379" in script
    assert not [line for line in script.splitlines() if line.strip().startswith("ray stop")]
