"""A simulated cluster that obeys a lifecycle and answers in any order. Anything may happen at any time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lifecycle_jobs import (
    checkpoint_report,
    order_of,
    plan_of,
    position,
    standby_report,
    step_report,
    switch_report,
)

from orchestrator.events import types as events
from orchestrator.lifecycle.effects import (
    AppendToLog,
    Ask,
    Assess,
    AwaitCopies,
    AwaitRanks,
    CopyAside,
    Dismiss,
    Effect,
    FinishCommit,
    Follow,
    HostStore,
    Join,
    LogRegroup,
    MakePlan,
    PlanAhead,
    Prepare,
    Recruit,
    Release,
    Reserve,
    Save,
    Switch,
    Train,
    Wait,
    Weigh,
)
from orchestrator.lifecycle.machine import handle
from orchestrator.lifecycle.recovery import PACKED, Handover
from orchestrator.lifecycle.states import (
    Closing,
    JobFailed,
    JobFinished,
    Live,
    Pending,
    Regrouping,
    State,
    Stopping,
    Training,
)
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    CopiesOverdue,
    Departed,
    Going,
    Joined,
    Placed,
    PlannedAhead,
    PlanReady,
    Positioned,
    RankLoaded,
    RankLost,
    RanksOverdue,
    Ready,
    Released,
    Reported,
    Room,
    SaveOrStop,
    ScaleRequested,
    Start,
    Stimulus,
    StoreUp,
    TrainingEnded,
    WaitOver,
    Weighed,
)
from planner.arrivals import built_ahead, copied_ahead
from planner.plan import Plan
from planner.schedule.registry import build
from planner.shards import Piece, made_of
from workers.config import ElasticConfig
from workers.control.records_digest import vector_sha256
from workers.protocol.orders import Assignment, CommitOutcome, Request, StatePart
from workers.protocol.reports import (
    CheckpointReport,
    CopiedAhead,
    Outcome,
    Parted,
    PrefixFrozen,
    RankPosition,
    Report,
    StepReport,
)

LAYERS = 6
LAST = 1 << 30


@dataclass
class Process:
    """A rank, reduced to what matters for recovery."""

    step: int = 0
    pieces: dict[Piece, int] = field(default_factory=dict)
    """For each layer, or shard of it, the step of its state."""
    weights: set[Piece] = field(default_factory=set)
    """Layers, or shards, of which it has only the weights of `step`, without moments."""
    undecided: int | None = None
    vector: tuple[bytes, ...] | None = None
    generation: int | None = None


class World:
    """Obeys a lifecycle's effects and answers in any order; now and then an event happens.

    Args:
        shared: two pipelines share out the states of their layers, where there are ranks for two.
    """

    def __init__(self, seed: int, elastic: ElasticConfig, *, shared: bool = False) -> None:
        self.random = random.Random(seed)
        self.shared = shared
        plan = self.plan(4)
        schedule = build("1f1b", plan.pipeline_ranks, 2, 1)
        self.order = order_of(
            4,
            layers=LAYERS,
            plan=plan,
            schedule=schedule,
            generation=1,
            timeout_s=1.0,
            elastic=elastic,
            packs=bool(seed % 2),
        )
        self.state: State = Pending()
        self.history: list[Stimulus] = []
        self.answers: list[Stimulus] = [Start()]
        self.ranks: dict[int, Process] = {}
        self.assigned: dict[int, Follow] = {}
        self.members: tuple[int, ...] = ()
        self.requests: set[Request] = set()
        self.training: tuple[int, ...] = ()
        self.round = 0
        self.announced = 0
        self.newest = 0
        """The newest step that any rank has committed since the last return to a checkpoint."""
        self.told = 0
        self.on_disk: dict[str, int] = {}
        self.plans: list[tuple[int, int]] = []
        self.generations: list[int] = []
        self.building: dict[int, tuple[Piece, ...]] = {}
        """What the newest plan that was made ahead has ranks build."""
        self.ahead: set[int] = set()
        """Ranks without a place that were told to copy layers, and not to let go of them."""
        self.salvages = 0
        """How often a rank began with weights whose moments were lost."""

    def plan(self, ranks: int, **changes: object) -> Plan:
        """A plan for so many ranks."""
        if not self.shared:
            return plan_of(ranks, LAYERS, **changes)
        pipelines = 2 if ranks % 2 == 0 else 1
        return plan_of(
            ranks // pipelines, LAYERS, replicas=2, pipelines=pipelines, shard="optimizer", **changes
        )

    # Effects of the lifecycle

    def obey(self, effect: Effect) -> None:
        match effect:
            case Reserve():
                self.answers.append(Placed())
            case Prepare(ranks) | Recruit(ranks):
                for rank in ranks:
                    if isinstance(effect, Recruit) and self.random.random() < 0.15:
                        blind, dead = self.random.random() < 0.3, self.random.random() < 0.5
                        lost = RankLost(rank, "never came up", dead=dead and not blind, user_error=blind)
                        self.answers.append(lost)
                        continue
                    self.ranks[rank] = Process()
                    self.answers.append(Ready(rank, f"n{rank}", "h", rank))
            case Assess(ranks, number):
                self.training = ()
                for rank in sorted(ranks):
                    if rank in self.ranks:
                        one = self.ranks[rank]
                        one.generation = None
                        self.answers.append(Positioned(self.position(rank), number))
                    else:
                        self.answers.append(RankLost(rank, "refused", dead=True))
            case FinishCommit(ranks, commit_outcome, number, handover):
                if handover is not None and handover.holder not in self.ranks:
                    return  # its death is an answer that is still to come
                for rank in self.standing(ranks):
                    self.finish_commit(rank, commit_outcome, handover)
                    self.answers.append(CommitFinished(rank, number))
            case Save(rescue, _, generation):
                handover = rescue.handover
                needed = rescue.finishing | rescue.layers.keys() | {source.rank for source in rescue.sources}
                there = needed <= self.ranks.keys() and (handover is None or handover.holder in self.ranks)
                written = sorted(layer for layers in rescue.layers.values() for layer in layers)
                assert written == list(range(LAYERS)), "every layer is written once"
                finishing = self.standing(rescue.finishing)
                if handover is not None and handover.holder not in self.ranks:
                    finishing = []
                for rank in finishing:
                    self.finish_commit(rank, rescue.commit_outcome, handover)
                if finishing:
                    self.tell_up_to(rescue.step, self.generations[-1])
                if there:
                    cut = {source.layer for source in rescue.sources}
                    giving = [(source.piece, source.rank) for source in rescue.sources]
                    giving += [
                        (Piece(layer), rank)
                        for rank, layers in rescue.layers.items()
                        for layer in layers
                        if layer not in cut
                    ]
                    assert all(self.ranks[rank].pieces[piece] == rescue.step for piece, rank in giving)
                    for layer in range(LAYERS):
                        assert made_of(layer, [piece for piece, _ in giving])
                path, error = f"/{rescue.step}.gen-{generation}", None if there else "a rank is gone"
                if there:
                    self.on_disk[path] = rescue.step
                self.answers.append(Reported(replace(checkpoint_report(rescue.step, path), error=error)))
            case MakePlan(recovery_plan, _, _, epoch, version, number):
                plan = self.plan(len(recovery_plan.lineup), epoch=epoch, version=version)
                self.answers.append(PlanReady(plan, build("1f1b", plan.pipeline_ranks, 2, 1), number))
            case Follow(assignments, number):
                if self.random.random() < 0.2:
                    self.kill_a_source(assignments.values())
                for rank in self.standing(assignments):
                    if self.follow(rank, effect):
                        self.answers.append(RankLoaded(rank, None, number))
                    else:
                        self.answers.append(RankLost(rank, "a source is gone", cut_off=True, round=number))
            case HostStore(rank, number):
                if rank in self.ranks:
                    self.answers.append(StoreUp("h", 1, number))
            case Join(generation, number):
                live = self.live().job
                assert set(generation.members) <= live.membership.alive, "nobody dead in members"
                if set(generation.members) <= set(self.ranks):
                    self.answers += [Joined(rank, number) for rank in generation.members]
                else:
                    self.answers += [
                        RankLost(rank, "refused", cut_off=True, round=number)
                        for rank in self.standing(generation.members)
                    ]
            case Train(ranks, step, number):
                self.begin(ranks, step, number)
            case Ask(request, rank):
                assert rank in self.live().job.membership.members
                self.requests.add(request)
            case PlanAhead():
                self.answers.append(self.plan_ahead(effect))
            case Switch():
                assert effect.generation == self.generations[-1]
                self.switch(effect.plan, effect.ranks, effect.building)
            case CopyAside():
                self.copy_aside(effect)
            case AwaitCopies(_, ranks, change):
                self.answers.append(CopiesOverdue(ranks, change))
            case Weigh():
                self.answers.append(Weighed(self.random.random() < 0.7, "", effect.round, effect.prefix))
            case Dismiss(ranks):
                for rank in ranks:
                    self.ranks.pop(rank, None)
            case Wait(_, pause):
                self.answers.append(WaitOver(pause)) if self.random.random() < 0.1 else None
            case AwaitRanks(_, id):
                self.answers.append(RanksOverdue(id)) if self.random.random() < 0.1 else None
            case Release():
                self.answers.append(Released())
            case AppendToLog(event):
                self.check(event)
            case LogRegroup(event):
                assert event.step >= self.announced or event.steps_lost >= self.announced - event.step
                assert event.steps_lost <= max(0, self.newest - event.step), "none lost that was not made"
                assert event.rerun <= 1
                self.announced = min(self.announced, event.step)
                self.newest = event.step
            case _:
                pass

    def standing(self, ranks: object) -> list[int]:
        return [rank for rank in ranks if rank in self.ranks]  # pyright: ignore[reportGeneralTypeIssues]

    def live(self) -> Live:
        assert isinstance(self.state, Live)
        return self.state

    def position(self, rank: int) -> RankPosition:
        one = self.ranks[rank]
        holds = tuple(sorted(piece for piece, step in one.pieces.items() if step == one.step))
        weights = tuple(sorted(one.weights - {*holds}))
        digest = None if one.vector is None else vector_sha256(one.vector)
        return position(rank, one.step, holds, weights=weights, undecided=one.undecided, vector_sha256=digest)

    def finish_commit(self, rank: int, commit_outcome: CommitOutcome, handover: Handover | None) -> None:
        one = self.ranks[rank]
        if one.undecided == commit_outcome.step:
            assert handover is not None
            assert rank in handover.lacking
            vector = self.ranks[handover.holder].vector
            assert vector is not None
            assert vector_sha256(vector) == handover.vector_sha256
            one.pieces = {
                piece: commit_outcome.step if step == one.step else step for piece, step in one.pieces.items()
            }
            one.step, one.vector = commit_outcome.step, vector
        assert one.step == commit_outcome.step
        one.undecided = None

    def follow(self, rank: int, effect: Follow) -> bool:
        """Whether the rank could load its layers."""
        assignment, one = effect.assignments[rank], self.ranks[rank]
        plan = assignment.plan
        owned = plan.pieces_of_place(assignment.place)
        sources = {source.piece: source.rank for source in assignment.sources}
        needed = {each for piece in owned for each in assignment.offered_for(piece)}
        if assignment.start is not None:
            assert self.on_disk[assignment.start.path] == assignment.step
        elif sources:
            assert {*sources} == needed | assignment.salvaged
            assert len(assignment.sources) == len(sources), "every piece that it needs has exactly one source"
            for piece in owned:
                offered = assignment.offered_for(piece)
                assert offered in ((piece,), made_of(piece.layer, offered))
            for piece in needed:
                giver = self.ranks.get(sources[piece])
                if giver is None:
                    continue
                assert giver.step == assignment.step
                if piece in assignment.salvaged:
                    assert piece in giver.weights
                else:
                    assert giver.pieces[piece] == assignment.step
            if not {sources[piece] for piece in needed} <= self.ranks.keys():
                self.keep(one, assignment)
                return False
        else:
            assert assignment.step == 0
        if not sources or one.step != assignment.step:
            one.pieces, one.weights = {}, set()
        one.step, one.undecided = assignment.step, None
        one.weights = (one.weights | needed) & assignment.salvaged
        mixed = {
            piece for piece in owned if not assignment.salvaged.isdisjoint(assignment.offered_for(piece))
        }
        self.salvages += bool(mixed)
        complete = ({*owned} - mixed) | (needed - assignment.salvaged)
        one.pieces |= dict.fromkeys(complete, assignment.step)
        self.assigned[rank] = effect
        return True

    def keep(self, one: Process, assignment: Assignment) -> None:
        """Any of the layers that the rank was fetching may have arrived; where weights go first, moments only after all
        weights."""
        if one.step != assignment.step:
            one.pieces, one.weights, one.vector = {}, set(), None
        one.step = assignment.step
        salvages = self.order.elastic.salvage == "weights"
        all_weights = salvages and self.random.random() < 0.7
        for source in assignment.sources:
            if salvages and (all_weights or self.random.random() < 0.5):
                one.weights.add(source.piece)
            if (all_weights or not salvages) and source.part is StatePart.ALL and self.random.random() < 0.3:
                one.pieces[source.piece] = assignment.step

    def plan_ahead(self, effect: PlanAhead) -> PlannedAhead:
        if self.random.random() < 0.1:
            return PlannedAhead(effect.number, why="no plan")
        # Packed layers may need fewer ranks than there are.
        fewer = effect.reason == PACKED and self.random.random() < 0.5
        plan = self.plan(self.random.randint(1, len(effect.lineup)) if fewer else len(effect.lineup))
        copying = copied_ahead(effect.now, effect.members, plan, effect.lineup)
        schedule = build("1f1b", plan.pipeline_ranks, 2, 1)
        if self.random.random() < 0.1:
            return PlannedAhead(effect.number, plan, schedule, why="no room for copies")
        self.building = built_ahead(effect.now, effect.members, plan, effect.lineup)
        return PlannedAhead(effect.number, plan, schedule, copying, self.building)

    def switch(self, plan: Plan, members: tuple[int, ...], building: Mapping[int, tuple[Piece, ...]]) -> None:
        """The ranks follow `plan`; some bring the copies that it gives them, and build, and others never say so."""
        if self.training != members or len(self.standing(members)) < len(members):
            return
        for place, rank in enumerate(members):
            self.answers.append(Reported(switch_report(place, plan)))
            copies = plan.standbys_of(place)
            if copies and self.random.random() < 0.9:
                one = self.ranks[rank]
                one.pieces |= dict.fromkeys(plan.copies_at(place), one.step)
                built = rank not in building or self.random.random() < 0.5
                self.answers.append(Reported(replace(standby_report(place, copies), built=built)))
            if rank in building and self.random.random() < 0.9:
                self.answers.append(Reported(standby_report(place, (), step=3)))

    def copy_aside(self, effect: CopyAside) -> None:
        """Ranks without a place copy layers, or cannot; some never say so."""
        members = self.live().job.membership.members
        copying = [rank for rank, owners in effect.pieces.items() if owners]
        told = {rank: self.building[rank] for rank in copying if rank in self.building}
        assert effect.building == told, "a rank that copies also builds what it will own"
        for rank, owners in effect.pieces.items():
            assert rank not in members
            (self.ahead.add if owners else self.ahead.discard)(rank)
            assert {*owners.values()} <= {*members}, "layers come from ranks that train"
            if owners and rank in self.ranks and self.random.random() < 0.9:
                failed = self.random.random() < 0.2
                self.answers.append(
                    Reported(
                        CopiedAhead(
                            rank=rank,
                            epoch=effect.epoch,
                            change=effect.change,
                            step=0,
                            layers=tuple(piece.layer for piece in owners),
                            bytes=0,
                            seconds=0.0,
                            error="its owner is gone" if failed else None,
                        )
                    )
                )

    def begin(self, ranks: tuple[int, ...], step: int, number: int) -> None:
        assert isinstance(self.state, Training | Stopping)
        self.training, self.round, self.requests = ranks, number, set()
        self.tell_up_to(step, max(1, self.generations[-1] - 1))
        plan = self.state.job.progress.plan
        self.ahead -= {*ranks}
        for place, rank in enumerate(ranks):
            if rank in self.ranks:
                one = self.ranks[rank]
                assert one.step == step
                near = [*plan.pieces_of_place(place)]
                if self.order.elastic.redundancy != "checkpoint":
                    near += plan.pieces_of_place((place + 1) % len(ranks))
                one.pieces, one.weights, one.vector = dict.fromkeys(near, step), set(), None

    def tell_up_to(self, step: int, generation: int) -> None:
        """The remaining ranks report steps that all have committed, some of them twice, but none that was undone."""
        for told in range(min(self.told, step - 1) + 1, step + 1):
            self.answers.append(Reported(step_report(told, generation)))
        self.told = step

    def check(self, event: events.Event) -> None:
        match event:
            case events.Issued(plan=plan):
                self.plans.append((plan.epoch, plan.version))
                assert self.plans == sorted(set(self.plans))
            case events.Formed(generation=generation):
                self.generations.append(generation.number)
                assert self.generations == list(range(1, len(self.generations) + 1))
            case StepReport(step=step):
                assert step == self.announced + 1, "none missing, none doubled"
                self.announced = step
            case _:
                pass

    # Events in the cluster

    def commit(self, reached: int | None = None) -> None:
        """Commit a step of the training generation; with `reached`, only that many ranks learn of it."""
        standing = self.standing(self.training)
        if len(standing) < len(self.training) or not standing:
            return
        step = self.ranks[standing[0]].step + 1
        if any(self.ranks[rank].undecided or self.ranks[rank].step + 1 != step for rank in standing):
            return
        self.random.shuffle(standing)
        self.newest = max(self.newest, step)
        for count, rank in enumerate(standing):
            one = self.ranks[rank]
            if reached is not None and count >= reached:
                one.undecided = step
            else:
                one.step, one.vector = step, (b"%d" % step,)
                one.pieces = dict.fromkeys(one.pieces, step)
        if reached is not None:
            return
        self.told = step
        self.answers.append(Reported(step_report(step, self.generations[-1])))
        if self.random.random() < 0.1:
            layers = self.random.randrange(LAYERS)
            frozen = PrefixFrozen(step=step + 1, layers=layers, bound=0.0, norms=(), names=())
            self.answers.append(Reported(frozen))
        asked, self.requests = self.requests, set()
        if asked & {Request.CHECKPOINT, Request.STOP} or self.random.random() < 0.1:
            path = f"/{step}.{len(self.on_disk)}"
            self.on_disk[path] = step
            self.answers.append(Reported(checkpoint_report(step, path)))
        if Request.REGROUP in asked:
            self.answers += [Departed(Parted(rank=rank, step=step), self.round) for rank in standing]
            self.training = ()
        elif Request.STOP in asked:
            ended = [Outcome(rank=rank, step=step, stopped=True, layer_digests=()) for rank in standing]
            self.answers += [TrainingEnded(outcome, self.round) for outcome in ended]
            self.training = ()

    def kill(self, rank: int) -> None:
        del self.ranks[rank]
        for other in self.standing(self.training):
            if rank in self.training and self.random.random() < 0.5:
                self.answers.append(RankLost(other, "reset", cut_off=True, round=self.round))
        self.answers.append(RankLost(rank, "killed", dead=True, round=self.round))
        self.answers = [
            answer for answer in self.answers if self.random.random() < 0.9 or not _from(answer, rank)
        ]

    def kill_a_source(self, assignments: Iterable[Assignment]) -> None:
        """A rank dies while it sends its layers."""
        ranks = self.standing(sorted({source.rank for each in assignments for source in each.sources}))
        if ranks:
            self.kill(self.random.choice(ranks))

    def happen(self) -> None:
        """One of the possible events."""
        draw = self.random.random()
        if draw < 0.6:
            self.commit()
        elif draw < 0.75 and self.ranks:
            victim = self.random.choice(sorted(self.ranks))
            if self.random.random() < 0.5 and victim in self.training:
                self.commit(self.random.randrange(len(self.training) + 1))
            self.kill(victim)
        elif draw < 0.80 and self.standing(self.training):
            rank = self.random.choice(self.standing(self.training))
            self.answers.append(RankLost(rank, "ValueError", round=self.round))
        elif draw < 0.92:
            self.answers.append(Room(self.random.randrange(1, 4)))
        elif draw < 0.97 and self.ranks:
            count = self.random.randrange(1, len(self.ranks) + 1)
            self.answers.append(Going(frozenset(self.random.sample(sorted(self.ranks), count)), "file"))
        elif draw < 0.985 and isinstance(self.state, Live):
            self.answers.append(SaveOrStop(Request.CHECKPOINT))
        elif isinstance(self.state, Live):
            places = self.random.randrange(max(1, self.order.elastic.min_ranks), 6)
            size = events.Scaled(
                ranks=places, spares=self.random.randrange(3), places=places, id=str(len(self.history))
            )
            self.answers.append(ScaleRequested(size))

    def take(self, stimulus: Stimulus) -> None:
        self.history.append(stimulus)
        before = self.state
        self.state, effects = handle(self.order, self.state, stimulus, tuple(self.history))
        if isinstance(before, Regrouping) and isinstance(stimulus, RankLost) and stimulus.dead:
            involved = (
                stimulus.rank in before.job.membership.members
                and stimulus.rank in before.job.membership.alive
            )
            assert not involved or not isinstance(self.state, Training), "a second failure is assessed again"
        for effect in effects:
            self.obey(effect)
        if isinstance(self.state, Training):
            intents, idle = self.state.job.intents, self.state.job.membership.idle
            if intents.asked is None and not intents.pausing:
                wanted = () if intents.change is None else intents.change.lineup
                assert self.ahead & idle <= {*wanted}, "nobody keeps copies for nothing"
                busy = intents.change is not None or intents.migration is not None or intents.stopping
                assert busy or not any(self.state.job.progress.plan.standbys), "nor do members"

    def run(self, happenings: int) -> None:
        while happenings or self.answers:
            if isinstance(self.state, Closing | JobFinished | JobFailed):
                return
            if happenings and (not self.answers or self.random.random() < 0.15):
                happenings -= 1
                if isinstance(self.state, Live):
                    self.happen()
            if self.answers:
                self.take(self.answer())

    def answer(self) -> Stimulus:
        """Any answer, except that a rank's reports come before its position, and reports of earlier
        generations come first."""
        chosen = self.random.randrange(len(self.answers))
        reports = [
            (_order(answer.report), index)
            for index, answer in enumerate(self.answers)
            if isinstance(answer, Reported)
        ]
        if reports and isinstance(self.answers[chosen], Reported | Positioned):
            oldest, _ = min(reports)
            chosen = self.random.choice([index for generation, index in reports if generation == oldest])
        return self.answers.pop(chosen)


def _order(report: Report) -> int:
    """A step's generation; a checkpoint that waiting ranks wrote comes after all their other reports."""
    if isinstance(report, StepReport):
        return report.generation
    return LAST if isinstance(report, CheckpointReport) and "gen-" in report.path else 0


def _from(answer: Stimulus, rank: int) -> bool:
    """Whether `answer` comes from `rank` and may get lost with it."""
    if isinstance(answer, Positioned):
        return answer.position.rank == rank
    return not isinstance(answer, RankLost) and getattr(answer, "rank", None) == rank
