"""Messages from the controller to ranks. Dataclasses, no logic, no torch: any process can read them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.codec import Packed
from planner.freezing import FreezePlan
from planner.plan import Plan
from planner.rank_program import RankProgram
from planner.shards import WHOLE, Piece, Shard
from workers.protocol.carried import Carried


class Request(StrEnum):
    """Request that the controller puts into a rank's mailbox. It travels in the next commit vector, so that all ranks
    act on it at the same commit; one rank's mailbox is enough."""

    CHECKPOINT = "checkpoint"
    """Write a checkpoint of the step being committed, and continue."""
    STOP = "stop"
    """Stop after the step being committed, with a checkpoint."""
    REGROUP = "regroup"
    """Leave the generation after the step being committed, so that a new one can form."""
    RESCUE = "rescue"
    """Write a checkpoint of the step being committed, whole before the next step begins, and continue: the cluster's
    head is lost. Ranks ask each other for it, not the controller."""


class StatePart(StrEnum):
    """A part of a layer's state."""

    ALL = "all"
    WEIGHTS = "weights"
    """Weights and buffers: what the layer computes with."""
    MOMENTS = "moments"
    """The rest: the state of the optimizer and of freezing."""


@dataclass(frozen=True, kw_only=True)
class Generation(Packed):
    """One membership of the process group."""

    number: int
    epoch: int
    """Number of the controller incarnation that formed it."""
    members: tuple[int, ...]
    """Ranks by place. A rank's number identifies its process and is never reused. Its place, from 0, is its
    position in this generation: pipeline * P + pipeline rank."""
    store_host: str
    store_port: int
    timeout_s: float
    """Timeout of a collective or a receive."""


@dataclass(frozen=True, kw_only=True)
class CommitOutcome:
    """The outcome of the commit in which a generation ended; all its surviving ranks get the same step."""

    step: int
    """The step from which all ranks continue."""
    vector: tuple[bytes, ...] | None = None
    """All ranks' records of the commit of `step`, for a rank that is undecided. None: it rolls back."""
    reported: int
    """The newest step reported to the controller. Later steps are reported again: the first rank may have
    died before reporting them."""


@dataclass(frozen=True, kw_only=True)
class StateSource:
    """Where a layer's state can be fetched."""

    layer: int
    rank: int
    host: str
    port: int
    part: StatePart = StatePart.ALL
    """The part that can be fetched."""
    shard: Shard = WHOLE
    """Shard of the layer's states."""

    @property
    def piece(self) -> Piece:
        return Piece(self.layer, self.shard)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A rank's part in its next generation.

    It takes the state of each layer that it owns by `plan` from `start`, if given. Otherwise it uses what it
    holds, fetches missing layers from `sources`, or, before the first step, uses the initial values.
    """

    place: int
    """pipeline * P + pipeline rank."""
    plan: Plan
    program: RankProgram
    step: int = 0
    """Steps committed at the start of the generation."""
    start: CheckpointRef | None = None
    """The checkpoint of `step` from which all ranks start."""
    sources: tuple[StateSource, ...] = ()
    """Sources of the layers that it owns by `plan`, and of those of which only weights are left. Where a layer's states
    are in shards, of all of them."""
    moments: CheckpointRef | None = None
    """The checkpoint with the moments of layers, or shards, whose sources have only the weights; None: initial
    values."""
    freeze: tuple[FreezePlan, ...] = ()
    """Freeze plans with known starts; later ones are adopted only after the last of them."""
    carried: Carried | None = None
    """State besides layers that the next step follows, where no checkpoint holds it."""
    fresh: bool = False
    """It took no part in the generation before: a snapshot that it has may be of a step that was undone since."""

    @property
    def salvaged(self) -> frozenset[Piece]:
        """Layers, or shards of them, whose moments are lost."""
        return frozenset(source.piece for source in self.sources if source.part is StatePart.WEIGHTS)

    def offered_for(self, piece: Piece) -> tuple[Piece, ...]:
        """Offered pieces of which a rank makes `piece`: itself, or all of its layer, which was cut otherwise."""
        offered = dict.fromkeys(source.piece for source in self.sources if source.layer == piece.layer)
        return (piece,) if piece in offered else tuple(offered)


@dataclass(frozen=True, kw_only=True)
class CopyAhead:
    """Layers that a rank without a place is to copy while the others train: it reports `CopiedAhead`, and finds them
    at hand when it follows its assignment. Without sources, it lets go of what it has copied and built."""

    epoch: int
    """Epoch of the controller, in which `change` is the number of the planned change, or of the order to let go."""
    change: int
    generation: int
    """The one that trains now: the copies are of no use after another one has formed."""
    sources: tuple[StateSource, ...]
    """Owner of each layer."""
    building: tuple[Piece, ...] = ()
    """Layers, or shards, that come without modules: the rank builds those beforehand."""
    freeze: tuple[FreezePlan, ...] = ()
    """Freeze plans with known starts."""
    patience_s: float
    """Seconds that the rank keeps copies up to date for a change that does not come."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A checkpoint to start from."""

    path: str
    step: int
