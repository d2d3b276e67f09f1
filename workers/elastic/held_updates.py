"""Updates of layers that are about to change ranks, held back at their owner during the copy (DynPipe V-C1).

The layer trains on with the weights of the snapshot. Its gradients wait; the new owner applies them in order.
That changes the trajectory. Knows no network and no plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.commit.commit import Decision
from workers.elastic.redundancy import Packing
from workers.layers.layer import Layer
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer


@dataclass(frozen=True)
class _Held:
    step: int
    decision: Decision
    parcels: Mapping[int, Tensor]


class HeldUpdates:
    """Holds back one rank's updates of layers that it is about to give away.

    Args:
        layers: the layers that will move to another rank.
    """

    def __init__(self, layers: Mapping[int, tuple[Layer, LayerState]], optimizer: Optimizer) -> None:
        self._layers = layers
        self._optimizer = optimizer
        self._packings = {layer: Packing(state) for layer, (_, state) in layers.items()}
        self._held: list[_Held] = []
        self._applied = 0
        self._over = False

    def holds(self, layer: int) -> bool:
        """Whether updates of `layer` are held back now."""
        return layer in self._layers and not self._over

    def hold(self, step: int, energies: Mapping[int, Sequence[float]], decision: Decision) -> None:
        """Keep the gradients of `step`, which is committed.

        Args:
            energies: layer -> freezing statistics, where the job freezes.
        """
        if self._over or not self._layers:
            return
        parcels: dict[int, Tensor] = {}
        for index, (layer, state) in self._layers.items():
            parcels[index] = self._packings[index].pack(
                layer.gradients(), state.buffers, energies.get(index, ())
            )
        self._held.append(_Held(step, decision, parcels))

    def parcels(self, layer: int) -> list[Tensor]:
        """Return all kept parcels of `layer`, in the order of steps."""
        return [held.parcels[layer] for held in self._held]

    def release(self) -> None:
        """Bring the layers to the newest step: apply the kept gradients here too, in order."""
        for held in self._held[self._applied :]:
            if held.decision.skipped:
                continue
            for layer, raw in held.parcels.items():
                gradients = self._packings[layer].unpack(raw).gradients
                self._optimizer.update_(self._layers[layer][1], gradients, held.decision.scale, held.step - 1)
        self._applied = len(self._held)

    def end(self) -> None:
        """Release the kept updates and hold back no more."""
        self.release()
        self._over = True
