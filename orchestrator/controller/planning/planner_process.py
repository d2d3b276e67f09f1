"""The processes of a job's planners: on the controller's node, so that both start and end together."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

LIVES = 6
"""Most planners of a kind that a controller starts before it gives up."""


def start_planner(planner: type, *arguments: Any) -> Any:
    """Start an actor of `planner`; return its handle."""
    remote: Any = ray.remote(planner)
    return remote.options(
        num_cpus=0,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        ),
    ).remote(*arguments)


def reason_of(error: Exception) -> str:
    """Ray's reason for a death in one line."""
    text = str(error).strip()
    if isinstance(error, RayActorError) and "creation task" not in text:
        return "killed, out of memory, or its node is gone"
    return text.splitlines()[-1] if text else type(error).__name__
