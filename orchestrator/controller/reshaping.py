"""Carries out the commands that change where a training job's layers are: move, plan, scale and drain.

Each is checked by `orchestrator/controller/requests/`, then posted to the lifecycle, which logs its outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.hosts import Hosts
from orchestrator.cluster.placement import Node
from orchestrator.commands.apply import Apply
from orchestrator.commands.command import JobCommand, PlanCommand
from orchestrator.commands.drain import Drain
from orchestrator.commands.move import Move
from orchestrator.commands.scale import Scale
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.ranks.runtime import Runtime
from orchestrator.controller.requests.move_request import described, move_of_layers, move_to
from orchestrator.controller.requests.partition_request import check_base, move_to_partition, propose
from orchestrator.controller.requests.resize_request import (
    Capacity,
    check_plan,
    check_refuge,
    choose_node,
    nodes_of,
    scaled,
)
from orchestrator.events.types import Commanded, Event, Noticed, Scaled
from orchestrator.history.proposal import Proposal
from orchestrator.lifecycle import migration, stimuli
from orchestrator.lifecycle.migration import Mode, same
from orchestrator.lifecycle.moves import expected
from orchestrator.lifecycle.scaling import size_of
from orchestrator.lifecycle.states import (
    JobData,
    JobPaused,
    Live,
    Order,
    Training,
    in_words,
)
from orchestrator.lifecycle.stimuli import Going, Migrate, Stimulus
from planner.plan import Plan, PlanError
from planner.search.layer_move import parse_layers
from planner.search.replan import Replanner
from planner.wording import counted, named
from workers.protocol.errors import JobError


@dataclass(eq=False, repr=False)
class Reshaping:
    """The commands of one job."""

    _order: Order
    _setup: ControllerConfig
    _loop: EventLoop
    _runtime: Runtime
    _hosts: Hosts
    nodes: Callable[[], Sequence[Node]] = cluster.nodes
    """Returns the nodes of the cluster; may block."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held from reading the job to the lifecycle's verdict: what a command was checked against still holds."""

    async def carry_out(self, command: PlanCommand) -> str:
        """Carry out `command`; return in words what will happen.

        Raises:
            PlanChanged: it is for an older plan than the newest one.
            JobError: it cannot be done; says why.
        """
        async with self._turn:
            match command:
                case Move():
                    return await self._move(command)
                case Apply():
                    return await self._apply(command)
                case Scale():
                    return await self._scale(command)
                case Drain():
                    return await self._drain(command)
                case _:
                    raise AssertionError(command)

    async def migrate(self, plan: Plan, decided_for: JobData, mode: Mode | None = None) -> str:
        """Have the ranks follow `plan`, in the same places; return in words what will happen.

        Args:
            decided_for: the job when `plan` was decided on: if its plan or its ranks have changed, nothing moves.
            mode: how layers move; None: as the spec says.

        Raises:
            JobError: they have, it does not fit the memory, or the job does not train.
        """
        async with self._turn:
            job = self._training()
            if job.membership.members != decided_for.membership.members or not same(
                expected(job)[0], expected(decided_for)[0]
            ):
                raise JobError("the job's plan or its ranks have changed meanwhile")
            try:
                move = await asyncio.to_thread(
                    move_to,
                    job,
                    self._replanner,
                    plan,
                    mode=mode or self._mode,
                    asked_s=time.time(),
                    slowdowns=self._slowdowns(job),
                )
            except PlanError as error:
                raise JobError(str(error)) from error
            return await self._begin(job, move)

    async def propose(self, partition: Sequence[int] | None) -> Proposal:
        """Validate and simulate `partition`; None: the planner's own best.

        Raises:
            JobError: the job does not train.
        """
        job = self._training()
        return await asyncio.to_thread(propose, job, self._replanner, partition, self._slowdowns(job))

    def check_base(self, command: JobCommand) -> None:
        """Check that a command that was refused before is not refused for its base now.

        Raises:
            PlanChanged: it is for an older plan than the newest one.
        """
        if isinstance(self._loop.state, Live) and isinstance(command, PlanCommand):
            check_base(self._loop.state.job, command.base)

    def again(self, command: Commanded, known: Sequence[Event]) -> bool:
        """Repeat a command of the previous controller that had checked it; return whether there is one.

        Args:
            known: what the log says of notices and of the requested size, each with the id of its command.
        """
        stimulus: Stimulus | None = None
        for event in known:
            match event:
                case Scaled(id=command.id):
                    resizes = any(command.arguments.get(key) is not None for key in ("ranks", "pipelines"))
                    stimulus = stimuli.ScaleRequested(event, resizes=resizes)
                case Noticed(id=command.id):
                    ranks = frozenset(event.ranks)
                    stimulus = Going(ranks, event.source, event.left_s, event.node, event.host, event.id)
                case _:
                    pass
        if stimulus is not None:
            self._loop.post(stimulus)
        return stimulus is not None

    @property
    def _replanner(self) -> Replanner:
        state = self._loop.state
        members = state.job.membership.members if isinstance(state, Live) else ()
        return self._runtime.planning.of(members)

    def _slowdowns(self, job: JobData) -> tuple[float | None, ...]:
        """By place."""
        return self._runtime.planning.known.of(job.membership.members)

    @property
    def _mode(self) -> Any:
        return self._setup.config.elastic.migration

    async def _move(self, command: Move) -> str:
        try:
            span = parse_layers(command.layers)
        except PlanError as error:
            raise JobError(str(error)) from error
        job = self._training()
        check_base(job, command.base)
        move = await asyncio.to_thread(
            move_of_layers,
            job,
            self._replanner,
            span,
            command.rank,
            mode=self._mode,
            asked_s=time.time(),
            slowdowns=self._slowdowns(job),
        )
        return await self._begin(job, replace(move, id=command.key))

    async def _apply(self, command: Apply) -> str:
        job = self._training()
        move = await asyncio.to_thread(
            move_to_partition,
            job,
            self._replanner,
            command.partition,
            command.base,
            mode=self._mode,
            asked_s=time.time(),
            id=command.key,
            by=command.by,
            slowdowns=self._slowdowns(job),
        )
        return await self._begin(job, move)

    async def _begin(self, job: JobData, move: migration.RequestedMove) -> str:
        text = described(job, move)
        await self._loop.post_and_wait(Migrate(move))
        return text

    async def _scale(self, command: Scale) -> str:
        job = self._training()
        check_base(job, command.base)
        has = await self._capacity()
        plan = job.progress.plan
        event = scaled(
            command.ranks,
            command.spares,
            has,
            pipelines=command.pipelines,
            layers=plan.layers[-1][1],
            id=command.key,
        )
        members = len(job.membership.members)
        resizes = command.ranks is not None or command.pipelines is not None
        stays = event.places == members and event.pipelines in (0, plan.pipeline_count)
        if resizes and not stays:
            await asyncio.to_thread(check_plan, job, self._replanner, event, self._runtime.planning.known)
        check_base(self._training(), command.base)  # another plan may have been issued meanwhile
        await self._loop.post_and_wait(stimuli.ScaleRequested(event, resizes=resizes))
        keeps = f"keeps {counted(event.spares, 'spare rank')}"
        if not resizes or stays:
            return f"{keeps} from now on"
        how = "at a commit" if event.places <= members else "as soon as the others are up"
        forming = f" in {counted(event.pipelines, 'pipeline')}" if event.pipelines else ""
        return f"goes from {counted(members, 'rank')} to {event.places}{forming} {how}, and {keeps}"

    async def _drain(self, command: Drain) -> str:
        deadline_s = command.deadline_s
        if not deadline_s >= 0:
            raise JobError(f"a deadline of {deadline_s:g} s is past: give one of 0 s or more")
        check_base(self._live(), command.base)
        nodes = await asyncio.to_thread(self.nodes)
        ours = self._nodes_of_job(nodes)
        node = choose_node(command.node, ours, nodes)
        has, job = await self._capacity(without=node), self._live()
        up = [rank for rank, home in self._runtime.homes.items() if home.node == node]
        ranks = frozenset(up) | (self._hosts.placed_on(node) & job.membership.starting)
        await asyncio.to_thread(
            check_refuge, ranks, job, self._replanner, has, node, self._runtime.planning.known
        )
        check_base(self._live(), command.base)  # another plan may have been issued meanwhile
        host = ours[node]
        await self._loop.post_and_wait(Going(ranks, "request", deadline_s, node, host, command.key))
        told = f"{named('rank', sorted(ranks))} {'leaves' if len(ranks) == 1 else 'leave'} node {node[:12]} ({host})"
        return f"{told} at the next commit; the job starts no rank there until freshet undrain"

    def _nodes_of_job(self, nodes: Sequence[Node]) -> dict[str, str]:
        starting = self._live().membership.starting
        where = [node.id for node in nodes if self._hosts.placed_on(node.id) & starting]
        return nodes_of(self._runtime.homes, where, nodes)

    async def _capacity(self, without: str = "") -> Capacity:
        room = await self._hosts.room((without,) if without else ())
        job = self._live()
        there, size = job.membership, size_of(self._order, job)
        # Ranks that are missing may have left fewer pipelines than there are to be.
        formed = job.progress.plan if job.progress.plan.world_size == size.places else self._order.plan
        return Capacity(
            elastic=self._setup.config.elastic,
            replicas=self._runtime.planning.replanner.first.replicas,
            pipelines=formed.pipeline_count,
            size=size,
            members=len(frozenset(there.members) & there.alive - there.going),
            up=len(there.alive - there.going) + len(there.starting),
            room=room,
        )

    def _training(self) -> JobData:
        state = self._loop.state
        if not isinstance(state, Training):
            raise JobError(f"the job is {in_words(state)}: its plan changes while it trains; ask again then")
        return state.job

    def _live(self) -> JobData:
        state = self._loop.state
        if not isinstance(state, Live) or isinstance(state, JobPaused):
            raise JobError(f"the job is {in_words(state)} and has no ranks")
        return state.job
