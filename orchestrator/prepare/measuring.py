"""A measurement on a Ray cluster: rank actors that reserve the same resources as the job's ranks and leave no trace.

Actors and placement groups belong to this driver: if it dies, Ray clears them.
"""

from __future__ import annotations

import re
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
from workers.launch.waiting import waits_for_a_rank
from workers.profiling.measured import Measured
from workers.protocol.errors import JobError
from workers.protocol.orders import Generation

GRACE_S = 5.0
"""Time limit for the other ranks to report their errors once one rank has failed."""
STACKS_S = 1.0
"""Time limit for the ranks that took too long to return their threads' stacks."""
MOST_SHOWN = 3
"""Ranks whose stacks a message shows."""
_THREAD = re.compile(r"^thread .*:\n", re.MULTILINE)
_STARTED_BY_PYTHON = re.compile(r'  File ".*/threading\.py", line \d+, in _bootstrap\n')


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
        # Longer than any call: the stack of a rank that waits for a hung one shows that it waits.
        timeout_s=2 * timeout_s,
    )
    call_all(actors, "join", timeout_s, generation)
    return call_all(actors, "profile", timeout_s)


def call_all(actors: list[Any], method: str, timeout_s: float, *arguments: object) -> list[Any]:
    """Call `method` of each actor and return the results.

    Raises:
        JobError: a call failed, or took too long; names the rank that caused it if others failed because of it.
    """
    deadline = time.monotonic() + timeout_s
    calls = [getattr(actor, method).remote(*arguments) for actor in actors]
    answers: list[Any] = []
    errors: dict[int, RayError] = {}
    for rank, call in enumerate(calls):
        try:
            answers.append(ray.get(call, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError as error:
            errors[rank] = error
        except RayError as error:
            errors[rank] = error
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if errors:
        causes = {rank: getattr(error, "cause", error) for rank, error in errors.items()}
        first = first_cause(causes)
        match causes[first]:
            case GetTimeoutError():
                late = [rank for rank, cause in causes.items() if isinstance(cause, GetTimeoutError)]
                reason = _lateness(actors, late, timeout_s)
            case RayActorError() as cause:
                reason = f"the process of rank {first} died: {cause_of_death(str(cause))}"
            case cause:
                message, *_ = str(cause).strip().split("\n")
                reason = f"rank {first}: {message}"
        raise JobError(f"the job could not be profiled: {reason}") from errors[first]
    return answers


def _lateness(actors: list[Any], late: list[int], timeout_s: float) -> str:
    """Say which of the `late` ranks hang, and what their threads are doing."""
    stacks = _stacks({rank: actors[rank] for rank in late})
    hung = hanging(stacks)
    waiting = [rank for rank in late if rank not in hung]
    return "".join(
        (
            f"{named('rank', hung)} did not answer within {timeout_s:g} s (cluster.wait_s, cluster.timeout_s)",
            f"; {named('rank', waiting)} waited for other ranks" if waiting else "",
            *(f"\nrank {rank}:\n{stacks[rank].rstrip()}" for rank in hung[:MOST_SHOWN] if stacks[rank]),
        )
    )


def _stacks(actors: Mapping[int, Any]) -> dict[int, str]:
    """Stacks of each rank's threads; empty for a rank that does not answer."""
    calls = {rank: actor.stacks.remote() for rank, actor in actors.items()}
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=STACKS_S)
    stacks = dict.fromkeys(actors, "")
    for rank, call in calls.items():
        with suppress(RayError):
            stacks[rank] = ray.get(call, timeout=0)
    return stacks


def first_cause(failures: Mapping[int, BaseException]) -> int:
    """The rank whose failure explains the others, of `failures` by rank.

    A rank's own error explains the most, then a death, then a call without an answer. A rank that lost another one
    explains nothing.
    """
    return min(failures, key=lambda rank: (_distance(failures[rank]), rank))


def _distance(error: BaseException) -> int:
    match error:
        case RankError(cut_off=True):
            return 3
        case GetTimeoutError():
            return 2
        case RayActorError():
            return 1
        case _:
            return 0


def hanging(stacks: Mapping[int, str]) -> list[int]:
    """The late ranks that hang: all of them, less those that wait for other ranks, unless all do.

    Args:
        stacks: by late rank, what `workers.process.stacks` returned there; empty if the rank did not answer.
    """
    return sorted(rank for rank, text in stacks.items() if not _waits(text)) or sorted(stacks)


def _waits(stacks: str) -> bool:
    # Ray runs an actor's calls on threads of its own. Those that Python started belong to the transport,
    # and wait for messages in any case.
    threads = _THREAD.split(stacks)[1:]
    return any(waits_for_a_rank(calls) for calls in threads if not _STARTED_BY_PYTHON.match(calls))
