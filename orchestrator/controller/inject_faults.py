"""Drills on a running job: injects a fault into one of its ranks, or drains one of its nodes.

Runs in the controller's process. Finds ranks by their actors' names and knows nothing else about them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.actor_names import NAMESPACE, living_ranks, rank_name
from orchestrator.cluster.placement import Node
from workers.fault_injection.drill import Drill
from workers.fault_injection.fault import AT_ANY_TIME, Fault
from workers.fault_injection.kinds import FaultKind
from workers.protocol.errors import JobError

ANSWER_S = 10.0
"""Time limit for a rank to confirm that it is armed."""


async def inject(job: str, allowed: bool, step: int, drill: dict[str, Any]) -> str:
    """Run `drill` on `job`.

    Args:
        allowed: `elastic.allow_faults`.
        step: steps known to be committed.

    Returns:
        What will happen, in words.

    Raises:
        JobError: faults are not allowed, there is no such rank or node, or its step is past.
    """
    asked = Drill.from_json(drill)
    if not allowed:
        raise JobError(f"job {job!r} allows no faults: start it with elastic.allow_faults = true")
    if asked.fault is None:
        assert asked.node is not None
        return await asyncio.to_thread(_drain_node, asked.node, asked.deadline_s)
    check_step(asked.fault, step)
    rank = choose_rank(asked, await asyncio.to_thread(_ranks, job))
    await _arm(job, rank, asked.fault)
    return f"{asked.fault} on rank {rank}, {when(asked.fault)}"


def check_step(fault: Fault, step: int) -> None:
    """Raises:
    JobError: the step at which `fault` was to fire is committed.
    """
    if fault.step is not None and fault.step <= step:
        raise JobError(f"step {fault.step} is past: the job has committed {step}; give a later one")


def choose_rank(drill: Drill, living: tuple[int, ...]) -> int:
    """Return the rank that `drill` hits.

    Raises:
        JobError: the rank is not among the `living`, or the drill names none.
    """
    numbers = ", ".join(map(str, living)) or "none"
    if drill.rank is None:
        assert drill.fault is not None
        # The effect is the same on every rank.
        if drill.fault.kind is FaultKind.CORRUPT_CHECKPOINT and living:
            return living[0]
        raise JobError(f"{drill.fault.kind} of which rank? The job has {numbers}")
    if drill.rank not in living:
        raise JobError(f"the job has no rank {drill.rank}; it has {numbers}")
    return drill.rank


def when(fault: Fault) -> str:
    """Return in words when and where `fault` fires."""
    after = f" after {fault.after_s:g} s" if fault.after_s else ""
    if fault.kind in AT_ANY_TIME and fault.step is None and fault.phase is None:
        return after.strip() or "now"
    step = "the next step" if fault.step is None else f"step {fault.step}"
    phase = "the first phase" if fault.where is None else f"phase {fault.where}"
    return f"in {phase} of {step}{after}"


def choose_node(name: str, living: tuple[Node, ...]) -> Node:
    """Return the node that `name` means: an id, the beginning of one, or a host.

    Raises:
        JobError: there is none, or more than one, or it is the only node.
    """
    found = [node for node in living if name and (node.id.startswith(name) or node.host == name)]
    known = ", ".join(f"{node.id[:12]} ({node.host})" for node in living)
    if not found:
        raise JobError(f"the cluster has no node {name!r}; it has {known}")
    if len(found) > 1:
        raise JobError(f"{name!r} means more than one node: give more of its id. The cluster has {known}")
    if len(living) == 1:
        raise JobError(f"{found[0].id[:12]} is the only node: drained, nothing would be left to train on")
    return found[0]


def _ranks(job: str) -> tuple[int, ...]:
    """Return the numbers of the ranks whose actors are alive."""
    return tuple(sorted(living_ranks(job)))


async def _arm(job: str, rank: int, fault: Fault) -> None:
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    from workers.control.rank_error import RankError

    try:
        actor: Any = ray.get_actor(rank_name(job, rank), namespace=NAMESPACE)
        await asyncio.wait_for(_awaited(actor.arm.remote(fault)), ANSWER_S)
    except TimeoutError:
        raise JobError(f"rank {rank} did not answer within {ANSWER_S:g} s: is it stopped?") from None
    except (ValueError, RayActorError) as error:
        raise JobError(f"rank {rank} is gone") from error
    except (RankError, RayTaskError) as error:
        raise JobError(f"rank {rank}: {getattr(error, 'cause', error)}") from error


async def _awaited(answer: Any) -> Any:
    return await answer


def _drain_node(name: str, deadline_s: float) -> str:
    """Have Ray drain the node, as an autoscaler does before a preemption."""
    import ray
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.core.generated import autoscaler_pb2

    node = choose_node(name, cluster.nodes())
    reasons: Any = autoscaler_pb2.DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]
    client: Any = GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(
        node.id,
        reasons.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "a drill of freshet fault",
        round((time.time() + deadline_s) * 1e3),
    )
    if not accepted:
        raise JobError(f"Ray does not drain node {node.id[:12]}: {why}")
    return f"drain of node {node.id[:12]} ({node.host}), gone in {deadline_s:g} s"
