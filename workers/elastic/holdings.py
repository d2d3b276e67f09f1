"""State that a rank holds of the step at which it stands, and offers to other ranks.

Between two generations the last copy of a layer may be among it: nothing goes before all ranks have what they need.
Knows no plan and no channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from planner.shards import Piece, Shard
from workers.commit.last_commit import LastCommit
from workers.copies.host_copies import HostCopy
from workers.copies.snapshots import Snapshots
from workers.copies.standby import Standbys
from workers.elastic.layer_source import Built, Haul, Held
from workers.layers.layer import Layer
from workers.process.host_memory import collect_objects
from workers.protocol.carried import Carried
from workers.protocol.errors import JobError
from workers.protocol.orders import Assignment, StatePart, StateSource
from workers.state.layer_state import LayerState, host_copy, whole_of
from workers.state_stream.stream import StateServer

MOST_REFUSED = 2
"""Tries in which others may find no room for a copy in host memory before this rank gives it up."""

Fetch = Callable[[Sequence[StateSource], int], dict[Piece, LayerState]]
"""Fetches states of a step from other ranks."""


def held_as(built: Built) -> Held:
    """Layers, or the shards of them that their states are."""
    return {Piece(layer, one[1].shard): one for layer, one in built.items()}


class Holdings:
    """The layers of one rank: those that it owns, its copies of others', and what is left of earlier places.

    Args:
        rank: its number.
        commit: the one whose state they are.
        warn: receives a sentence on a copy that cannot be brought up to date.
    """

    def __init__(self, rank: int, commit: LastCommit, warn: Callable[[str], None]) -> None:
        self._rank = rank
        self._commit = commit
        self._warn = warn
        self._server: StateServer | None = None
        self.layers: Built = {}
        """Layers that the rank owns."""
        self.standbys: Standbys | None = None
        """The copies that it keeps by its plan."""
        self._idle: Held = {}
        """Layers, and shards of them, that it holds without owning them, until it trains again."""
        self._on_host: dict[Piece, HostCopy] = {}
        """Copies in host memory that know the step, until it trains again."""
        self.siblings_weights_known = False
        """Whether the weights of siblings' shards with which it computes are those of the step, and may be salvaged."""
        self._salvaged: dict[Piece, LayerState] = {}
        """Weights of layers, or shards of them, whose moments are lost, until it trains with them."""
        self._mixed: frozenset[Piece] = frozenset()
        """Pieces of `layers` with other moments than those of the step, until it trains with them."""
        self.snapshots = Snapshots(self._keep_offered, self._let_go)

    @property
    def port(self) -> int:
        """The port at which it serves layers; 0 for none."""
        return self._server.port if self._server is not None else 0

    def serve_with(self, server: StateServer) -> None:
        """Offer layers through `server`, and close that in the end."""
        self._server = server

    def close(self) -> None:
        """Take no more snapshots, and serve nothing."""
        self.snapshots.stop()
        if self._server is not None:
            self._server.close()
            self._server = None

    def live(self) -> Held:
        """All layers, and shards of them, whose state is complete here, but for copies in host memory."""
        trained = self._trained
        own = {piece: one for piece, one in held_as(self.layers).items() if piece not in self._mixed}
        return {**self._idle, **({} if trained is None else trained.held()), **own}

    def on_host(self) -> dict[Piece, HostCopy]:
        """All copies in host memory that know the step, but for those that found no room to be brought up to date."""
        trained = self._trained
        held = {**self._on_host, **({} if trained is None else trained.held_on_host())}
        return {piece: one for piece, one in held.items() if one.refused < MOST_REFUSED}

    def newest(self, copy: HostCopy) -> LayerState:
        """Return the state of the step from a copy in host memory.

        Raises:
            MemoryError: there is no room to bring it up to date. This rank no longer counts on a copy that has found
                none repeatedly.
        """
        try:
            return copy.newest()
        except MemoryError as error:
            end = "tried once more" if copy.refused < MOST_REFUSED else "given up"
            self._warn(
                f"the copy of layer {copy.piece} in host memory cannot be brought up to date: {error}; it is {end}"
            )
            raise

    def weights_only(self) -> dict[Piece, LayerState]:
        """Layers, and shards of them, whose moments are not here: what came without them, and siblings' weights that
        the rank computes with."""
        if not self.siblings_weights_known:
            return self._salvaged
        siblings = [one for built in self.layers.values() for one in weights_of_siblings(*built)]
        return {Piece(one.layer, one.shard): one for one in siblings} | self._salvaged

    @property
    def _trained(self) -> Standbys | None:
        """The standbys once they have trained: before, the copies are among what is idle."""
        return self.standbys if self.standbys is not None and self.standbys.resting else None

    def of_snapshot(self, step: int) -> Held:
        """States of the snapshot of `step` that are here."""
        return {piece: (None, state) for piece, state in self.snapshots.states(step).items()}

    def pieces(self) -> tuple[Piece, ...]:
        """The layers, and shards of them, that other ranks can have from here."""
        return tuple(sorted({*self.live(), *self.on_host()}))

    def begin_try(self) -> None:
        """Begin another try to form a generation: what other ranks fetch from now on counts for it."""
        for copy in self.on_host().values():
            copy.begin_try()

    def take_up(
        self,
        layers: Built,
        standbys: Standbys,
        idle: Held,
        on_host: Mapping[Piece, HostCopy],
        salvaged: Mapping[Piece, LayerState],
        mixed: frozenset[Piece],
    ) -> None:
        """Hold what the rank follows an assignment with, in place of what it held.

        Args:
            idle: what else is here, bases of the standbys among it.
            on_host: copies in host memory.
            salvaged: weights of what lacks its moments.
            mixed: what of `layers` has other moments than those of the step.
        """
        self.layers, self.standbys = layers, standbys
        own = held_as(layers)
        self._idle = {piece: one for piece, one in idle.items() if piece not in own}
        self._on_host, self._salvaged, self._mixed = {**on_host}, {**salvaged}, mixed
        self.siblings_weights_known = False

    def switch(self, layers: Built, standbys: Standbys) -> None:
        """Hold what the rank follows another plan with, in the same generation."""
        self.layers, self.standbys = layers, standbys

    def keep(self, haul: Haul, assignment: Assignment) -> None:
        """Keep the layers that arrived although some did not: all ranks move to the assignment's step."""
        if self._commit.step != assignment.step:
            self._commit.move_to(assignment.step, assignment.carried)
        complete: Held = {piece: (None, state) for piece, state in haul.pieces.items()}
        complete |= held_as(haul.whole)
        weights = {**self._salvaged, **haul.weights}
        self._salvaged = {piece: state for piece, state in weights.items() if piece not in complete}
        self._idle |= complete

    def clear(self) -> None:
        """All ranks move to another step: what is here is of no use, and takes the memory of what comes."""
        self.layers, self._idle, self._on_host, self._salvaged = {}, {}, {}, {}
        self._mixed, self.siblings_weights_known = frozenset(), False
        self.standbys = None
        self.withdraw()
        collect_objects()

    def begin_training(self) -> None:
        """Every rank has joined, so every rank has the layers that it needs: let go of what no owner or standby
        holds, and offer nothing."""
        self._idle, self._on_host, self._salvaged, self._mixed = {}, {}, {}, frozenset()
        self.siblings_weights_known = False
        self.withdraw()

    def end_training(self) -> None:
        """Have copies apply what has come, and take no more of a snapshot."""
        if self.standbys is not None:
            self.standbys.rest()
        self.snapshots.stop()

    def offer(self) -> None:
        """Offer all layers that are complete, as they are; copies in host memory are brought up to date for whoever
        asks for them."""
        if self._server is None:
            return
        if held := self.live():
            self._server.offer(self._commit.step, [state for _, state in held.values()])
        if on_host := self.on_host():
            self._server.offer_to_make(
                self._commit.step, {piece: partial(self.newest, one) for piece, one in on_host.items()}
            )

    def offer_weights_only(self) -> None:
        """Offer the weights of what lacks its moments."""
        if self._server is not None:
            self._server.offer(self._commit.step, self.weights_only().values(), StatePart.WEIGHTS)

    def offer_bases(self, pieces: Iterable[Piece]) -> None:
        """Offer copies of those of `pieces` that it owns, as they are now."""
        if self._server is not None:
            own = held_as(self.layers)
            mine = [host_copy(own[piece][1]) for piece in pieces if piece in own]
            if mine:
                self._server.offer(self._commit.step, mine)

    def withdraw(self) -> None:
        """Offer snapshots alone."""
        if self._server is not None:
            self._server.withdraw()

    def copies(
        self,
        step: int,
        layers: Sequence[int],
        sources: Sequence[StateSource],
        fetch: Fetch,
        complete: Callable[[LayerState, LayerState | None], LayerState],
    ) -> list[LayerState]:
        """Return host copies of whole layers of `step`, at which the rank stands or of which it has a snapshot.

        Args:
            sources: of all shards of those layers of which it holds shards only.
            complete: adds the fixed parameters that a state leaves out, those of the live layer if there is one.

        Raises:
            JobError: the rank is at another step.
            MemoryError: there is no room to bring a copy in host memory up to date.
            StateStreamError: a source is gone.
        """
        held = self.of_snapshot(step)
        if self._commit.step != step and not held:
            raise JobError(
                f"rank {self._rank} stands at step {self._commit.step}: it cannot save step {step}"
            )
        if self._commit.step == step:
            on_host = {piece: one for piece, one in self.on_host().items() if piece.layer in layers}
            held |= self.live() | {piece: (None, self.newest(one)) for piece, one in on_host.items()}
        made_of = {
            layer: [one for one in sources if one.layer == layer]
            for layer in layers
            if Piece(layer) not in held
        }
        lacking = [one for parts in made_of.values() for one in parts if one.piece not in held]
        held |= {piece: (None, state) for piece, state in fetch(lacking, step).items()}
        copies = list[LayerState]()
        live = {piece.layer: state for piece, (_, state) in self.live().items() if not state.leaves_out}
        for layer in layers:
            pieces = [one.piece for one in made_of[layer]] if layer in made_of else [Piece(layer)]
            states = [held[piece][1] for piece in pieces]
            state = states[0] if len(states) == 1 else whole_of(states)
            copies.append(host_copy(complete(state, live.get(layer))))
        return copies

    def carried(self, step: int) -> Carried | None:
        """State besides layers that the step after `step` follows, where this rank knows that."""
        return self._commit.carried if self._commit.step == step else self.snapshots.carried(step)

    def _keep_offered(self, step: int, states: Iterable[LayerState]) -> None:
        if self._server is not None:
            self._server.keep(step, states)

    def _let_go(self, step: int) -> None:
        if self._server is not None:
            self._server.let_go(step)


def weights_of_siblings(layer: Layer, state: LayerState) -> list[LayerState]:
    """Shards of a layer's siblings, in the weights that a rank computes with: all that is left where these are lost.

    Without moments; none where a rank computes with fewer bits than their owners keep. They share memory with the
    layer's module, and are of the newest commit while `WeightExchange.together`.

    Args:
        state: this rank's shard of the layer; live.
    """
    shared = layer.shared
    if shared is None or any(flat.cast is not None for flat in state.flats):
        return []
    found: list[LayerState] = []
    for number, cut in enumerate(shared.cuts):
        if number == shared.number:
            continue
        weights = state.fixed
        for buffer, elements, layout in zip(shared.buffers, cut.ranges, cut.layouts, strict=True):
            weights |= layout.views(buffer[elements])
        found.append(
            LayerState(
                layer=state.layer,
                name=state.name,
                weights=weights,
                buffers=state.buffers,
                slots={},
                updates={},
                shard=Shard(number, len(shared.cuts)),
                fixed_names=state.fixed_names,
                fixed_file=state.fixed_file,
            )
        )
    return found
