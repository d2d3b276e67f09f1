"""What the lifecycle's commands do to a Ray cluster: placement groups, rank actors, calls to them, their end.

Every answer comes back as a stimulus through `tell`. Decides nothing; runs on the controller's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator import cluster
from orchestrator.placement import assign, congestion, shortage
from orchestrator.states import (
    Ended,
    Joined,
    Loaded,
    Placed,
    RankLost,
    Ready,
    Stimulus,
    StoreUp,
    Unplaceable,
)
from planner.ir import Schedule
from planner.plan import Plan
from workers.actor import CONTROL, Home, RankActor, RankError
from workers.config import WorkerConfig
from workers.protocol import CheckpointRef, Generation, Outcome, Request

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Crew:
    """What the runtime must know to make the ranks of a job."""

    config: WorkerConfig
    plan: Plan
    schedule: Schedule
    per_rank: Mapping[str, float]
    """Resources that each rank reserves."""
    wait_s: float
    """How long resources, and then processes, may take to come."""
    timeout_s: float
    """How long loading and joining may take."""
    marker: tuple[str, bytes]
    """File in the job's folder by which a node knows it, and its content."""


class Runtime:
    """The ranks of one job.

    Args:
        controller: the actor that the ranks report to.
        tell: takes each answer.
    """

    def __init__(self, crew: Crew, controller: ActorHandle, tell: Callable[[Stimulus], None]) -> None:
        self._crew = crew
        self._controller = controller
        self._tell = tell
        self._groups: list[PlacementGroup] = []
        self._ranks: list[Any] = []
        self._homes: dict[int, Home] = {}

    async def place(self) -> None:
        """Reserve resources, a single-bundle group per rank: none takes others along when it goes."""
        crew, world = self._crew, self._crew.plan.world_size
        reap(crew.config.job)
        seen = cluster.nodes()
        self._groups = [
            placement_group(
                [dict(crew.per_rank)],
                strategy="STRICT_PACK",
                name=_name(crew.config.job, rank),
                lifetime="detached",
                _soft_target_node_id=target,  # pyright: ignore[reportArgumentType]
            )
            for rank, target in enumerate(assign(seen, world, crew.per_rank))
        ]
        if await asyncio.to_thread(_all_ready, self._groups, crew.wait_s):
            self._tell(Placed())
            return
        # What the cluster has now, what was free when the job came: our own groups hold some of it.
        why = shortage(cluster.nodes(), world, crew.per_rank) or congestion(seen, world, crew.per_rank)
        self._tell(
            Unplaceable(
                f"{why}. Waited {crew.wait_s:g} s (cluster.wait_s); lower pipeline.ranks or"
                " cluster.resources_per_rank, add nodes, or wait longer"
            )
        )

    async def prepare(self) -> None:
        """Start the rank processes and have them open model and data."""
        crew = self._crew
        hosted: Any = ray.remote(concurrency_groups={CONTROL: 2})  # pyright: ignore[reportCallIssue]
        remote: Any = hosted(RankActor)
        self._ranks = [
            remote.options(
                name=_name(crew.config.job, rank),
                namespace=cluster.NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                **_actor_resources(crew.per_rank),
            ).remote(crew.config, rank, self._controller, crew.marker)
            for rank, group in enumerate(self._groups)
        ]
        await self._each(lambda actor: actor.setup.remote(), self._ready, "start", crew.wait_s)

    async def load(self, start: CheckpointRef | None) -> None:
        """Have each rank build its layers and load them."""
        plan, schedule = self._crew.plan, self._crew.schedule
        await self._each(
            lambda actor: actor.follow.remote(plan, schedule, start),
            Loaded,
            "load its layers",
            self._crew.timeout_s,
        )

    async def host_store(self) -> None:
        """Have rank 0 host the store of the next generation."""

        def up(rank: int, address: tuple[str, int]) -> Stimulus:
            return StoreUp(*address)

        await self._hear(0, self._ranks[0].host_store.remote(), up, "open its store", self._crew.timeout_s)

    async def join(self, generation: Generation) -> None:
        """Have each rank join the process group."""

        def joined(rank: int, nothing: None) -> Stimulus:
            return Joined(rank)

        await self._each(
            lambda actor: actor.join.remote(generation),
            joined,
            "join the process group",
            self._crew.timeout_s,
        )

    async def train(self) -> None:
        """Have each rank train, for as long as it takes."""

        def ended(rank: int, outcome: Outcome) -> Stimulus:
            return Ended(outcome)

        await self._each(lambda actor: actor.train.remote(), ended, "train", None)

    def ask(self, request: Request) -> None:
        """Drop `request` into rank 0's mailbox; the commit carries it to the others."""
        self._ranks[0].request.remote(request)

    def leave(self, ranks: Iterable[int]) -> None:
        """Have `ranks` drop the process group."""
        for rank in ranks:
            self._ranks[rank].leave.remote()

    async def release(self) -> None:
        """Kill the ranks and give their resources back; safe at any point, and again."""
        for rank in self._ranks:
            ray.kill(rank)
        for group in self._groups:
            remove_placement_group(group)
        deadline = asyncio.get_running_loop().time() + self._crew.wait_s
        while any(_stands(group) for group in self._groups):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.05)
        self._ranks, self._groups = [], []

    def _ready(self, rank: int, home: Home) -> Stimulus:
        self._homes[rank] = home
        return Ready(rank, home.node, home.host, home.pid)

    async def _each(
        self,
        call: Callable[[Any], Awaitable[Answer]],
        told: Callable[[int, Answer], Stimulus],
        what: str,
        timeout_s: float | None,
    ) -> None:
        await asyncio.gather(
            *(self._hear(rank, call(actor), told, what, timeout_s) for rank, actor in enumerate(self._ranks))
        )

    async def _hear(
        self,
        rank: int,
        answer: Awaitable[Answer],
        told: Callable[[int, Answer], Stimulus],
        what: str,
        timeout_s: float | None,
    ) -> None:
        """Tell what becomes of one call to one rank."""
        try:
            value = await asyncio.wait_for(_awaited(answer), timeout_s)
        except TimeoutError:
            late = f"did not {what} within {timeout_s:g} s"
            self._tell(RankLost(rank, late))
        except (RayError, RankError) as error:
            self._tell(self._loss(rank, error))
        else:
            self._tell(told(rank, value))

    def _loss(self, rank: int, error: Exception) -> RankLost:
        cause = getattr(error, "cause", error)
        if isinstance(cause, RankError):
            return RankLost(rank, cause.message, cause.cut_off, cause.user_error, cause.details)
        text = str(error).strip()
        if not isinstance(error, RayActorError):
            return RankLost(rank, text.split("\n")[0], details=text)
        home = self._homes.get(rank)
        where = f" (pid {home.pid} on {home.host})" if home is not None else ""
        if "creation task" in text:
            return RankLost(rank, f"could not start: {text.splitlines()[-1]}", details=text)
        return RankLost(
            rank,
            f"its process{where} died: killed, out of memory, or its node is gone",
            details=text,
        )


def reap(job: str) -> None:
    """Kill what an earlier controller of `job` left: ranks and placement groups."""
    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    for entry in actors:
        if entry["namespace"] == cluster.NAMESPACE and entry["name"].startswith(_name(job, "")):
            ray.kill(ray.get_actor(entry["name"], namespace=cluster.NAMESPACE))
    for entry in placement_group_table().values():
        if entry["name"].startswith(_name(job, "")) and entry["state"] != "REMOVED":
            remove_placement_group(get_placement_group(entry["name"]))


def _name(job: str, rank: int | str) -> str:
    return f"{job}/rank-{rank}"


def _actor_resources(per_rank: Mapping[str, float]) -> dict[str, Any]:
    """`per_rank` as the options of an actor."""
    custom = {name: amount for name, amount in per_rank.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, Any] = {"num_cpus": per_rank.get("CPU", 0), "num_gpus": per_rank.get("GPU", 0)}
    if "memory" in per_rank:
        options["memory"] = per_rank["memory"]
    return options | ({"resources": custom} if custom else {})


def _all_ready(groups: list[PlacementGroup], wait_s: float) -> bool:
    """Whether all groups are placed within `wait_s`. Blocks."""
    deadline = time.monotonic() + wait_s
    return all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups)


def _stands(group: PlacementGroup) -> bool:
    return placement_group_table(group).get("state") not in (None, "REMOVED")


async def _awaited(answer: Awaitable[Answer]) -> Answer:
    return await answer
