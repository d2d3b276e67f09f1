"""Carries out the lifecycle's commands on rank processes, by calls with timeouts.

Every answer comes back as a stimulus through `post`. Decides nothing; runs on one event loop, over any
`Hosts`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.cluster.exits import UNKNOWN
from orchestrator.cluster.hosts import Gone, Hosts, stands
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.planning.current_replanner import CurrentReplanner
from orchestrator.controller.planning.precomputed_plans import PrecomputedPlans
from orchestrator.controller.ranks.hangs import Pace, Verdict, judge, within
from orchestrator.events.types import Event, Noticed, Scaled, Warned
from orchestrator.lifecycle.commands import (
    Ask,
    Assess,
    Command,
    CopyAside,
    Dismiss,
    Follow,
    HostStore,
    Join,
    MakePlan,
    PlanAhead,
    Prepare,
    Propose,
    Reclaim,
    Recruit,
    Reserve,
    Save,
    Settle,
    Switch,
    Train,
    Weigh,
)
from orchestrator.lifecycle.recovery import Handover
from orchestrator.lifecycle.stimuli import (
    Departed,
    Ended,
    Joined,
    Loaded,
    Noted,
    Placed,
    Positioned,
    RankLost,
    Ready,
    Reclaimed,
    Reported,
    Room,
    Settled,
    Stimulus,
    StoreUp,
    Unplaceable,
)
from planner.failure_domains import domain_name
from planner.freezing import FreezePlan
from planner.schedule.expand import pipeline_schedules
from workers.actor import Home
from workers.checkpoint.manifest import FileRecord, checkpoint_folder
from workers.commit import vector_sha256
from workers.control.rank_error import RankError
from workers.control.rank_program import place_programs
from workers.process.output import cause_of_death, last_lines, rank_log_path
from workers.protocol import CheckpointReport, CopiedAhead, CopyAhead, Outcome, Parted, Settlement, Source

PING_EVERY_S = 1.0
"""Between two heartbeats of a rank, at most."""
UNREACHABLE_S = 0.1
"""Before a rank that could not be reached is called again."""
STACKS_S = 1.0
"""How long a rank that is about to be killed may take to return its threads' stacks."""
OUTPUT_S = 1.0
"""How long reading a dead rank's output may take."""
OUTPUT_LINES = 40
"""How many lines of it are quoted: enough for the stack of one thread that crashed in a layer."""
LOOK_FOR_ROOM_S = 1.0
"""Between two checks whether the cluster has room for more ranks."""

Work = Coroutine[Any, Any, None]
Vector = tuple[bytes, ...]
"""All ranks' records of one commit."""


@dataclass(frozen=True)
class _LastOutput:
    """The last output of a rank's process, from the job's folder."""

    cause: str | None = None
    """The signal or exit code by which it ended, if its output says so."""
    place: str = ""
    """Where its output is, in words that follow the cause."""
    lines: str = ""

    @classmethod
    def read(cls, path: Path) -> _LastOutput:
        """Read the file at `path`. Blocks."""
        if not path.exists():
            return cls()
        return cls(
            cause_of_death(path), f"; its output is in {path}", "\n".join(last_lines(path, OUTPUT_LINES))
        )


class Runtime:
    """The ranks of one job.

    Args:
        post: takes each answer.
        spawn: runs work in the background; ends it with the job.
    """

    def __init__(
        self,
        setup: ControllerConfig,
        hosts: Hosts,
        post: Callable[[Stimulus], None],
        spawn: Callable[[Work], asyncio.Future[Any]],
    ) -> None:
        self._setup = setup
        self._hosts = hosts
        self._post = post
        self._spawn = spawn
        self._elastic = setup.config.elastic
        self._homes: dict[int, Home] = {}
        """Of all ranks that are up."""
        self._calling: set[int] = set()
        """Ranks that are starting."""
        self._dismissing: set[int] = set()
        """Ranks that are giving their room back."""
        self._going: set[int] = set()
        """Ranks that are draining, or are gone."""
        self._training: dict[int, asyncio.Future[Any]] = {}
        """Calls under way that end with a generation."""
        self._deaths: dict[int, asyncio.Future[None]] = {}
        """Of ranks whose process was found dead: the reports of it."""
        self._planning = CurrentReplanner(setup.replanner, self._look_ahead_again)
        self._precomputed = PrecomputedPlans(self._planning, setup.config.steps)
        self._pace = Pace()
        self._most = setup.replanner.first.world_size + setup.config.elastic.spares
        """How many ranks the job is to have, spares included."""

    @property
    def homes(self) -> Mapping[int, Home]:
        """Where the ranks that are up run."""
        return self._homes

    @property
    def planning(self) -> CurrentReplanner:
        """The replanner that plans for these ranks are made with."""
        return self._planning

    def carry_out(self, command: Command) -> Work | None:
        """Return the work that `command` takes; None: it is done."""
        match command:
            case Reserve(ranks):
                return self._place(ranks)
            case Prepare(ranks):
                return self._prepare(ranks)
            case Recruit(ranks):
                return self._recruit(ranks)
            case Reclaim(ranks, number):
                return self._reclaim(ranks, number)
            case Assess(ranks, number, generation):
                return self._assess(ranks, number, generation)
            case Settle():
                return self._settle(command)
            case Save():
                return self._save(command)
            case MakePlan():
                return self._tell_of(partial(self._precomputed.make, command))
            case Follow(assignments, number):
                return self._each(
                    {rank: ("follow", assignment) for rank, assignment in assignments.items()},
                    lambda rank, damage: Loaded(rank, damage, number),
                    "load its layers",
                    number,
                )
            case HostStore(rank, number):
                return self._each(
                    {rank: ("host_store",)},
                    lambda _, address: StoreUp(address[0], address[1], number),
                    "open its store",
                    number,
                )
            case Join(generation, number):
                return self._each(
                    dict.fromkeys(generation.members, ("join", generation)),
                    lambda rank, _: Joined(rank, number),
                    "join the process group",
                    number,
                )
            case Train():
                return self._train(command)
            case Ask(request, rank):
                return self._unawaited(rank, "request", request)
            case Propose(plan, ranks):
                return self._propose(plan, ranks)
            case Switch():
                return self._switch(command)
            case CopyAside():
                return self._copy_aside(command)
            case PlanAhead():
                return self._tell_of(partial(self._precomputed.plan_ahead, command))
            case Weigh():
                return self._tell_of(partial(self._precomputed.weigh, command))
            case Dismiss(ranks):
                return self._dismiss(ranks)
            case _:
                raise AssertionError(f"{command} is not the runtime's")

    def take(self, event: Event) -> None:
        """Learn the times of steps and regroups, the draining ranks and the requested size from a logged event."""
        self._precomputed.take(event)
        self._pace = self._pace.after(event)
        if isinstance(event, Noticed):
            self._going |= set(event.ranks)
            # A signal reaches one process: its node stays.
            if event.source != "sigterm":
                # A node that the job was asked to leave may stay, and serve again afterwards.
                self._hosts.shun(event.node, event.left_s if event.source == "request" else None)
        if isinstance(event, Scaled):
            self._most = event.places + event.spares

    async def watch_room(self) -> None:
        """Post when there is room for ranks that the job lacks, until cancelled.

        While ranks are being dismissed the room still grows: a resumed job that saw a part of it would go on
        with fewer ranks than it had.
        """
        while True:
            await asyncio.sleep(LOOK_FOR_ROOM_S)
            if len(self._homes.keys() - self._going) + len(self._calling) < self._most:
                with suppress(Exception):  # a cluster in trouble has no room
                    if not self._dismissing and (room := await self._hosts.room()):
                        self._post(Room(room))

    async def release(self) -> None:
        """End all ranks and give their resources back; safe at any point, and more than once."""
        self._homes.clear()
        self._training.clear()
        await self._hosts.release()

    # Ranks start and end

    async def _place(self, ranks: Sequence[int]) -> None:
        self._calling |= set(ranks)
        lacking = await self._hosts.reserve(ranks, self._setup.wait_s)
        if lacking is None:
            self._post(Placed())
            return
        ways_out = "lower pipeline.ranks or cluster.resources_per_rank, add nodes, or wait longer"
        self._post(Unplaceable(f"{lacking}; {ways_out}"))

    async def _prepare(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._hosts.start(rank)
        await asyncio.gather(*(self._set_up(rank) for rank in ranks))

    async def _set_up(self, rank: int) -> None:
        try:
            async with asyncio.timeout(self._setup.wait_s):
                home: Home = await self._hosts.call(rank, "setup")
        except TimeoutError:
            self._avoid_node_of(rank)
            await self._hosts.end(rank)
            self._post(RankLost(rank, f"did not start within {self._setup.wait_s:g} s"))
        except Gone as error:
            self._avoid_node_of(rank)
            await self._hosts.end(rank)
            if error.stillborn:
                self._post(RankLost(rank, str(error)))
            else:
                words = await self._last_output(rank)
                died = f"its process died as it started: {words.cause or error}{words.place}"
                self._post(RankLost(rank, died, dead=True, details=words.lines))
        except RankError as error:
            self._avoid_node_of(rank)
            self._post(_raised(rank, error, 0))
        else:
            self._hosts.started(rank)
            self._up(rank, home)
            self._post(Ready(rank, home.node, home.host, home.pid, home.zone))
        finally:
            self._calling.discard(rank)

    def _avoid_node_of(self, rank: int) -> None:
        if text := self._hosts.failed(rank):
            self._post(Noted(Warned(text=text)))

    def _up(self, rank: int, home: Home) -> None:
        self._homes[rank] = home
        self._spawn(self._listen(rank))

    async def _recruit(self, ranks: Sequence[int]) -> None:
        await asyncio.gather(*(self._recruit_one(rank) for rank in ranks))

    async def _recruit_one(self, rank: int) -> None:
        self._calling.add(rank)
        try:
            lacking = await self._hosts.reserve([rank], self._setup.wait_s)
        except Exception as error:  # a cluster in trouble has no room; the job trains on
            lacking = f"{type(error).__name__}: {error}"
        if lacking is None:
            await self._prepare([rank])
            return
        self._calling.discard(rank)
        await self._hosts.end(rank)
        self._post(RankLost(rank, f"could not be added: {lacking}", dead=True))

    async def _reclaim(self, ranks: Iterable[int], number: int) -> None:
        await asyncio.gather(*(self._reclaim_one(rank, number) for rank in ranks))

    async def _reclaim_one(self, rank: int, number: int) -> None:
        try:
            home = await within(self._hosts.reclaim(rank), self._elastic.hang_timeout_s, self._ping_every_s)
        except (TimeoutError, RankError):
            await self._bury(rank, "did not answer the controller that took over, and was killed")
        except Gone as error:
            await self._found_dead(rank, str(error))
        else:
            self._up(rank, home)
            self._post(Reclaimed(rank, home.node, home.host, number))

    async def _listen(self, rank: int) -> None:
        """Send heartbeats to one rank until it is gone: check that it answers and makes progress."""
        limit_s, every_s = self._elastic.hang_timeout_s, self._ping_every_s
        slow = False
        while rank in self._homes:
            try:
                # The last answer came up to `every_s` before this call.
                working = await within(self._reached(rank, "ping"), limit_s - every_s, every_s)
            except TimeoutError:
                text = f"answered nothing for {limit_s:g} s (elastic.hang_timeout_s), and was killed"
                await self._bury(rank, text)
            except Gone as error:
                await self._found_dead(rank, str(error))
            except RankError:
                pass
            else:
                verdict, why = judge(
                    working, self._pace, hang_timeout_s=limit_s, timeout_s=self._setup.timeout_s
                )
                if verdict is Verdict.HUNG:
                    await self._bury_late(rank, why)
                elif verdict is Verdict.SLOW and not slow:
                    self._post(Noted(Warned(text=f"rank {rank} {why}")))
                slow = verdict is Verdict.SLOW
            await asyncio.sleep(every_s)

    @property
    def _ping_every_s(self) -> float:
        return min(PING_EVERY_S, self._elastic.hang_timeout_s / 4)

    async def _reached(self, rank: int, method: str, *arguments: Any) -> Any:
        """Make an idempotent call, again until the rank can be reached; return its result."""
        while True:
            try:
                return await self._hosts.call(rank, method, *arguments)
            except Gone as error:
                if not error.unreachable:
                    raise
            await asyncio.sleep(UNREACHABLE_S)

    async def _dismiss(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._homes.pop(rank, None)
        self._dismissing |= set(ranks)
        try:
            await asyncio.gather(*(self._hosts.end(rank) for rank in ranks))
        finally:
            self._dismissing -= set(ranks)

    async def _found_dead(self, rank: int, cause: str = UNKNOWN) -> None:
        """Report once that the rank's process is dead: by `cause`, unless its own output says more.

        The caller may be cancelled when the lifecycle abandons an attempt: the death is reported all the
        same.
        """
        if rank not in self._deaths:
            self._deaths[rank] = self._spawn(self._report_death(rank, cause))
        await asyncio.shield(self._deaths[rank])

    async def _report_death(self, rank: int, cause: str) -> None:
        home = self._homes.pop(rank, None)
        where = f" (pid {home.pid} on {home.host})" if home is not None else ""
        words = await self._last_output(rank)
        await self._bury(rank, f"its process{where} died: {words.cause or cause}{words.place}", words.lines)

    async def _last_output(self, rank: int) -> _LastOutput:
        """Return the last output of the process of `rank`; nothing if reading takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_S):
                path = rank_log_path(self._setup.config.output, rank)
                return await asyncio.to_thread(_LastOutput.read, path)
        return _LastOutput()

    async def _bury(self, rank: int, why: str, details: str = "") -> None:
        """Kill the rank, if it lives, and report it dead: anything it still does is ignored.

        Args:
            details: its threads' stacks, or its last output.
        """
        self._homes.pop(rank, None)
        self._post(RankLost(rank, why, dead=True, details=details))
        self._training.pop(rank, None)
        await self._hosts.end(rank)

    async def _bury_late(self, rank: int, why: str) -> None:
        """Kill a rank that took too long, after asking for its threads' stacks."""
        up, details = rank in self._homes, ""
        with suppress(TimeoutError, Gone, RankError):
            async with asyncio.timeout(STACKS_S):
                details = await self._hosts.call(rank, "stacks")
        if rank in self._homes or not up:  # else it was found dead meanwhile, and that was reported
            await self._bury(rank, why, details)

    # Generations

    async def _save(self, command: Save) -> None:
        """Have idle ranks write a checkpoint of what they hold, and report the result."""
        rescue, config = command.rescue, self._setup.config
        begun_s = time.monotonic()
        path = checkpoint_folder(config.output, rescue.step, command.generation)
        error: str | None = None
        records: list[FileRecord] = []
        try:
            async with asyncio.timeout(self._setup.timeout_s):
                vector = await self._records(rescue.handover)
                told = _settlements(rescue.settling, rescue.settlement, rescue.handover, vector)
                await asyncio.gather(*(self._hosts.call(rank, "settle", each) for rank, each in told.items()))
                writing = (
                    self._hosts.call(rank, "save", path, rescue.step, layers)
                    for rank, layers in rescue.layers.items()
                )
                for written in await asyncio.gather(*writing):
                    records += written
                first, plan = min(rescue.layers), command.plan
                await self._hosts.call(first, "seal", path, rescue.step, plan, command.generation, records)
        except TimeoutError:
            error = f"was not written within {self._setup.timeout_s:g} s (cluster.timeout_s)"
        except Gone as failure:
            error = f"a rank's process died: {failure}"
        except RankError as failure:
            error = str(failure)
        report = CheckpointReport(
            step=rescue.step,
            path=path,
            bytes=sum(record.bytes for record in records) if error is None else 0,
            seconds=time.monotonic() - begun_s,
            error=error,
        )
        self._post(Reported(report))

    async def _settle(self, command: Settle) -> None:
        """Have the ranks settle; first get the records that some of them lack from one that has them."""
        handover, number = command.handover, command.round
        vector: Vector | None = None
        if handover is not None:
            got = await self._answer(
                handover.holder, self._records(handover), "send the records of its commit", number
            )
            if got is None:
                return
            vector = got[0]
        told = _settlements(command.ranks, command.settlement, handover, vector)
        await self._each(
            {rank: ("settle", settlement) for rank, settlement in told.items()},
            lambda rank, _: Settled(rank, number),
            "settle",
            number,
        )

    async def _records(self, handover: Handover | None) -> Vector | None:
        """Return the records that `handover` is about, from the rank that holds them.

        Raises:
            Gone: it is dead.
            RankError: it has none, or others than it had named.
        """
        if handover is None:
            return None
        vector: Vector = await self._hosts.call(handover.holder, "records")
        if vector_sha256(vector) != handover.vector_sha256:
            raise RankError("the records of its commit are not those that it had named")
        return vector

    async def _assess(self, ranks: Iterable[int], number: int, generation: int) -> None:
        await asyncio.gather(*(self._position(rank, number, generation) for rank in ranks))

    async def _position(self, rank: int, number: int, generation: int) -> None:
        asking = asyncio.ensure_future(self._ask_position(rank, number, generation))
        try:
            home = self._homes.get(rank)
            if home is None or not home.port or await stands(home):
                await asking
            elif rank in self._homes:
                await self._found_dead(rank)
        finally:
            asking.cancel()

    async def _ask_position(self, rank: int, number: int, generation: int) -> None:
        left = self._spawn(self._leave(rank, generation))
        # Heartbeats find a rank that hangs. This one answers, and may be loading, or in a long action.
        patience_s = self._setup.timeout_s
        training = self._training.pop(rank, None)
        # The call queues behind what the rank is doing.
        position = asyncio.ensure_future(self._reached(rank, "position"))
        try:
            async with asyncio.timeout(patience_s):
                if training is not None:
                    await self._last_words(rank, training)
                told = await position
                # A `leave` that arrived later would interrupt what follows.
                await asyncio.shield(left)
                self._post(Positioned(told, number))
        except TimeoutError:
            text = f"did not leave its step within {patience_s:g} s (cluster.timeout_s), and was killed"
            await self._bury_late(rank, text)
        except Gone as error:
            if rank in self._homes:
                await self._found_dead(rank, str(error))
        except RankError as error:
            await self._bury(rank, f"cannot report its position, and was killed: {error}")
        finally:
            position.cancel()

    async def _leave(self, rank: int, generation: int) -> None:
        """Have a rank leave `generation`; return once it has, or is dead."""
        with suppress(Gone, RankError):
            await self._reached(rank, "leave", generation)

    async def _last_words(self, rank: int, training: asyncio.Future[Any]) -> None:
        """Report why a rank's training ended, which may be why the generation did."""
        try:
            await training
        except RankError as error:
            self._post(_raised(rank, error, -1))
        except Gone:
            pass

    async def _train(self, command: Train) -> None:
        method = "outcome" if command.under_way else "train"
        self._training = {
            rank: asyncio.ensure_future(self._hosts.call(rank, method)) for rank in command.ranks
        }
        hearing = [self._await_end(rank, end, command.round) for rank, end in self._training.items()]
        await asyncio.gather(*hearing, self._precomputed.look_ahead(self._domains_in_training()))

    def _look_ahead_again(self) -> None:
        if domains := self._domains_in_training():
            self._spawn(self._precomputed.look_ahead(domains))

    def _domains_in_training(self) -> dict[int, str]:
        homes = {rank: self._homes[rank] for rank in self._training if rank in self._homes}
        return {rank: domain_name(home.node, home.zone) for rank, home in homes.items()}

    async def _await_end(self, rank: int, training: asyncio.Future[Any], number: int) -> None:
        """Post how the training of one rank ends."""
        try:
            end = await asyncio.shield(training)
        except Gone as error:
            if not error.unreachable:
                await self._found_dead(rank, str(error))
            elif self._training.get(rank) is training:
                # Its heartbeats show whether it lives; if so, it trains on.
                self._training[rank] = again = asyncio.ensure_future(self._reached(rank, "outcome"))
                await self._await_end(rank, again, number)
        except RankError as error:
            self._training.pop(rank, None)
            self._post(_raised(rank, error, number))
        else:
            match end:
                case Outcome():
                    self._post(Ended(end, number))
                case Parted():
                    self._post(Departed(end, number))
                case _:
                    self._post(RankLost(rank, "is in no generation", cut_off=True, round=number))

    async def _propose(self, plan: FreezePlan, ranks: Sequence[int]) -> None:
        """Have every rank prepare `plan`; they adopt it at the first commit at which all have it."""
        calls = [self._hosts.call(rank, "prepare", plan) for rank in ranks]
        for rank, answer in zip(ranks, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            # A rank that died is reported by its training call.
            if isinstance(answer, RankError):
                self._post(Noted(Warned(text=f"rank {rank} refuses the freeze plan: {answer}")))

    async def _switch(self, command: Switch) -> None:
        """Have every rank prepare another plan."""
        programs = place_programs(command.plan, pipeline_schedules(command.plan, command.schedule))
        calls = [
            self._hosts.call(rank, "prepare_plan", command.plan, programs[place], command.held)
            for place, rank in enumerate(command.ranks)
        ]
        for rank, answer in zip(
            command.ranks, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, RankError):
                self._post(Noted(Warned(text=f"rank {rank} refuses the plan: {answer}")))

    async def _copy_aside(self, command: CopyAside) -> None:
        """Have ranks without a place copy layers; report of those that cannot begin."""
        orders = {rank: self._copy_order(command, owners) for rank, owners in command.layers.items()}
        calls = [self._hosts.call(rank, "copy_ahead", order) for rank, order in orders.items()]
        for (rank, order), answer in zip(
            orders.items(), await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            # Heartbeats report a rank that died.
            if isinstance(answer, RankError):
                failed = CopiedAhead(
                    rank=rank,
                    epoch=order.epoch,
                    change=order.change,
                    step=0,
                    layers=tuple(command.layers[rank]),
                    bytes=0,
                    seconds=0.0,
                    error=str(answer),
                )
                self._post(Reported(failed))

    def _copy_order(self, command: CopyAside, owners: Mapping[int, int]) -> CopyAhead:
        homes = {owner: self._homes[owner] for owner in owners.values() if owner in self._homes}
        return CopyAhead(
            epoch=command.epoch,
            change=command.change,
            generation=command.generation,
            sources=tuple(
                Source(layer=layer, rank=owner, host=homes[owner].host, port=homes[owner].port)
                for layer, owner in owners.items()
                if owner in homes
            ),
            freeze=command.freeze,
            patience_s=command.patience_s,
        )

    async def _tell_of(self, ask: Callable[[], Awaitable[Stimulus]]) -> None:
        # It asks itself: a job that ends may cancel it before its first turn, and nobody else would await the answer.
        self._post(await ask())

    async def _unawaited(self, rank: int, method: str, *arguments: Any) -> None:
        """Make a call and ignore errors: other calls report a rank that failed."""
        with suppress(Gone, RankError):
            await self._hosts.call(rank, method, *arguments)

    async def _each(
        self,
        calls: Mapping[int, tuple[Any, ...]],
        told: Callable[[int, Any], Stimulus],
        what: str,
        number: int,
    ) -> None:
        """Make one call to each rank and post the results."""
        answers = {rank: self._hosts.call(rank, *call) for rank, call in calls.items()}
        await asyncio.gather(
            *(self._hear(rank, answer, told, what, number) for rank, answer in answers.items())
        )

    async def _hear(
        self,
        rank: int,
        answer: Awaitable[Any],
        told: Callable[[int, Any], Stimulus],
        what: str,
        number: int,
    ) -> None:
        if (got := await self._answer(rank, answer, what, number)) is not None:
            self._post(told(rank, got[0]))

    async def _answer(self, rank: int, answer: Awaitable[Any], what: str, number: int) -> tuple[Any] | None:
        """Return what a rank answers. None: it was lost, and that is posted.

        Args:
            what: what it was to do, in words.
        """
        try:
            async with asyncio.timeout(self._setup.timeout_s):
                return (await answer,)
        except TimeoutError:
            text = f"did not {what} within {self._setup.timeout_s:g} s (cluster.timeout_s), and was killed"
            await self._bury_late(rank, text)
        except Gone as error:
            await self._found_dead(rank, str(error))
        except RankError as error:
            self._post(_raised(rank, error, number))
        return None


def _settlements(
    ranks: Iterable[int], settlement: Settlement, handover: Handover | None, vector: Vector | None
) -> dict[int, Settlement]:
    """Return what each of `ranks` is told: only those that lack the records get them."""
    lacking = frozenset[int]() if handover is None else handover.lacking
    with_records = replace(settlement, vector=vector)
    return {rank: with_records if rank in lacking else settlement for rank in ranks}


def _raised(rank: int, error: RankError, number: int) -> RankLost:
    return RankLost(
        rank,
        error.message,
        error.cut_off,
        error.user_error,
        error.details,
        round=number,
        shortage=error.shortage,
    )
