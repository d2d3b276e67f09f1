"""`Plan`: what the planner proposes and the ranks execute. An immutable value; no decisions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner.codec import Packed
from planner.shards import WHOLE, Piece, Shard


class PlanError(ValueError):
    """No plan meets the request. The message says what prevents it, by how much, and what would help."""


def recomputable(layers: int) -> tuple[int, ...]:
    """The layers that recompute when every layer may: all of `layers` but the last.

    The loss keeps the last layer's outputs until its backward, so recomputing that layer costs memory.
    """
    return tuple(range(layers - 1))


class Place(NamedTuple):
    """Where a rank is in a plan. Places are numbered pipeline by pipeline: `pipeline * P + rank`."""

    pipeline: int
    rank: int
    """The pipeline rank, 0..P-1."""

    @staticmethod
    def of(number: int, pipeline_ranks: int) -> Place:
        """Return the place with this number, in pipelines of `pipeline_ranks` ranks."""
        return Place(*divmod(number, pipeline_ranks))


@dataclass(frozen=True, kw_only=True)
class Plan(Packed):
    """Cut and execution of the model from one commit on.

    Ranks here are pipeline ranks 0..P-1; places are the ranks of all pipelines, by number.
    """

    epoch: int
    """Incarnation of the controller that issued the plan; with `version` it orders plans."""
    version: int
    reason: str
    """Why this plan was chosen, as text for people."""
    layers: tuple[tuple[int, int], ...]
    """Per stage, its layers as [first, stop)."""
    stage_ranks: tuple[int, ...]
    """Per stage, the pipeline rank that holds it."""
    schedule: str
    """Family name of the registry, or `csv:PATH`."""
    chunks: int
    """Stages per rank, for the families that have a choice."""
    microbatches: int
    """Microbatches per replica in one step."""
    replicas: int
    pipelines: int | None = None
    """Copies of the pipeline that run; None: one per replica. Fewer than replicas: pipeline p executes the replicas r
    with r % pipelines == p, one after the other, with the same bits; where gradients are shared out, as
    `planner/rounds.py` says."""
    shares: tuple[int, ...] = ()
    """Microbatches that each pipeline executes in a step: at least 1 each, `replicas` x `microbatches` in all. Empty:
    each executes its own replicas. Which microbatches these are, `planner/shares.py` says; the bits are the same."""
    standbys: tuple[tuple[int, ...], ...] = ()
    """Per layer, or where states are shared out per shard of each layer (`pieces`), the numbers of the places that keep
    an up-to-date copy of its state; its owner, for whole layers that in the first pipeline, sends them its gradients.
    Empty: there are no standbys."""
    snapshots: tuple[tuple[int, ...], ...] = ()
    """Like `standbys`, per layer or shard of it, the places that fetch its whole state every `snapshot_every` steps and
    keep it in host memory, as its owner does. Empty: no snapshots are taken."""
    snapshot_every: int = 0
    """Steps from one snapshot to the next; 0 without snapshots."""
    recompute: tuple[int, ...] = ()
    """Layers whose activations are dropped after the forward pass and recomputed before the backward."""
    frozen: int = 0
    """Layers, from the input up, that every step with this plan freezes as a whole: stages of these alone have no
    backward pass, unless the schedule is a table of the user's own."""
    shard: str = "none"
    """`optimizer`: the places that hold a layer share out the states of its trained parameters, one shard each
    (`planner/shards.py`); `gradients`: and the sums of their gradients, which have an order and bits of their own
    (`planner/rounds.py`); `none`: each has all of them."""
    partition: str = ""
    """The program that cut the layers, or `explicit`; a resumed job makes a new plan if its spec names another one."""
    predicted_step_s: float | None = None
    """With nothing frozen. Set, like the next two, when the plan was simulated on a profile."""
    predicted_bubble: float | None = None
    """Mean over the ranks."""
    predicted_peak_memory_bytes: int | None = None
    """Highest peak of any rank."""

    @property
    def key(self) -> tuple[int, int]:
        """Epoch and version: ranks adopt only plans of a higher key than they follow."""
        return self.epoch, self.version

    @property
    def stages(self) -> int:
        return len(self.layers)

    @cached_property
    def pipeline_ranks(self) -> int:
        """P, the number of ranks in one replica's pipeline."""
        return max(self.stage_ranks) + 1

    @property
    def world_size(self) -> int:
        return self.pipeline_ranks * self.pipeline_count

    @property
    def pipeline_count(self) -> int:
        return self.replicas if self.pipelines is None else self.pipelines

    @property
    def shards(self) -> int:
        """Number of shards of each layer's states; 1: they are whole."""
        return 1 if self.shard == "none" else self.pipeline_count

    def shard_of_place(self, number: int) -> Shard:
        """Shard of its layers' states that the rank at this place keeps."""
        return WHOLE if self.shards == 1 else Shard(self.place(number).pipeline, self.shards)

    def pieces_of_place(self, number: int) -> tuple[Piece, ...]:
        """Pieces of its layers' states that the rank at this place keeps, ascending."""
        shard = self.shard_of_place(number)
        return tuple(Piece(layer, shard) for layer in self.layers_of_place(number))

    @property
    def windows(self) -> int:
        """The most replicas that one pipeline executes one after the other."""
        return -(-self.replicas // self.pipeline_count)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(stop - first for first, stop in self.layers)

    def place(self, number: int) -> Place:
        """Return the place with this number."""
        return Place.of(number, self.pipeline_ranks)

    def siblings(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the places at pipeline rank `rank`, one in each pipeline."""
        return tuple(range(rank, self.world_size, self.pipeline_ranks))

    def unlike_siblings(self, rank: int) -> tuple[int, ...]:
        """Siblings that keep different states: with shards all, else one for all."""
        return self.siblings(rank) if self.shards > 1 else (rank,)

    @property
    def unlike_places(self) -> int:
        """Number of places that keep different states: with shards all, else those of one pipeline."""
        return self.world_size if self.shards > 1 else self.pipeline_ranks

    def owners_of(self, layer: int) -> tuple[int, ...]:
        """The places that own `layer`, one in each pipeline."""
        return self.siblings(self.rank_of_layer(layer))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All layers, or all shards of each: in order of layer and number."""
        of = self.shards
        return tuple(
            Piece(layer, Shard(number, of)) for layer in range(self.layers[-1][1]) for number in range(of)
        )

    @property
    def copied(self) -> tuple[tuple[Piece, tuple[int, ...]], ...]:
        """Each of `pieces` with the places that keep a copy of it; empty without standbys."""
        return tuple(zip(self.pieces, self.standbys, strict=True)) if self.standbys else ()

    @property
    def kept(self) -> tuple[tuple[Piece, tuple[int, ...]], ...]:
        """Each of `pieces` with the places that fetch snapshots of it; empty without snapshots."""
        return tuple(zip(self.pieces, self.snapshots, strict=True)) if self.snapshots else ()

    def snapshots_at(self, place: int) -> tuple[Piece, ...]:
        """Pieces that `place` fetches snapshots of, ascending."""
        return tuple(piece for piece, places in self.kept if place in places)

    def owner_of(self, piece: Piece) -> int:
        """The place that owns a piece of this plan and sends its gradients to the copies; of a whole layer, that in the
        first pipeline."""
        return self.siblings(self.rank_of_layer(piece.layer))[piece.shard.number]

    def holders_of(self, piece: Piece) -> tuple[int, ...]:
        """The places that own a piece of this plan: one, or of a whole layer one in each pipeline."""
        return self.owners_of(piece.layer) if self.shards == 1 else (self.owner_of(piece),)

    def copies_of(self, layer: int) -> tuple[int, ...]:
        """The places that keep a copy of `layer`, or of a shard of it, beside its owners."""
        first = layer * self.shards
        copies = self.standbys[first : first + self.shards]
        return (
            copies[0] if len(copies) == 1 else tuple(sorted({place for places in copies for place in places}))
        )

    def copies_of_piece(self, piece: Piece) -> tuple[int, ...]:
        """The places that keep a copy of a piece of this plan."""
        return self.standbys[piece.layer * self.shards + piece.shard.number] if self.standbys else ()

    def standbys_of(self, place: int) -> tuple[int, ...]:
        """The layers of which `place` keeps a copy, whole or of shards, ascending."""
        return tuple(dict.fromkeys(piece.layer for piece in self.copies_at(place)))

    def copies_at(self, place: int) -> tuple[Piece, ...]:
        """Pieces that `place` keeps copies of, ascending."""
        return tuple(piece for piece, places in self.copied if place in places)

    def layers_of_place(self, number: int) -> tuple[int, ...]:
        """The layers that the rank at this place owns, ascending."""
        return self.layers_of_rank(self.place(number).rank)

    def layers_of_rank(self, rank: int) -> tuple[int, ...]:
        """The layers that pipeline rank `rank` holds, ascending."""
        return self._layers_by_rank.get(rank, ())

    @cached_property
    def _layers_by_rank(self) -> dict[int, tuple[int, ...]]:
        held: dict[int, tuple[int, ...]] = {}
        for (first, stop), owner in zip(self.layers, self.stage_ranks, strict=True):
            held[owner] = (*held.get(owner, ()), *range(first, stop))
        return held

    def stage_of_layer(self, layer: int) -> int:
        return self._stage_by_layer[layer]

    @cached_property
    def _stage_by_layer(self) -> dict[int, int]:
        return {
            layer: stage for stage, (first, stop) in enumerate(self.layers) for layer in range(first, stop)
        }

    def rank_of_layer(self, layer: int) -> int:
        """The pipeline rank that holds `layer`."""
        return self.stage_ranks[self.stage_of_layer(layer)]

    def same_work_as(self, other: Plan) -> bool:
        """Whether the ranks own the same layers and have the same shares under both, whatever copies they keep."""
        mine, theirs = ((p.layers, p.stage_ranks, p.shares) for p in (self, other))
        return mine == theirs


def undone_steps(every: int, steps: int) -> int:
    """The most committed steps that a lost rank undoes, where a snapshot begins every `every` steps, or once the one
    before is complete, and takes `steps`: it is lost just before the next one is complete."""
    return max(every, steps) + steps - 1
