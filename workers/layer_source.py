"""Where a rank's layers come from: made anew, out of a checkpoint, or from another rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from workers.build import build_layers
from workers.checkpoint import read_layer, read_manifest
from workers.config import WorkerConfig
from workers.devices.device import Device
from workers.fault_points import FaultPoints, Phase
from workers.freezing.freezer import begin_statistics
from workers.layer import Layer
from workers.layer_state import LayerState, load_
from workers.left_over import Greeting
from workers.models.definition import ModelDefinition
from workers.optim import Optimizer
from workers.protocol import CheckpointRef, Source
from workers.transport.state_stream import fetch

Built = dict[int, tuple[Layer, LayerState]]
"""Layer number -> layer and its live state."""

FETCH_WAIT_S = 30.0
"""How long a source may take to offer a layer: it has been told to, or will be."""


AT_ONCE = 8
"""Layers that are fetched at a time."""


class LayerSource:
    """Builds layers and brings their state.

    Args:
        secret: the job's, by which ranks know each other.
        faults: the drills armed on this rank.
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
        self._stopped = threading.Event()

    def build(self, layers: Iterable[int]) -> Built:
        """Layers as they are before the first step."""
        built = build_layers(
            self._definition,
            layers,
            seed=self._config.seed,
            precision=self._config.precision,
            device=self._device.torch_device,
            optimizer=self._optimizer,
        )
        for _, state in built.values():
            begin_statistics(self._config.freeze, state)
        return built

    def load(self, layers: Iterable[int], start: CheckpointRef) -> Built:
        """Layers as a checkpoint has them.

        Raises:
            DamagedCheckpointError: a file of it is damaged.
            JobError: it holds another model.
        """
        built = self.build(layers)
        manifest = read_manifest(start)
        for layer, (_, state) in built.items():
            load_(state, read_layer(start, manifest, layer))
        return built

    def begin(self) -> None:
        """From now on `fetch_all` fetches, until `stop`."""
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Have `fetch_all` raise, from any thread."""
        self._stopped.set()

    def fetch_all(self, layers: Sequence[int], sources: Iterable[Source], step: int) -> Built:
        """Layers as other ranks have them at `step`, some at a time.

        Raises:
            StateStreamError: one is gone, or `stop` was called.
        """
        by_layer = {source.layer: source for source in sources}
        nowhere = [layer for layer in layers if layer not in by_layer]
        assert not nowhere, f"no source of layers {nowhere} at step {step}"
        if not layers:
            return {}
        with ThreadPoolExecutor(min(len(layers), AT_ONCE), thread_name_prefix="fetch") as fetching:
            stopped = self._stopped
            coming = {layer: fetching.submit(self._fetch, by_layer[layer], step, stopped) for layer in layers}
            built = self.build(layers)
            try:
                for layer, state in coming.items():
                    load_(built[layer][1], state.result())
            finally:
                # With one of them lost the others are of no use.
                stopped.set()
        return built

    def fetch_base(
        self, step: int, layer: int, owner: Greeting, stopped: threading.Event
    ) -> tuple[Layer, LayerState]:
        """The base of a copy, from the layer's owner; gives up when `stopped` is set.

        Raises:
            StateStreamError: the owner is gone, or does not offer it.
        """
        source = Source(layer=layer, rank=-1, host=owner.host, port=owner.port)
        state = self._fetch(source, step, stopped)
        built = self.build([layer])
        load_(built[layer][1], state)
        return built[layer]

    def _fetch(self, source: Source, step: int, stopped: threading.Event) -> LayerState:
        self._faults.reach(Phase.MIGRATING, step)
        return fetch(
            source.host,
            source.port,
            self._secret,
            source.layer,
            step,
            wait_s=FETCH_WAIT_S,
            stopped=stopped,
        )
