"""Rank processes as detached Ray actors, each in its own placement group, so that each fails alone.

Runs on the controller's event loop; decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.actor_names import NAMESPACE, living_ranks, rank_name, ranks_among
from orchestrator.cluster.exits import cause_of_death
from orchestrator.cluster.hosts import RankGone
from orchestrator.cluster.placement import Node, assign, congestion, fits, shortage
from orchestrator.cluster.rank_setup import RankSetup
from workers.actor import CONTROL, Home, RankActor
from workers.control.rank_error import RankError
from workers.process.process_times import ProcessTimes, process_times

CONTROL_THREADS = 4
"""Calls of a rank's control group that may be under way at once."""
FIRST_LOOK_S, LOOK_EVERY_S = 0.01, 0.2
"""Between two checks whether placement groups are placed, at first and later."""
GIVEN_BACK_S = 10.0
"""Time limit for the cluster to give reservations back."""


FIRST_PAUSE_S = 2.0
MOST_PAUSE_S = 120.0


@dataclass
class Backoff:
    """Each failure in a row doubles a node's pause, up to `MOST_PAUSE_S`."""

    _failures: dict[str, int] = field(default_factory=dict)
    _until_s: dict[str, float] = field(default_factory=dict)

    def failed(self, node: str, now_s: float) -> float:
        """Record that a rank did not start on `node`; return how long the node gets no other."""
        self._failures[node] = self._failures.get(node, 0) + 1
        pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures[node] - 1))
        self._until_s[node] = now_s + pause_s
        return pause_s

    def started(self, node: str) -> None:
        """Record that a rank is up on `node`."""
        self._failures.pop(node, None)
        self._until_s.pop(node, None)

    def avoids(self, node: str, now_s: float) -> bool:
        """Whether `node` gets no rank now."""
        return now_s < self._until_s.get(node, now_s)


class RayHosts:
    """The ranks of one job on the Ray cluster that this process is connected to.

    Args:
        controller: the actor that the ranks report to.
    """

    def __init__(self, setup: RankSetup, controller: ActorHandle) -> None:
        self._setup = setup
        self._controller = controller
        self._groups: dict[int, PlacementGroup] = {}
        self._actors: dict[int, Any] = {}
        self._placed: dict[int, str] = {}
        """Rank -> the id of the node on which its placement group is."""
        self._names: dict[str, str] = {}
        """Node id -> host, for messages."""
        self._shunned: set[str] = set()
        """Ids of the nodes that get no ranks."""
        self._backoff = Backoff()
        hosted: Any = ray.remote(concurrency_groups={CONTROL: CONTROL_THREADS})  # pyright: ignore[reportCallIssue]
        self._remote: Any = hosted(RankActor)
        watching: Any = ray.remote(num_cpus=0, max_retries=0, enable_task_events=False)  # pyright: ignore[reportCallIssue]
        self._watcher: Any = watching(process_times)

    async def reserve(self, ranks: Sequence[int], wait_s: float) -> str | None:
        setup = self._setup
        seen = await self._nodes()
        for rank, target in zip(ranks, assign(seen, len(ranks), setup.config.per_rank), strict=True):
            self._groups[rank] = placement_group(
                [dict(setup.config.per_rank)],
                strategy="STRICT_PACK",
                name=rank_name(setup.config.job.name, rank),
                lifetime="detached",
                _soft_target_node_id=target,  # pyright: ignore[reportArgumentType]
            )
        placed = await _placed([self._groups[rank] for rank in ranks], wait_s)
        if placed is not None:
            # Ray knows nothing of a drain that only this job was asked for, and takes the node for a free one.
            if shunned := sorted(self._shunned & {*placed}):
                return f"the only room was on node {shunned[0][:12]}, which the job is to leave"
            self._placed |= dict(zip(ranks, placed, strict=True))
            return None
        # Total resources as of now, free ones as of before: our own groups hold some of them.
        nodes = await self._nodes()
        why = shortage(nodes, len(ranks), setup.config.per_rank) or congestion(
            seen, len(ranks), setup.config.per_rank
        )
        return f"{why}. Waited {wait_s:g} s (cluster.wait_s)"

    def start(self, rank: int) -> None:
        setup = self._setup
        strategy = PlacementGroupSchedulingStrategy(self._groups[rank], placement_group_bundle_index=0)
        self._actors[rank] = self._remote.options(
            name=rank_name(setup.config.job.name, rank),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            # Each heartbeat is a call, whose record would stay in the cluster's memory.
            enable_task_events=False,
            scheduling_strategy=strategy,
            **actor_resources(setup.config.per_rank),
        ).remote(setup.config, rank, self._controller, setup.marker, setup.secret)

    async def reclaim(self, rank: int) -> Home:
        name = rank_name(self._setup.config.job.name, rank)
        with suppress(ValueError):
            self._groups[rank] = await asyncio.to_thread(get_placement_group, name)
        try:
            self._actors[rank] = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
        except ValueError as error:
            raise RankGone("cause unknown") from error
        return await self.call(rank, "attach", self._controller)

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        actor = self._actors.get(rank)
        reference = None if actor is None else getattr(actor, method).remote(*arguments)
        answer = asyncio.get_running_loop().create_task(_answered(reference))
        answer.add_done_callback(_retrieved)
        return answer

    async def look(self, home: Home) -> ProcessTimes | None:
        if home.node == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(process_times, home.pid)
        # The rank that is looked at is among them. A new process takes long on a busy node, and has no rank's troubles.
        beside = [self._actors[rank] for rank in self.placed_on(home.node) if rank in self._actors]
        there = NodeAffinitySchedulingStrategy(home.node, soft=False)
        looks = [
            *(rank.look.remote(home.pid) for rank in beside),
            self._watcher.options(scheduling_strategy=there).remote(home.pid),
        ]
        answers = [asyncio.ensure_future(_answered(look)) for look in looks]
        for answer in answers:
            answer.add_done_callback(_retrieved)
        try:
            for answer in asyncio.as_completed(answers):
                with suppress(RankGone, RankError):
                    return await answer
            return None
        finally:
            for answer in answers:
                answer.cancel()

    async def end(self, rank: int) -> None:
        actor, group = self._actors.pop(rank, None), self._groups.pop(rank, None)
        self._placed.pop(rank, None)
        if actor is not None:
            ray.kill(actor)
        if group is not None:
            # The caller may be cancelled as the job ends: the group must be released all the same.
            await asyncio.shield(asyncio.to_thread(remove_placement_group, group))

    async def room(self, without: Collection[str] = ()) -> int:
        nodes = [node for node in await self._nodes() if node.id not in without]
        return sum(fits(node.available, self._setup.config.per_rank) for node in nodes)

    def placed_on(self, node: str) -> frozenset[int]:
        return frozenset(rank for rank, where in self._placed.items() if where == node)

    def started(self, rank: int) -> None:
        if rank in self._placed:
            self._backoff.started(self._placed[rank])

    def failed(self, rank: int) -> str:
        node = self._placed.get(rank)
        if node is None:
            return ""
        pause_s = self._backoff.failed(node, time.monotonic())
        name = self._names.get(node, node)
        return f"rank {rank} did not start on node {name}, which gets no other rank for {pause_s:g} s"

    def shun(self, node: str) -> None:
        self._shunned.add(node)

    def readmit(self, node: str) -> None:
        self._shunned.discard(node)

    async def _nodes(self) -> tuple[Node, ...]:
        """Return the nodes on which ranks may start."""
        now_s, nodes = time.monotonic(), await asyncio.to_thread(cluster.nodes)
        self._names |= {node.id: node.host for node in nodes}
        return tuple(
            node
            for node in nodes
            if node.id not in self._shunned and not self._backoff.avoids(node.id, now_s)
        )

    async def release(self) -> None:
        groups = list(self._groups.values())
        for rank in {*self._actors, *self._groups}:
            await self.end(rank)
        deadline = time.monotonic() + GIVEN_BACK_S
        while await asyncio.to_thread(_any_stands, groups) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


def reap(job: str, ranks: Collection[int] | None = None) -> None:
    """Kill what an earlier controller of `job` left: ranks and placement groups.

    Args:
        ranks: only these; None: all.
    """
    for rank in living_ranks(job):
        if ranks is None or rank in ranks:
            with suppress(ValueError):  # it has just ended
                ray.kill(ray.get_actor(rank_name(job, rank), namespace=NAMESPACE))
    groups = [entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"]
    for rank in ranks_among(job, groups):
        if ranks is None or rank in ranks:
            with suppress(ValueError):  # it has just been removed: the driver cleans up, too
                remove_placement_group(get_placement_group(rank_name(job, rank)))


def actor_resources(per_rank: Mapping[str, float]) -> dict[str, Any]:
    """Return `per_rank` as the options of an actor."""
    custom = {name: amount for name, amount in per_rank.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, Any] = {"num_cpus": per_rank.get("CPU", 0), "num_gpus": per_rank.get("GPU", 0)}
    if "memory" in per_rank:
        options["memory"] = per_rank["memory"]
    return options | ({"resources": custom} if custom else {})


async def _answered(reference: Any) -> Any:
    """Return the call's result, with Ray's errors as `RankGone` or `RankError`."""
    if reference is None:
        raise RankGone("cause unknown")
    try:
        return await reference
    except ActorUnavailableError as error:
        raise RankGone("it cannot be reached", unreachable=True) from error
    except RayActorError as error:
        text = str(error).strip()
        if "creation task" in text:
            raise RankGone(f"could not start: {text.splitlines()[-1]}", stillborn=True) from error
        raise RankGone(cause_of_death(text)) from error
    except RayError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, RankError):
            raise cause from None
        text = str(error).strip()
        raise RankError(text.split("\n")[0], details=text) from error


def _retrieved(answer: asyncio.Task[Any]) -> None:
    """Retrieve the error, so that asyncio does not warn about one that no caller awaits."""
    if not answer.cancelled():
        answer.exception()


async def _placed(groups: list[PlacementGroup], wait_s: float) -> list[str] | None:
    """Return per group the id of its node, once all are placed; None if they are not within `wait_s`.

    It polls, because a wait inside Ray would block a thread of the pool on which planning depends.
    """
    deadline_s, pause_s = time.monotonic() + wait_s, FIRST_LOOK_S
    while (nodes := await asyncio.to_thread(_nodes_of, groups)) is None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LOOK_EVERY_S)
    return nodes


def _nodes_of(groups: list[PlacementGroup]) -> list[str] | None:
    """Return per group the id of its node; None if not all are placed."""
    nodes = []
    for group in groups:
        table = placement_group_table(group)
        if table.get("state") != "CREATED":
            return None
        nodes.append(table["bundles_to_node_id"][0])
    return nodes


def _any_stands(groups: list[PlacementGroup]) -> bool:
    return any(placement_group_table(group).get("state") not in (None, "REMOVED") for group in groups)
