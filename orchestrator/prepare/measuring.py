"""A measurement on a Ray cluster: rank actors that reserve the same resources as the job's ranks and leave no trace.

Actors and placement groups belong to this driver: if it dies, Ray clears them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.exits import cause_of_death
from orchestrator.cluster.placement import assign, congestion, shortage
from orchestrator.cluster.ray_hosts import actor_resources
from planner.wording import named
from workers.actor import CONTROL, RankActor
from workers.config import WorkerConfig
from workers.control.rank_error import RankError
from workers.profiling.measured import Measured
from workers.protocol import Generation, JobError

GRACE_S = 5.0
"""How long the other ranks may take to report their errors once one rank has failed."""
STACKS_S = 1.0
"""How long a rank that took too long may take to return its threads' stacks."""


def measure_on_cluster(
    config: WorkerConfig, ranks: int, per_rank: Mapping[str, float], wait_s: float, timeout_s: float
) -> list[Measured]:
    """Measure with `ranks` ranks on the cluster that this process is connected to.

    Args:
        per_rank: resources that each rank reserves.
        wait_s: limit for the resources, and then for the processes.
        timeout_s: limit for joining, and then for measuring.

    Raises:
        JobError: there is no room, or the ranks cannot measure.
    """
    nodes = cluster.nodes()
    groups = [
        placement_group([dict(per_rank)], strategy="STRICT_PACK", _soft_target_node_id=target)  # pyright: ignore[reportArgumentType]
        for target in assign(nodes, ranks, per_rank)
    ]
    actors: list[Any] = []
    try:
        deadline = time.monotonic() + wait_s
        if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups):
            why = shortage(cluster.nodes(), ranks, per_rank) or congestion(nodes, ranks, per_rank)
            raise JobError(f"no room to profile: {why}. Waited {wait_s:g} s (cluster.wait_s)")
        hosted: Any = ray.remote(concurrency_groups={CONTROL: 2})  # pyright: ignore[reportCallIssue]
        remote: Any = hosted(RankActor)
        for rank, group in enumerate(groups):
            placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            options = {"scheduling_strategy": placed, **actor_resources(per_rank)}
            actors.append(remote.options(**options).remote(config, rank, None, None))
        return _measure(actors, wait_s, timeout_s)
    finally:
        for actor in actors:
            ray.kill(actor)
        for group in groups:
            remove_placement_group(group)


def _measure(actors: list[Any], wait_s: float, timeout_s: float) -> list[Measured]:
    call_all(actors, "setup", wait_s)
    ((host, port),) = call_all(actors[:1], "host_store", timeout_s)
    generation = Generation(
        number=1,
        epoch=1,
        members=tuple(range(len(actors))),
        store_host=host,
        store_port=port,
        timeout_s=timeout_s,
    )
    call_all(actors, "join", timeout_s, generation)
    return call_all(actors, "profile", timeout_s)


def call_all(actors: list[Any], method: str, timeout_s: float, *arguments: object) -> list[Any]:
    """Call `method` of each actor and return the results.

    Raises:
        JobError: a call failed, or took too long; names the first cause if others failed because of it.
    """
    deadline = time.monotonic() + timeout_s
    calls = [getattr(actor, method).remote(*arguments) for actor in actors]
    answers: list[Any] = []
    errors: list[RayError] = []
    late: list[int] = []
    for rank, call in enumerate(calls):
        try:
            answers.append(ray.get(call, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError as error:
            late.append(rank)
            errors.append(error)
        except RayError as error:
            errors.append(error)
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if errors:
        causes = [getattr(error, "cause", error) for error in errors]
        first = min(causes, key=lambda cause: not isinstance(cause, RankError) or cause.cut_off)
        raise JobError(
            f"the job could not be profiled: {_reason(first, actors, late, timeout_s)}"
        ) from errors[0]
    return answers


def _reason(first: BaseException, actors: list[Any], late: list[int], timeout_s: float) -> str:
    """Say in words what `first` is."""
    match first:
        case GetTimeoutError():
            limit = f"did not answer within {timeout_s:g} s (cluster.wait_s, cluster.timeout_s)"
            return f"{named('rank', late)} {limit}{_stacks(actors[late[0]])}"
        case RayActorError():
            return f"a rank's process died: {cause_of_death(str(first))}"
        case _:
            return str(first).strip().split("\n")[0]


def _stacks(actor: Any) -> str:
    """What the threads of a rank that took too long are doing, on lines of their own; nothing if it does not answer."""
    with suppress(RayError):
        told: Any = ray.get(actor.stacks.remote(), timeout=STACKS_S)
        return f"\n{told.rstrip()}"
    return ""
