"""Where a rank's layers come from: built new, from a checkpoint, or from another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from planner.shards import WHOLE, Piece, Shard
from workers.build import build_layers
from workers.checkpoint.folder import read_layer, read_manifest
from workers.compiled.compiler import Compiler
from workers.config import WorkerConfig
from workers.deferred.queue import Workspace
from workers.devices.device import Device
from workers.elastic.standby import Base
from workers.fault_injection.points import FaultPoints, Phase
from workers.freezing.freezer import begin_statistics
from workers.freezing.plans import Plans, Settings
from workers.layer import Layer
from workers.models.definition import ModelDefinition
from workers.models.weights import read_weights
from workers.protocol import Assignment, CheckpointRef, Part, Source
from workers.state.layer_state import (
    LayerState,
    apart,
    load_,
    part_of,
    united,
    whole_of,
    without_module,
)
from workers.state.optim import Optimizer
from workers.state_stream.frames import StateStreamError
from workers.state_stream.stream import fetch
from workers.unfinished import Greeting

Built = dict[int, tuple[Layer, LayerState]]
"""Layer number -> layer and its live state."""

Held = dict[Piece, tuple[Layer | None, LayerState]]
"""Layer, or shard of it -> its state, and if that is live the layer that computes with it."""

Fetched = TypeVar("Fetched", int, Piece)


def base_of(built: tuple[Layer, LayerState], *, on_host: bool = False) -> Base:
    """What a copy begins with. That of a shard, or one in host memory, needs no module: it is built again if the copy
    comes to own its layer.

    Args:
        on_host: `built` is in host memory, and nobody else uses it.
    """
    if built[1].shard != WHOLE:
        return None, apart(built[1])
    return (None, without_module(built[1])) if on_host else built


FETCH_WAIT_S = 30.0
"""How long a source may take to offer a layer: the request for it may reach the source later."""

AT_ONCE = 8
"""Layers fetched at a time."""


@dataclass
class Haul:
    """The fetched state that has arrived, even if some of it did not."""

    whole: Built = field(default_factory=dict)
    """Complete layers, or complete shards of the number that this rank keeps."""
    pieces: dict[Piece, LayerState] = field(default_factory=dict)
    """Shards as they arrived, of which layers are put together."""
    weights: dict[int, LayerState] = field(default_factory=dict)
    """Layer -> its weights, where they arrived before the moments; includes layers that are whole by now."""


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
        self._freeze = Settings(config.freeze, Plans())
        self._shard = WHOLE
        self._stopped = threading.Event()
        self._ahead: Built = {}
        """Layers of this rank's shards that were built beforehand; their values are of no step."""
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
        """Build layers whose values come from elsewhere, or take those that were built ahead.

        Args:
            step: the last step committed in those values.
            beside_training: this rank trains meanwhile.
        """
        wanted, there = [*layers], dict[int, tuple[Layer, LayerState]]()
        if shard in (None, self._shard) and not (beside_training or on_host):
            there = {layer: self._ahead.pop(layer) for layer in wanted if layer in self._ahead}
        lacking = [layer for layer in wanted if layer not in there]
        built = there | self._built(lacking, shard, beside_training=beside_training, on_host=on_host)
        return self._with_statistics(built, step)

    def _built(
        self,
        layers: Iterable[int],
        shard: Shard | None = None,
        *,
        beside_training: bool = False,
        on_host: bool = False,
        workspace: Workspace | None = None,
    ) -> Built:
        built = build_layers(
            self._definition,
            layers,
            seed=self._config.seed,
            precision=self._config.precision,
            device=torch.device("cpu") if on_host else self._device.torch_device,
            optimizer=self._optimizer,
            beside_training=beside_training,
            shard=shard or self._shard,
            workspace=workspace,
        )
        if self._compiler is not None and not on_host:
            self._compiler.compile([layer for layer, _ in built.values()])
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
            load_(state, read_layer(start, manifest, layer))
        return built

    def begin(
        self,
        freeze: Settings,
        shard: Shard = WHOLE,
        ahead: Mapping[Piece, tuple[Layer, LayerState]] | None = None,
    ) -> None:
        """Build layers for the `freeze` settings from here on, and let `fetch_all` fetch until `stop`.

        Args:
            shard: as for `build_layers`.
            ahead: what `build_ahead` made. `build` takes the layers that are of that shard, until `end`.
        """
        self._freeze, self._shard = freeze, shard
        self._ahead = {piece.layer: one for piece, one in (ahead or {}).items() if piece.shard == shard}
        self._ahead_workspace = Workspace()
        self._stopped = threading.Event()

    def end(self) -> None:
        """Let go of what was built ahead and is not needed."""
        self._ahead = {}

    def stop(self) -> None:
        """Have `fetch_all` raise, from any thread."""
        self._stopped.set()

    def fetch_all(
        self, layers: Sequence[int], assignment: Assignment, haul: Haul, held: Held | None = None
    ) -> None:
        """Fetch layers, or this rank's shards of them, from other ranks at the assignment's step, `AT_ONCE` at a time.

        Where the job salvages weights, fetch the weights of all layers before any moments.

        Args:
            haul: receives the state; keeps what arrived before an error.
            held: what this rank itself has at that step; it is not fetched.

        Raises:
            StateStreamError: a source is gone, or `stop` was called.
            DamagedCheckpointError: a file of the checkpoint that provides moments is damaged.
        """
        offered: dict[int, dict[Piece, Source]] = {}
        for one in assignment.sources:
            offered.setdefault(one.layer, {})[one.piece] = one
        held = held or {}
        own = {piece.layer for piece in held}
        if own & {*layers} or any(
            shard != WHOLE for shard in (self._shard, *(piece.shard for piece in (*held, *_pieces(offered))))
        ):
            self._fetch_pieces(layers, assignment.step, offered, haul, held)
            return
        sources = {layer: one for layer, found in offered.items() for one in found.values()}
        step, stopped = assignment.step, self._stopped
        nowhere = [layer for layer in layers if layer not in sources]
        assert not nowhere, f"no source of layers {nowhere} at step {step}"
        if not layers:
            return
        whole = [layer for layer in layers if layer not in assignment.salvaged]

        def begin(layers: Iterable[int], part: Part) -> dict[Future[LayerState], int]:
            return {
                fetching.submit(self._fetch, sources[layer], step, stopped, part): layer for layer in layers
            }

        def take(layer: int, state: LayerState) -> None:
            load_(built[layer][1], state)
            haul.whole[layer] = built[layer]

        with ThreadPoolExecutor(min(len(layers), AT_ONCE), thread_name_prefix="fetch") as fetching:
            try:
                if self._config.elastic.salvage == "none":
                    coming = begin(layers, Part.ALL)
                    built = self.build(layers, step)
                    self._take_all(coming, take)
                    return
                coming = begin(layers, Part.WEIGHTS)
                built = self.build(layers, step)
                # When one source fails, still fetch from the others: theirs may be the only copies left.
                self._take_all(coming, haul.weights.__setitem__, stop_at_once=False)
                lost = [layer for layer in layers if layer in assignment.salvaged]
                for layer, moments in self._saved(lost, assignment.moments, step).items():
                    take(layer, united(haul.weights[layer], moments))
                coming = begin(whole, Part.MOMENTS)
                self._take_all(coming, lambda layer, state: take(layer, united(haul.weights[layer], state)))
            finally:
                stopped.set()

    def _fetch_pieces(
        self,
        layers: Sequence[int],
        step: int,
        offered: Mapping[int, Mapping[Piece, Source]],
        haul: Haul,
        held: Held,
    ) -> None:
        """Put layers, or shards of them, together from what is held here, if without a module, and what others have."""
        needed: dict[int, list[Piece]] = {}
        for layer in layers:
            own = Piece(layer, self._shard)
            needed[layer] = (
                [own] if own in held or own in offered.get(layer, {}) else [*offered.get(layer, {})]
            )
        nowhere = [layer for layer, pieces in needed.items() if not pieces]
        assert not nowhere, f"no source of layers {nowhere} at step {step}"
        sources = {piece: offered[piece.layer][piece] for piece in _pieces(needed) if piece not in held}
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch") as fetching:
            coming = {
                fetching.submit(self._fetch, source, step, self._stopped): piece
                for piece, source in sources.items()
            }
            try:
                built = self.build(layers, step)
                # When one source fails, still fetch from the others: theirs may be the only copies left.
                self._take_all(coming, haul.pieces.__setitem__, stop_at_once=False)
            finally:
                self._stopped.set()
        for layer, pieces in needed.items():
            found = [held[piece][1] if piece in held else haul.pieces[piece] for piece in pieces]
            load_(built[layer][1], found[0] if len(found) == 1 else whole_of(found))
            haul.whole[layer] = built[layer]

    def _take_all(
        self,
        coming: dict[Future[LayerState], Fetched],
        take: Callable[[Fetched, LayerState], None],
        *,
        stop_at_once: bool = True,
    ) -> None:
        """Take each state as it arrives, also after one of them failed. What has been taken leaves host memory.

        Args:
            stop_at_once: stop the other fetches when one fails.

        Raises:
            StateStreamError: the first fetch that failed.
        """
        lost: StateStreamError | None = None
        for state in as_completed([*coming]):
            try:
                take(coming.pop(state), state.result())
            except StateStreamError as error:
                if stop_at_once:
                    self._stopped.set()
                lost = lost or error
        if lost is not None:
            raise lost

    def _saved(
        self, layers: Sequence[int], moments: CheckpointRef | None, step: int
    ) -> dict[int, LayerState]:
        """Return moments for layers whose weights come from elsewhere: a checkpoint's, or initial ones."""
        if moments is None or not layers:
            built = self.build(layers, step)
            return {layer: part_of(state, Part.MOMENTS) for layer, (_, state) in built.items()}
        manifest = read_manifest(moments)
        return {layer: part_of(read_layer(moments, manifest, layer), Part.MOMENTS) for layer in layers}

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
        state = self.fetch_copy(piece, step, owner, stopped)
        built = self.build([layer], step, shard, beside_training=True, on_host=on_host)
        load_(built[layer][1], state)
        return base_of(built[layer], on_host=on_host)

    def build_copy(self, piece: Piece, step: int) -> Base:
        """Build what a copy in host memory becomes on the device, beside training."""
        built = self.build([piece.layer], step, piece.shard, beside_training=True)
        return base_of(built[piece.layer])

    def fetch_copy(self, piece: Piece, step: int, owner: Greeting, stopped: threading.Event) -> LayerState:
        """Fetch the state of `step` from its owner, in host memory; give up when `stopped` is set.

        Raises:
            StateStreamError: the owner is gone, or does not offer it.
        """
        source = Source(layer=piece.layer, shard=piece.shard, rank=-1, host=owner.host, port=owner.port)
        return self._fetch(source, step, stopped)

    def fetch(self, sources: Sequence[Source], step: int) -> dict[Piece, LayerState]:
        """Fetch states, `AT_ONCE` at a time, until `stop`.

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
        self, source: Source, step: int, stopped: threading.Event, part: Part = Part.ALL
    ) -> LayerState:
        self._faults.reach(Phase.MIGRATING, step)
        return fetch(
            source.host,
            source.port,
            self._secret,
            source.layer,
            step,
            wait_s=FETCH_WAIT_S,
            part=part,
            shard=source.shard,
            stopped=stopped,
        )


def _pieces(of_layers: Mapping[int, Iterable[Piece]]) -> list[Piece]:
    return [piece for pieces in of_layers.values() for piece in pieces]
