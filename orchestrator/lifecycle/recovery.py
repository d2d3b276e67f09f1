"""The decision after a generation has ended: recover, pause or abort. Pure.

Decides the step, finds which ranks hold which layers, and says which ranks continue from which step, or why
none can. Knows no cluster, no clock and no planner: the ranks get their plan afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from planner.plan import Plan
from planner.shards import WHOLE, Piece, made_of, made_with_weights
from planner.wording import counted, named, named_or_counted
from workers.config import ElasticConfig
from workers.protocol.carried import Carried
from workers.protocol.orders import CheckpointRef, CommitOutcome, StatePart, StateSource
from workers.protocol.reports import RankPosition, SnapshotHeld

PACKED = "for the layers that are trained now"
"""Reason of a plan whose layout follows the frozen prefix."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Facts known once every rank has reported its position or is dead."""

    plan: Plan
    """The plan that the generation followed."""
    members: tuple[int, ...]
    """Ranks of the generation that ended, by place."""
    positions: Mapping[int, RankPosition]
    """Positions of all living ranks, idle ones included; the others are dead."""
    tried: frozenset[int] = frozenset()
    """Ranks that were to be members since then: they may hold layers of it, too."""
    going: frozenset[int] = frozenset()
    """Draining ranks: they may still send layers and take no place any more."""
    step: int = 0
    """The last step that was reported."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """Newest first."""
    wanted: int = 1
    """Number of ranks that the job is to have."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    lineup: tuple[int, ...] = ()
    """The ranks for which the next plan was made beforehand, by place; empty: none was."""
    asked: str | None = None
    """Why the generation was asked to end; None: it failed, or the next one failed to form."""
    trouble: str = ""
    """First failure, in words."""
    short: bool = False
    """Whether a rank ran out of memory: it needs a smaller plan."""
    failures: int = 0
    """Number of earlier failures with no step committed beyond `failed_at`, whichever rank failed."""
    failed_at: int = -1
    trained: bool = True
    """Whether the generation had formed."""
    interrupted: bool = False
    """Whether a step was in flight when the job began to wait for ranks; it still waits."""
    packs: bool = False
    """Whether plans count on the layers that are frozen as a whole."""

    @property
    def lost(self) -> tuple[int, ...]:
        """Members that are dead, by place."""
        return tuple(rank for rank in self.members if rank not in self.positions)

    @cached_property
    def holders(self) -> Mapping[int, RankPosition]:
        """The ranks that may hold valid layers: other ranks' layers are outdated or rolled back."""
        return {
            rank: position
            for rank, position in sorted(self.positions.items())
            if rank in self.members or rank in self.tried
        }

    @cached_property
    def attainable(self) -> tuple[int, ...]:
        """The steps at which ranks stand, newest first."""
        return tuple(sorted({position.step for position in self.holders.values()}, reverse=True)) or (0,)

    @cached_property
    def handovers(self) -> Mapping[int, Handover]:
        """Step -> who sends whom the records of its commit, if a living rank has them and another one needs them."""
        found: dict[int, Handover] = {}
        for rank, position in self.holders.items():
            step, sha256 = position.step, position.vector_sha256
            lacking = frozenset(each for each, other in self.holders.items() if other.undecided == step)
            if lacking and sha256 is not None and step not in found:
                found[step] = Handover(holder=rank, vector_sha256=sha256, lacking=lacking)
        return found

    def current(self, step: int) -> tuple[int, ...]:
        """The ranks that stand at `step`, or will once they get its records."""
        lacking = self.handovers[step].lacking if step in self.handovers else frozenset[int]()
        return tuple(
            rank for rank, position in self.holders.items() if position.step == step or rank in lacking
        )


@dataclass(frozen=True, kw_only=True)
class Handover:
    """The records of a commit, which some ranks lack: one that has them sends them, for all."""

    holder: int
    """The rank that sends them."""
    vector_sha256: str
    """Their digest."""
    lacking: frozenset[int]
    """Ranks that are undecided, and get them."""


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """Instructions for forming the next generation."""

    cause: str
    """Cause, as in `events.Regrouped`; `start` for the job's first generation."""
    reason: str
    lineup: tuple[int, ...]
    """Ranks for its places, in that order; the plan may take fewer, from the front."""
    step: int
    """Steps committed when it begins."""
    finishing: frozenset[int] = frozenset()
    """Ranks that get `commit_outcome`."""
    commit_outcome: CommitOutcome | None = None
    """Without records: those come by `handover`."""
    handover: Handover | None = None
    """None: no rank needs the records of `commit_outcome.step`, or none has them."""
    sources: tuple[StateSource, ...] = ()
    """One per layer, or per shard of it, if the living ranks hold the model, as it is or in a snapshot; none if it is
    loaded or initialized again."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """To start from, newest first; if one is damaged, the next is tried."""
    moments: tuple[CheckpointRef, ...] = ()
    """The same, for the optimizer moments of layers, or shards, of which only the weights are left."""
    held: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    """Rank -> layers, or shards of them, whose state of `step` it has."""
    keep_plan: bool = False
    """The ranks, their places and the plan stay the same."""
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    rerun: int = 0
    reached: int = 0
    """Steps that were committed before; those beyond `step` are lost."""
    failures: int = 0
    """Number of failures with no new step committed, this one included."""
    carried: Carried | None = None
    """State besides layers that the step after `step` follows, as the living ranks know it."""

    @property
    def goes_on(self) -> bool:
        """Whether the living ranks hold the model as the newest commit left it."""
        return bool(self.sources) and self.step >= self.reached

    @property
    def goes_back(self) -> bool:
        """Whether they hold it as an earlier one did, in a snapshot or since an attempt to go back: the steps after it
        are lost."""
        return bool(self.sources) and self.step < self.reached


@dataclass(frozen=True, kw_only=True)
class Rescue:
    """A checkpoint of state that only the ranks hold, to be written before they may fail."""

    step: int
    finishing: frozenset[int]
    """Ranks that get `commit_outcome`."""
    commit_outcome: CommitOutcome
    layers: Mapping[int, tuple[int, ...]]
    """Rank -> layers that it writes; each layer once."""
    sources: tuple[StateSource, ...] = ()
    """Sources of all shards of the layers that no rank has in one piece."""
    handover: Handover | None = None
    """Handover, as in `RecoveryPlan`."""


@dataclass(frozen=True, kw_only=True)
class PauseDecided:
    """Too few ranks are left: wait for more."""

    reason: str
    step: int
    rescue: Rescue | None = None
    """None: the newest checkpoint has all that is left."""
    interrupted: bool = False
    """A step was in flight."""
    failures: int = 0
    """Number of failures with no new step committed, this one included."""


@dataclass(frozen=True, kw_only=True)
class Abort:
    """The job cannot go on."""

    reason: str
    rescue: Rescue | None = None


def decide(now: Situation) -> RecoveryPlan | PauseDecided | Abort:
    """Return what to do, with a reason for people."""
    elastic, lost = now.elastic, now.lost
    if (odd := _disagreement(now)) is not None:
        return Abort(reason=odd)
    newest = now.checkpoints[0].step if now.checkpoints else 0
    # A checkpoint may be known before its steps are.
    reached = max(now.step, newest, *now.attainable)
    before = now.failures if reached <= now.failed_at else 0
    # A shortage of memory leads to a smaller plan, until none fits: it is no failure that may recur for ever.
    failures = before + (now.asked is None and not now.short)
    held, salvaged = _held(now), False
    meeting = now.attainable[0] if held is None else held
    if redundancy(elastic, now.plan) == "none" and now.asked is None:
        return Abort(
            reason=f'{now.trouble}; elastic.redundancy = "none" ends the job then',
            rescue=_rescue(now, held, meeting, newest),
        )
    if failures >= elastic.attempts:
        return Abort(
            reason=f"{now.trouble}; {counted(failures, 'failure')} with no step committed beyond step"
            f" {max(reached, now.failed_at)} (elastic.attempts = {elastic.attempts})",
            rescue=_rescue(now, held, meeting, newest),
        )
    lineup = _lineup(now)
    if len(lineup) < elastic.min_ranks:
        short = f"{counted(len(lineup), 'rank')} left, and elastic.min_ranks = {elastic.min_ranks}"
        why = f"{now.trouble}: {short}" if now.trouble else short
        rescue = _rescue(now, held, meeting, newest)
        if elastic.wait_s == 0:
            return Abort(reason=f"{why}; elastic.wait_s = 0 waits for no others", rescue=rescue)
        interrupted = _interrupted(now, meeting)
        step = reached if rescue is None or held is not None else rescue.step
        if step < reached:
            why = f"{why}; back to the snapshot of step {step}, which costs {counted(reached - step, 'committed step')}"
        return PauseDecided(reason=why, step=step, rescue=rescue, interrupted=interrupted, failures=failures)
    if (held is None or held < newest) and elastic.salvage == "weights":
        left = _held(now, weights=True)
        if left is not None and left > newest:
            held, meeting, salvaged = left, left, True
    at_hand = held is not None and held >= newest
    kept = None if at_hand else _snapshot(now, newest)
    step = meeting if at_hand else newest if kept is None else kept.step
    joined = tuple(rank for rank in lineup if rank not in now.members)
    gone = tuple(rank for rank in now.members if rank not in lineup)
    has = _live(now, step) if at_hand else kept
    sources = () if has is None else _sources(now, has)
    return RecoveryPlan(
        cause="loss" if lost else now.asked or ("memory" if now.short else "retry"),
        reason=_reason(now, lineup, step, reached, sources, snapshot=has is not None and has is kept),
        lineup=lineup,
        step=step,
        finishing=frozenset(now.current(meeting)),
        commit_outcome=CommitOutcome(step=meeting, reported=now.step),
        handover=now.handovers.get(meeting),
        sources=sources,
        checkpoints=() if has is not None else now.checkpoints,
        moments=now.checkpoints if salvaged else (),
        held={} if has is None else has.pieces,
        keep_plan=lineup == now.members
        and not now.short
        and now.asked not in ("pack", "scale")
        # Fewer layers may be frozen in an earlier step.
        and not (now.packs and step < reached)
        and now.plan.frozen <= _frozen_after(now.plan, has, back=step < reached),
        lost=gone,
        joined=joined,
        rerun=1 if _interrupted(now, meeting) else 0,
        reached=reached,
        failures=failures,
        carried=None if has is None else has.carried,
    )


def _frozen_after(plan: Plan, has: _Holdings | None, *, back: bool) -> int:
    """Layers that the next step freezes, as ranks that hold the model know it; else no fewer than `plan` counts on, if
    the job does not go back."""
    if has is not None and has.carried is not None:
        return has.carried.prefix.layers
    return 0 if back else plan.frozen


@dataclass(frozen=True, kw_only=True)
class _Holdings:
    """Holdings of the living ranks at one step: the model as it is, or a snapshot."""

    step: int
    pieces: Mapping[int, tuple[Piece, ...]]
    """Rank -> layers, or shards of them."""
    weights: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    """Rank -> layers, or shards of them, of which it has only the weights."""
    carried: Carried | None = None


def _live(now: Situation, step: int) -> _Holdings:
    """Live holdings of the ranks that stand at `step`, or will once they get its records."""
    current = now.current(step)
    known = (position.carried for position in now.holders.values() if position.step == step)
    return _Holdings(
        step=step,
        pieces={rank: now.positions[rank].holds for rank in current},
        weights={rank: _weights(now.positions[rank], step) for rank in current},
        carried=next((carried for carried in known if carried is not None), None),
    )


def _snapshot(now: Situation, newest: int) -> _Holdings | None:
    """The newest snapshot, not older than the `newest` checkpoint, of which the living ranks together have every layer;
    None: there is none."""
    kept: dict[int, dict[int, SnapshotHeld]] = {}
    for rank in now.members:
        for one in now.positions[rank].snapshots if rank in now.positions else ():
            kept.setdefault(one.step, {})[rank] = one
    for step, by_rank in sorted(kept.items(), reverse=True):
        everywhere = _by_layer(piece for one in by_rank.values() for piece in one.pieces)
        whole = all(made_of(layer, everywhere.get(layer, set())) for layer in range(_layers(now.plan)))
        if whole and step >= max(newest, 1):
            known = (one.carried for one in by_rank.values())
            return _Holdings(
                step=step,
                pieces={rank: one.pieces for rank, one in by_rank.items()},
                carried=next((carried for carried in known if carried is not None), None),
            )
    return None


def _interrupted(now: Situation, meeting: int) -> bool:
    """Whether a step was in flight and must run again."""
    # If a rank has yet to apply the commit of `meeting`, the step after it had hardly begun.
    under_way = any(position.began > meeting for position in now.holders.values())
    return now.interrupted or (under_way and meeting not in now.handovers)


def _rescue(now: Situation, held: int | None, meeting: int, newest: int) -> Rescue | None:
    """Return what to write of step `held`, or of the newest snapshot, if it is beyond the `newest` checkpoint."""
    has = None if held is None or held <= newest else _live(now, held)
    if has is None and held is None:
        has = _snapshot(now, newest + 1)
    if has is None:
        return None
    commit_outcome = CommitOutcome(step=meeting, reported=now.step)
    finishing = frozenset(now.current(meeting))
    return rescue(has.step, finishing, commit_outcome, _sources(now, has), now.handovers.get(meeting))


def rescue(
    step: int,
    finishing: frozenset[int],
    commit_outcome: CommitOutcome,
    sources: Iterable[StateSource],
    handover: Handover | None = None,
) -> Rescue:
    """Return the rescue in which each layer's source writes it; of a layer in shards, that of one of them, in turns."""
    shards = tuple(source for source in sources if source.shard != WHOLE)
    layers: dict[int, tuple[int, ...]] = {}
    for source in sources:
        if source.shard.number == source.layer % source.shard.of:
            layers[source.rank] = (*layers.get(source.rank, ()), source.layer)
    return Rescue(
        step=step,
        finishing=finishing,
        commit_outcome=commit_outcome,
        layers=layers,
        sources=shards,
        handover=handover,
    )


def redundancy(elastic: ElasticConfig, plan: Plan) -> str:
    """`elastic.redundancy`, with its default filled in."""
    return elastic.redundancy or ("peer" if plan.world_size > 1 else "checkpoint")


def _lineup(now: Situation) -> tuple[int, ...]:
    """Return the ranks by place: those for which there is a plan already, if they all live."""
    if now.lineup and now.positions.keys() >= set(now.lineup):
        return now.lineup
    return lineup_of(now.members, now.positions.keys(), now.going, now.wanted)


def lineup_of(
    members: Sequence[int], alive: Collection[int], going: Collection[int], wanted: int
) -> tuple[int, ...]:
    """Return the next ranks by place: staying ranks keep their order, new ones fill gaps, then follow.

    Args:
        members: the present ranks, by place.
        alive: all ranks that are up.
        going: those that leave.
        wanted: how many there are to be.
    """
    fresh = sorted(rank for rank in alive if rank not in members and rank not in going)
    staying = [rank for rank in members if rank in alive and rank not in going][:wanted]
    room = max(0, wanted - len(staying))
    fresh = fresh[:room]
    places: list[int] = []
    for rank in members:
        if rank in staying:
            places.append(rank)
        elif fresh:
            places.append(fresh.pop(0))
    return (*places, *fresh)


def _disagreement(now: Situation) -> str | None:
    """Say which ranks hold other records of one commit than others do. They would have updated their layers
    differently, so none of them can be trusted."""
    known: dict[int, tuple[int, str]] = {}
    for rank, position in now.holders.items():
        if position.vector_sha256 is None:
            continue
        other, sha256 = known.setdefault(position.step, (rank, position.vector_sha256))
        if sha256 != position.vector_sha256:
            newest = now.checkpoints[0].step if now.checkpoints else 0
            way_out = (
                f"--resume goes on from the checkpoint of step {newest}"
                if newest
                else "there is no checkpoint: start the job again with the same spec"
            )
            return (
                f"ranks {other} and {rank} hold different records of the commit of step {position.step}"
                f" ({sha256[:12]} and {position.vector_sha256[:12]}), so their layers may differ; {way_out}"
            )
    return None


def _held(now: Situation, *, weights: bool = False) -> int | None:
    """Return the newest step of which the living ranks hold every layer.

    Args:
        weights: the weights alone of a layer, or of some of its shards, suffice.
    """
    for step in now.attainable:
        if not _missing(now, step, weights=weights):
            return step
    return None


def _missing(now: Situation, step: int, *, weights: bool = False) -> tuple[int, ...]:
    """Return the layers of which no living rank holds the state of `step`."""
    current = [now.positions[rank] for rank in now.current(step)]
    there = _by_layer(
        piece
        for position in current
        for piece in (*position.holds, *(_weights(position, step) if weights else ()))
    )
    return tuple(layer for layer in range(_layers(now.plan)) if not made_of(layer, there.get(layer, set())))


def _weights(position: RankPosition, step: int) -> tuple[Piece, ...]:
    """Pieces of which a rank at `step`, now or soon, has only the weights: an undecided rank rolls none forward."""
    return position.weights if position.step == step else ()


def _by_layer(pieces: Iterable[Piece]) -> dict[int, set[Piece]]:
    found: dict[int, set[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.layer, set()).add(piece)
    return found


def _sources(now: Situation, has: _Holdings) -> tuple[StateSource, ...]:
    """Return the source of each layer, or of each shard of it: its owner, else a standby, the one that sends the fewest
    so far. If no rank has all of one, a rank that has its weights."""
    given = dict.fromkeys(has.pieces, 0)
    owned = {
        rank: set(now.plan.pieces_of_place(place)) for place, rank in enumerate(now.members) if rank in given
    }
    held = {rank: {*pieces} for rank, pieces in has.pieces.items()}
    everywhere = _by_layer(piece for pieces in held.values() for piece in pieces)
    sources: list[StateSource] = []

    def give(piece: Piece, holders: Sequence[int], part: StatePart) -> None:
        giver = min(holders, key=lambda rank: (piece not in owned.get(rank, ()), given[rank], rank))
        given[giver] += 1
        host, port = now.positions[giver].host, now.positions[giver].port
        source = StateSource(
            layer=piece.layer, shard=piece.shard, rank=giver, host=host, port=port, part=part
        )
        sources.append(source)

    left = _by_layer(piece for pieces in has.weights.values() for piece in pieces)
    for layer in range(_layers(now.plan)):
        complete = everywhere.get(layer, set())
        for piece in made_with_weights(layer, complete, left.get(layer, set())):
            if piece in complete:
                give(piece, [rank for rank in given if piece in held[rank]], StatePart.ALL)
            else:
                give(piece, [rank for rank in given if piece in has.weights.get(rank, ())], StatePart.WEIGHTS)
    return tuple(sources)


def _layers(plan: Plan) -> int:
    return plan.layers[-1][1]


def reason_of(members: Sequence[int], lineup: Sequence[int], alive: Collection[int]) -> str:
    """Say in words which ranks go, come in and go on."""
    said = []
    if gone := tuple(rank for rank in members if rank in alive and rank not in lineup):
        said.append(f"{named_or_counted('rank', gone)} {'goes' if len(gone) == 1 else 'go'}")
    if joined := tuple(rank for rank in lineup if rank not in members):
        said.append(f"{named_or_counted('rank', joined)} {'comes' if len(joined) == 1 else 'come'} in")
    goes_on = f"{counted(len(lineup), 'rank')} {'goes' if len(lineup) == 1 else 'go'} on"
    if tuple(lineup) == tuple(members):
        said.append(f"the same {goes_on}")
    else:
        said.append(f"{goes_on} where there were {len(members)}")
    return "; ".join(said)


def _reason(
    now: Situation,
    lineup: tuple[int, ...],
    step: int,
    reached: int,
    sources: Sequence[StateSource],
    snapshot: bool,
) -> str:
    """The decision in words.

    Args:
        sources: none: the model is loaded or initialized again.
        snapshot: they are of a snapshot.
    """
    if now.asked == "resume":
        return f"resumed from the checkpoint of step {step} on {counted(len(lineup), 'rank')}"
    said = []
    if now.trouble:
        said.append(now.trouble)
    packs = now.asked == "pack"
    said.append(PACKED if packs else reason_of(now.members, lineup, now.positions.keys()))
    lost = [source for source in sources if source.part is StatePart.WEIGHTS]
    if (not sources or step < reached) and now.trained:
        missing = named("layer", _missing(now, now.attainable[0]))
        if sources and not snapshot:
            where = f"step {step}, the newest of which all {'weights are' if lost else 'is'} left"
        else:
            where = (
                f"the {'snapshot' if snapshot else 'checkpoint'} of step {step}" if step else "the beginning"
            )
        lacking = f"no remaining rank holds {missing}: " if missing else ""
        said.append(f"{lacking}back to {where}, which costs {counted(reached - step, 'committed step')}")
    if lost:
        newest = now.checkpoints[0].step if now.checkpoints else 0
        moments = f"with the moments of the checkpoint of step {newest}" if newest else "with fresh moments"
        shards = "" if all(source.shard == WHOLE for source in lost) else "shards of "
        layers = named("layer", sorted({source.layer for source in lost}))
        said.append(
            f"only the weights are left of {shards}{layers}: training continues {moments}, and ends with"
            ' other bits than without the failure (elastic.salvage = "weights")'
        )
    return "; ".join(said)
