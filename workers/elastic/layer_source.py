"""Where a rank's layers come from: built new, from a checkpoint, or from another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.shards import WHOLE, Piece, Shard
from workers.build import build_layers, sibling_shard
from workers.checkpoint.folder import read_layer, read_manifest
from workers.checkpoint.initial_weights import read_fixed, read_weights
from workers.commit.unfinished import Greeting
from workers.config import WorkerConfig
from workers.copies.standby import Base
from workers.devices.device import Device
from workers.fault_injection.points import FaultPhase, FaultPoints
from workers.freezing.freezer import begin_statistics
from workers.freezing.plans import FreezePlans, FreezeSettings
from workers.layers.compiler import Compiler
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.models.definition import ModelDefinition
from workers.models.registry import build_definition
from workers.protocol.errors import JobError, StateStreamError
from workers.protocol.orders import Assignment, CheckpointRef, StatePart, StateSource
from workers.state.layer_state import (
    FixedDiffers,
    LayerState,
    apart,
    load_,
    part_of,
    united,
    whole_of,
    with_fixed_of,
    without_module,
)
from workers.state.optim import Optimizer
from workers.state_stream.stream import fetch

Built = dict[int, tuple[Layer, LayerState]]
"""Layer number -> layer and its live state."""

Held = dict[Piece, tuple[Layer | None, LayerState]]
"""Layer, or shard of it -> its state, and if that is live the layer that computes with it."""


def base_of(built: tuple[Layer, LayerState], *, on_host: bool = False) -> Base:
    """Base of a new copy. That of a shard, or one in host memory, has no module: it is built again if the copy comes to
    own its layer.

    Args:
        on_host: `built` is in host memory, and nobody else uses it.
    """
    if built[1].shard != WHOLE:
        return None, apart(built[1])
    return (None, without_module(built[1])) if on_host else built


FETCH_WAIT_S = 30.0
"""Seconds, at most, until a source offers a layer: the request for it may reach the source later."""

AT_ONCE = 8
"""Layers fetched at a time."""


@dataclass
class Haul:
    """The fetched state that has arrived, even if some of it did not."""

    whole: Built = field(default_factory=dict)
    """Complete layers, or complete shards of the number that this rank keeps."""
    pieces: dict[Piece, LayerState] = field(default_factory=dict)
    """Complete shards as they arrived, of which layers are put together."""
    weights: dict[Piece, LayerState] = field(default_factory=dict)
    """The weights of layers, or shards, where they arrived before the moments; includes those that are complete by
    now."""


class LayerSource:
    """Builds layers and loads their state.

    Args:
        secret: the job's, with which ranks authenticate each other.
        faults: the fault injections armed on this rank.
        compiler: compiles the layers, if the job wants that.
    """

    def __init__(
        self,
        config: WorkerConfig,
        definition: ModelDefinition,
        device: Device,
        optimizer: Optimizer,
        secret: bytes,
        faults: FaultPoints,
        compiler: Compiler | None = None,
    ) -> None:
        self._config = config
        self._definition = definition
        self._device = device
        self._optimizer = optimizer
        self._secret = secret
        self._faults = faults
        self._compiler = compiler
        self._freeze = FreezeSettings(config.freeze, FreezePlans())
        self._shard = WHOLE
        self._stopped = threading.Event()
        self._ahead: Built = {}
        """Layers of this rank's shards that were built beforehand; their values are of no step."""
        self._taken: Built = {}
        """Layers built ahead that `build` has returned, as long as nobody else keeps them."""
        self._ahead_workspace = Workspace()

    def initial(self, layers: Iterable[int], shard: Shard | None = None, *, on_host: bool = False) -> Built:
        """Return layers as they are before the first step: from `model.weights`, or random.

        Args:
            shard: of them; None: that which this rank keeps, as below.
            on_host: in host memory, also where this rank computes on a GPU; as below.

        Raises:
            JobError: the file does not hold these layers.
        """
        built = self._built(layers, shard, on_host=on_host)
        if self._config.model.weights is not None:
            read_weights(self._config.model.weights, [state for _, state in built.values()])
        return self._with_statistics(built, 0)

    def build(
        self,
        layers: Iterable[int],
        step: int,
        shard: Shard | None = None,
        *,
        beside_training: bool = False,
        on_host: bool = False,
    ) -> Built:
        """Build layers whose values come from elsewhere, or take those that were built ahead. Their fixed parameters
        have their values.

        Args:
            step: the last step committed in those values.
            beside_training: this rank trains meanwhile.
        """
        wanted, there = [*layers], dict[int, tuple[Layer, LayerState]]()
        if shard in (None, self._shard) and not (beside_training or on_host):
            there = {layer: self._ahead.pop(layer) for layer in wanted if layer in self._ahead}
            self._taken |= there
        lacking = [layer for layer in wanted if layer not in there]
        how: dict[str, Any] = {"beside_training": beside_training, "on_host": on_host}
        try:
            built = there | self._built(lacking, shard, **how)
        except JobError:
            if self._config.model.without_files() == self._config.model:
                raise
            # The files of weights may be gone by now: what their values were, the layers' owners have.
            built = there | self._built(lacking, shard, **how, from_files=False)
        return self._with_statistics(built, step)

    def _built(
        self,
        layers: Iterable[int],
        shard: Shard | None = None,
        *,
        beside_training: bool = False,
        on_host: bool = False,
        workspace: Workspace | None = None,
        from_files: bool = True,
    ) -> Built:
        model = self._config.model if from_files else self._config.model.without_files()
        definition = (
            self._definition if from_files else build_definition(model, getattr(model, "vocabulary", None))
        )
        built = build_layers(
            definition,
            layers,
            seed=self._config.job.seed,
            precision=self._config.job.precision,
            device=torch.device("cpu") if on_host else self._device.torch_device,
            optimizer=self._optimizer,
            beside_training=beside_training,
            shard=shard or self._shard,
            workspace=workspace,
        )
        if self._compiler is not None and not on_host:
            self._compiler.compile([layer for layer, _ in built.values()])
        if (path := model.weights) is not None:
            read_fixed(path, [state for _, state in built.values()])
        return built

    def _with_statistics(self, built: Built, step: int) -> Built:
        freeze = self._freeze.at(step + 1)
        for _, state in built.values():
            begin_statistics(freeze, state)
        return built

    def module(self, piece: Piece) -> Layer:
        """The layer that computes where a rank keeps `piece`, built beside training; its weights are of no step."""
        return self._built([piece.layer], piece.shard, beside_training=True)[piece.layer][0]

    def build_ahead(self, piece: Piece) -> tuple[Layer, LayerState]:
        """Build the layer of `piece` beside training, for `begin`; its values are of no step."""
        workspace = self._ahead_workspace
        built = self._built([piece.layer], piece.shard, beside_training=True, workspace=workspace)
        return built[piece.layer]

    def load(
        self,
        layers: Iterable[int],
        start: CheckpointRef,
        shard: Shard | None = None,
        *,
        on_host: bool = False,
    ) -> Built:
        """Return layers as the checkpoint `start` has them.

        Raises:
            DamagedCheckpointError: a file of it is damaged.
            JobError: it holds another model.
        """
        built = self.build(layers, start.step, shard, on_host=on_host)
        manifest = read_manifest(start)
        for layer, (_, state) in built.items():
            load_(state, read_layer(start, manifest, layer, state))
        return built

    def begin(
        self,
        freeze: FreezeSettings,
        shard: Shard = WHOLE,
        ahead: Mapping[Piece, tuple[Layer, LayerState]] | None = None,
        wanted: Collection[int] | None = None,
    ) -> None:
        """Build layers for the `freeze` settings from here on, and let `fetch_all` fetch until `stop`.

        Args:
            shard: as for `build_layers`.
            ahead: what `build_ahead` made. `build` takes the layers that are of that shard, until `end`; and those that
                an attempt before this one was given, if it failed and nobody keeps them.
            wanted: the layers that will be needed, None: all; what was built of others is dropped.
        """
        kept = self._ahead | self._taken if shard == self._shard else {}
        kept |= {piece.layer: one for piece, one in (ahead or {}).items() if piece.shard == shard}
        self._freeze, self._shard = freeze, shard
        self._ahead = {layer: one for layer, one in kept.items() if wanted is None or layer in wanted}
        self._taken = {}
        self._ahead_workspace = Workspace()
        self._stopped = threading.Event()

    def end(self) -> None:
        """The attempts are over: let go of what was built ahead and is not needed."""
        self._ahead, self._taken = {}, {}

    def stop(self) -> None:
        """Have `fetch_all` raise, from any thread."""
        self._stopped.set()

    def fetch_all(
        self, layers: Sequence[int], assignment: Assignment, haul: Haul, held: Held | None = None
    ) -> None:
        """Fetch layers, or this rank's shards of them, from other ranks at the assignment's step, `AT_ONCE` at a time.
        Those that others have in other pieces are put together.

        Where the job salvages weights, fetch the weights of all layers before any moments.

        Args:
            haul: receives the state; keeps what arrived before an error.
            held: what this rank itself has at that step; it is not fetched.

        Raises:
            StateStreamError: a source is gone, or `stop` was called.
            DamagedCheckpointError: a file of the checkpoint that provides moments is damaged.
        """
        step, stopped, held = assignment.step, self._stopped, held or {}
        sources = {one.piece: one for one in assignment.sources}
        needed: dict[int, tuple[Piece, ...]] = {}
        for layer in layers:
            own = Piece(layer, self._shard)
            needed[layer] = (own,) if own in held else assignment.offered_for(own)
        nowhere = [layer for layer, pieces in needed.items() if not pieces]
        assert not nowhere, f"no source of layers {nowhere} at step {step}"
        lacking = [piece for pieces in needed.values() for piece in pieces if piece not in held]
        if not layers:
            return
        built: Built = {}
        loaded: set[int] = set()

        def load(layer: int, state: LayerState) -> None:
            owner = next((sources[piece] for piece in needed[layer] if piece in sources), None)
            self._load(built[layer][1], state, owner, step)
            haul.whole[layer] = built[layer]
            self._taken.pop(layer, None)
            loaded.add(layer)

        def begin(pieces: Iterable[Piece], part: StatePart) -> dict[Future[LayerState], Piece]:
            return {
                fetching.submit(self._fetch, sources[piece], step, stopped, part): piece for piece in pieces
            }

        def receive(piece: Piece, state: LayerState) -> None:
            if piece.shard == self._shard:
                load(piece.layer, state)
            else:
                haul.pieces[piece] = state

        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch") as fetching:
            try:
                salvages = self._config.elastic.salvage != "none"
                coming = begin(lacking, StatePart.WEIGHTS if salvages else StatePart.ALL)
                built |= self.build(layers, step)
                self._take_all(coming, haul.weights.__setitem__ if salvages else receive)
                if salvages:
                    coming = begin(
                        [each for each in lacking if each not in assignment.salvaged], StatePart.MOMENTS
                    )
                    self._take_all(
                        coming, lambda piece, rest: receive(piece, united(haul.weights[piece], rest))
                    )
            finally:
                stopped.set()
        mixed = self._with_saved_moments(
            [each for each in lacking if each in assignment.salvaged], haul.weights, assignment
        )
        found = {piece: one[1] for piece, one in held.items()} | haul.pieces | mixed
        for layer, pieces in needed.items():
            if layer not in loaded:
                states = [found[piece] for piece in pieces]
                load(layer, states[0] if len(states) == 1 else whole_of(states))

    def _take_all(
        self, coming: dict[Future[LayerState], Piece], take: Callable[[Piece, LayerState], None]
    ) -> None:
        """Take each state as it arrives, also after one of them failed: what other sources have may be the only copies
        left. What has been taken leaves host memory.

        Raises:
            StateStreamError: the first fetch that failed.
        """
        lost: StateStreamError | None = None
        for state in as_completed([*coming]):
            try:
                take(coming.pop(state), state.result())
            except StateStreamError as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def _with_saved_moments(
        self, pieces: Sequence[Piece], weights: Mapping[Piece, LayerState], assignment: Assignment
    ) -> dict[Piece, LayerState]:
        """Layers, or shards, with these weights and the moments that the assignment's checkpoint has for them; without
        one, initial moments.

        Raises:
            DamagedCheckpointError: a file of the checkpoint is damaged.
        """
        ref = assignment.moments
        saved: dict[int, LayerState] = {}
        if ref is not None and pieces:
            manifest = read_manifest(ref)
            saved = {layer: read_layer(ref, manifest, layer) for layer in {piece.layer for piece in pieces}}
        mixed: dict[Piece, LayerState] = {}
        for piece in pieces:
            state = saved.get(piece.layer)
            if state is None or piece.shard != WHOLE:
                _, part = self.build([piece.layer], assignment.step, piece.shard, on_host=True)[piece.layer]
                if state is not None:
                    load_(part, state)
                state = part
            mixed[piece] = united(weights[piece], part_of(state, StatePart.MOMENTS))
        return mixed

    def fetch_base(
        self, step: int, piece: Piece, owner: Greeting, stopped: threading.Event, *, on_host: bool = False
    ) -> Base:
        """Fetch the base of a copy from its owner; give up when `stopped` is set.

        Args:
            on_host: the copy is kept in host memory.

        Raises:
            StateStreamError: the owner is gone, or does not offer it.
        """
        layer, shard = piece
        source = _source_of(piece, owner)
        state = self._fetch(source, step, stopped)
        built = self.build([layer], step, shard, beside_training=True, on_host=on_host)
        self._load(built[layer][1], state, source, step)
        return base_of(built[layer], on_host=on_host)

    def base_made_of(
        self,
        states: Sequence[LayerState],
        piece: Piece,
        step: int,
        own: tuple[Layer, LayerState] | None = None,
        *,
        on_host: bool = False,
    ) -> Base:
        """Make the base of a copy.

        Args:
            states: at `step`, the layer or all shards of another cut of it.
            own: the layer as this rank owns it, if it does; beside a shard no module is built.
            on_host: the copy is kept in host memory.

        Raises:
            FixedDiffers: the states leave out fixed parameters that this rank has built others of.
        """
        if own is None or own[0].shared is None:
            built = self.build([piece.layer], step, piece.shard, on_host=on_host)[piece.layer]
            base = base_of(built, on_host=on_host)
        else:
            base = None, sibling_shard(*own, piece.shard.number, on_host=on_host)
            begin_statistics(self._freeze.at(step + 1), base[1])
        self._load(base[1], states[0] if len(states) == 1 else whole_of(states), None, step)
        return base

    def build_copy(self, piece: Piece, step: int) -> Base:
        """Build what a copy in host memory becomes on the device, beside training."""
        built = self.build([piece.layer], step, piece.shard, beside_training=True)
        return base_of(built[piece.layer])

    def completed(self, state: LayerState, live: LayerState | None = None) -> LayerState:
        """`state` with the fixed parameters that it leaves out, from the layer `live`, or else built new.

        Raises:
            FixedDiffers: they are others.
        """
        if not state.leaves_out:
            return state
        if live is not None and not live.leaves_out:
            return with_fixed_of(state, live)
        _, built = self._built([state.layer], WHOLE, beside_training=True, on_host=True)[state.layer]
        return with_fixed_of(state, built)

    def fetch_copy(self, piece: Piece, step: int, owner: Greeting, stopped: threading.Event) -> LayerState:
        """Fetch the state of `step` from its owner, in host memory and without fixed parameters; give up when `stopped`
        is set.

        Raises:
            StateStreamError: the owner is gone, or does not offer it.
        """
        return self._fetch(_source_of(piece, owner), step, stopped)

    def _load(self, built: LayerState, state: LayerState, owner: StateSource | None, step: int) -> None:
        """Load `state` into `built`, with the fixed parameters of `owner` where this rank has built others."""
        try:
            load_(built, state)
        except FixedDiffers:
            if owner is None:
                raise
            whole = self._fetch(owner, step, threading.Event(), StatePart.WEIGHTS, fixed=True)
            load_(built, with_fixed_of(state, whole))

    def fetch(self, sources: Sequence[StateSource], step: int) -> dict[Piece, LayerState]:
        """Fetch states without fixed parameters, `AT_ONCE` at a time, until `stop`.

        Raises:
            StateStreamError: a source is gone, or does not offer it.
        """
        stopped = self._stopped = threading.Event()
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch") as fetching:
            coming = {one.piece: fetching.submit(self._fetch, one, step, stopped) for one in sources}
            try:
                return {piece: state.result() for piece, state in coming.items()}
            finally:
                stopped.set()

    def _fetch(
        self,
        source: StateSource,
        step: int,
        stopped: threading.Event,
        part: StatePart = StatePart.ALL,
        *,
        fixed: bool = False,
    ) -> LayerState:
        self._faults.reach(FaultPhase.MIGRATING, step)
        return fetch(
            source.host,
            source.port,
            self._secret,
            source.layer,
            step,
            wait_s=FETCH_WAIT_S,
            part=part,
            shard=source.shard,
            fixed=fixed,
            stopped=stopped,
        )


def _source_of(piece: Piece, owner: Greeting) -> StateSource:
    return StateSource(layer=piece.layer, shard=piece.shard, rank=-1, host=owner.host, port=owner.port)
