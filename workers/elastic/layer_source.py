"""Where a rank's layers come from: built new, from a checkpoint, or from another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from workers.build import build_layers
from workers.checkpoint.folder import read_layer, read_manifest
from workers.config import WorkerConfig
from workers.devices.device import Device
from workers.fault_injection.points import FaultPoints, Phase
from workers.freezing.freezer import begin_statistics
from workers.freezing.plans import Plans, Settings
from workers.layer import Layer
from workers.models.definition import ModelDefinition
from workers.models.weights import read_weights
from workers.protocol import Assignment, CheckpointRef, Part, Source
from workers.state.layer_state import LayerState, load_, part_of, united
from workers.state.optim import Optimizer
from workers.state_stream.frames import StateStreamError
from workers.state_stream.stream import fetch
from workers.unfinished import Greeting

Built = dict[int, tuple[Layer, LayerState]]
"""Layer number -> layer and its live state."""

FETCH_WAIT_S = 30.0
"""How long a source may take to offer a layer: the request for it may reach the source later."""

AT_ONCE = 8
"""Layers fetched at a time."""


@dataclass
class Haul:
    """The fetched state that has arrived, even if some of it did not."""

    whole: Built = field(default_factory=dict)
    weights: dict[int, LayerState] = field(default_factory=dict)
    """Layer -> its weights, where they arrived before the moments; includes layers that are whole by now."""


class LayerSource:
    """Builds layers and loads their state.

    Args:
        secret: the job's, with which ranks authenticate each other.
        faults: the fault injections armed on this rank.
    """

    def __init__(
        self,
        config: WorkerConfig,
        definition: ModelDefinition,
        device: Device,
        optimizer: Optimizer,
        secret: bytes,
        faults: FaultPoints,
    ) -> None:
        self._config = config
        self._definition = definition
        self._device = device
        self._optimizer = optimizer
        self._secret = secret
        self._faults = faults
        self._freeze = Settings(config.freeze, Plans())
        self._stopped = threading.Event()

    def initial(self, layers: Iterable[int]) -> Built:
        """Return layers as they are before the first step: from `model.weights`, or random.

        Raises:
            JobError: the file does not hold these layers.
        """
        built = self._built(layers)
        if self._config.model.weights is not None:
            read_weights(self._config.model.weights, [state for _, state in built.values()])
        return self._with_statistics(built, 0)

    def build(self, layers: Iterable[int], step: int, *, beside_training: bool = False) -> Built:
        """Build layers whose values come from elsewhere.

        Args:
            step: the last step committed in those values.
            beside_training: this rank trains meanwhile.
        """
        return self._with_statistics(self._built(layers, beside_training=beside_training), step)

    def _built(self, layers: Iterable[int], *, beside_training: bool = False) -> Built:
        return build_layers(
            self._definition,
            layers,
            seed=self._config.seed,
            precision=self._config.precision,
            device=self._device.torch_device,
            optimizer=self._optimizer,
            beside_training=beside_training,
        )

    def _with_statistics(self, built: Built, step: int) -> Built:
        freeze = self._freeze.at(step + 1)
        for _, state in built.values():
            begin_statistics(freeze, state)
        return built

    def load(self, layers: Iterable[int], start: CheckpointRef) -> Built:
        """Return layers as the checkpoint `start` has them.

        Raises:
            DamagedCheckpointError: a file of it is damaged.
            JobError: it holds another model.
        """
        built = self.build(layers, start.step)
        manifest = read_manifest(start)
        for layer, (_, state) in built.items():
            load_(state, read_layer(start, manifest, layer))
        return built

    def begin(self, freeze: Settings) -> None:
        """Build layers for the `freeze` settings from here on, and let `fetch_all` fetch until `stop`."""
        self._freeze = freeze
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Have `fetch_all` raise, from any thread."""
        self._stopped.set()

    def fetch_all(self, layers: Sequence[int], assignment: Assignment, haul: Haul) -> None:
        """Fetch layers from other ranks at the assignment's step, `AT_ONCE` at a time.

        Where the job salvages weights, fetch the weights of all layers before any moments.

        Args:
            haul: receives the state; keeps what arrived before an error.

        Raises:
            StateStreamError: a source is gone, or `stop` was called.
            DamagedCheckpointError: a file of the checkpoint that provides moments is damaged.
        """
        sources, step, stopped = {s.layer: s for s in assignment.sources}, assignment.step, self._stopped
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

    def _take_all(
        self,
        coming: dict[Future[LayerState], int],
        take: Callable[[int, LayerState], None],
        *,
        stop_at_once: bool = True,
    ) -> None:
        """Take each state as it arrives, also after one of them failed.

        Args:
            stop_at_once: stop the other fetches when one fails.

        Raises:
            StateStreamError: the first fetch that failed.
        """
        lost: StateStreamError | None = None
        for state in as_completed(coming):
            try:
                take(coming[state], state.result())
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
        self, step: int, layer: int, owner: Greeting, stopped: threading.Event
    ) -> tuple[Layer, LayerState]:
        """Fetch the base of a copy from the layer's owner; give up when `stopped` is set.

        Raises:
            StateStreamError: the owner is gone, or does not offer it.
        """
        source = Source(layer=layer, rank=-1, host=owner.host, port=owner.port)
        state = self._fetch(source, step, stopped)
        built = self.build([layer], step, beside_training=True)
        load_(built[layer][1], state)
        return built[layer]

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
            stopped=stopped,
        )
