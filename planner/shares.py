"""Uneven shares of a step among pipelines: which microbatches each executes, and in which parts gradients are summed.

Pure. A replica's gradient is the sum over its microbatches, one added after the other. For the same bits whoever
executes them, one pipeline adds up the first microbatches of a replica, and each later one that another pipeline
executes keeps a gradient of its own, which the exchange adds after them, in order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from planner.plan import Plan, PlanError
from planner.rounds import windows_of


class ReplicaPart(NamedTuple):
    """Microbatches of one replica that one pipeline adds up."""

    replica: int
    first: int
    """Microbatch of the replica."""
    stop: int
    pipeline: int

    def numbers(self, microbatches: int) -> range:
        """Its global microbatches, in replicas of `microbatches`."""
        begin = self.replica * microbatches
        return range(begin + self.first, begin + self.stop)


def check_shares(plan: Plan) -> None:
    """Check that the plan's shares, if it has any, cover a step.

    Raises:
        PlanError: not one per pipeline, one below 1, or another sum than the step's microbatches.
    """
    total = plan.replicas * plan.microbatches
    if not plan.shares:
        return
    if len(plan.shares) != plan.pipeline_count:
        raise PlanError(
            f"shares {list(plan.shares)} are for {len(plan.shares)} pipelines, the plan has {plan.pipeline_count}"
        )
    if min(plan.shares) < 1 or sum(plan.shares) != total:
        raise PlanError(
            f"shares {list(plan.shares)} must be at least 1 each and add up to {total} microbatches, replicas x"
            f" microbatches; they add up to {sum(plan.shares)}"
        )


def for_replicas(plan: Plan, replicas: int) -> Plan:
    """`plan` as it executes another number of replicas, in a leg of the batch's course that it was not made for: as
    many pipelines run, each with more of them or fewer, if need be with none.

    Raises:
        PlanError: it has uneven shares, which are of its own replicas.
    """
    if plan.replicas == replicas:
        return plan
    if plan.shares:
        raise PlanError(
            f"shares {list(plan.shares)} are of {plan.replicas} replicas, and a step has {replicas}: a job whose batch"
            " grows has none"
        )
    return replace(plan, replicas=replicas, pipelines=plan.pipeline_count)


def parts(plan: Plan) -> tuple[ReplicaPart, ...]:
    """The parts of all replicas: by replica, and within it in the order in which they are summed.

    A pipeline keeps as much as its share allows of the replicas r with r % pipelines == p; what is left of a replica
    goes to pipelines with room. Whoever executes most of a replica takes its first microbatches, as one part; all
    others are parts of one microbatch.
    """
    pipelines, microbatches = plan.pipeline_count, plan.microbatches
    if not plan.shares:
        return tuple(ReplicaPart(r, 0, microbatches, r % pipelines) for r in range(plan.replicas))
    room = list(plan.shares)
    taken: list[dict[int, int]] = []
    for replica in range(plan.replicas):
        home = replica % pipelines
        kept = min(room[home], microbatches)
        room[home] -= kept
        taken.append({home: kept} if kept else {})
    for of_replica in taken:
        left = microbatches - sum(of_replica.values())
        for pipeline in range(pipelines):
            more = min(room[pipeline], left)
            if more:
                of_replica[pipeline] = of_replica.get(pipeline, 0) + more
                room[pipeline] -= more
                left -= more
    return tuple(part for replica, of_replica in enumerate(taken) for part in _in_order(replica, of_replica))


def parts_by_window(plan: Plan) -> tuple[tuple[ReplicaPart, ...], ...]:
    """The parts of all replicas by the window in which they are executed: a replica of each pipeline in each, or with
    uneven shares all in one."""
    every = parts(plan)
    size = len(every) if plan.shares else plan.pipeline_count
    return tuple(every[first : first + size] for first in range(0, len(every), size))


def _in_order(replica: int, taken: dict[int, int]) -> list[ReplicaPart]:
    most, *others = sorted(taken, key=lambda pipeline: (-taken[pipeline], pipeline))
    found = [ReplicaPart(replica, 0, taken[most], most)]
    for pipeline in sorted(others):
        for _ in range(taken[pipeline]):
            first = found[-1].stop
            found.append(ReplicaPart(replica, first, first + 1, pipeline))
    return found


def parts_of(plan: Plan, pipeline: int) -> tuple[ReplicaPart, ...]:
    """The parts that `pipeline` adds up, in the order in which it executes them: whole runs before single ones."""
    own = [part for part in parts(plan) if part.pipeline == pipeline]
    return tuple(sorted(own, key=lambda part: (part.first > 0, part)))


def gradients_held(plan: Plan, pipeline: int) -> int:
    """Gradients of each layer that `pipeline` holds at once: with uneven shares one for each part, else its sum and
    that of the window at hand."""
    return parts_kept(plan, pipeline) if plan.shares else min(2, parts_kept(plan, pipeline))


def numbers_of(plan: Plan, pipeline: int) -> tuple[int, ...]:
    """The global microbatches that `pipeline` executes with uneven shares, in this order."""
    if plan.shard == "gradients":
        (numbers,) = windows_of(plan, pipeline)
        return numbers
    return tuple(g for part in parts_of(plan, pipeline) for g in part.numbers(plan.microbatches))


def parts_kept(plan: Plan, pipeline: int) -> int:
    """Number of parts that `pipeline` adds up apart, and sends to siblings in a step. Where gradients are summed
    microbatch by microbatch there is none, or with uneven shares each microbatch's."""
    if plan.shard == "gradients":
        return plan.shares[pipeline] if plan.shares else 1
    return len(parts_of(plan, pipeline))


def most_held(plan: Plan) -> int:
    """The most gradients of each layer that one pipeline holds at once."""
    return max(gradients_held(plan, pipeline) for pipeline in range(plan.pipeline_count))


def most_parts(plan: Plan) -> int:
    """The most parts that one pipeline adds up apart."""
    return max(parts_kept(plan, pipeline) for pipeline in range(plan.pipeline_count))
