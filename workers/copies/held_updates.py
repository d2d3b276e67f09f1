"""Updates of layers that are about to change ranks, held back at their owner during the copy (DynPipe V-C1).

The layer trains on with the weights of the snapshot. Its gradients wait; the new owner applies them in order.
That changes the trajectory. Knows no network and no plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from workers.commit.commit import CommitDecision
from workers.copies.redundancy import Packing
from workers.copies.updates import Update
from workers.layers.layer import Layer
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer


class HeldUpdates:
    """Holds back one rank's updates of layers that it is about to give away.

    Args:
        layers: the layers that will move to another rank.
    """

    def __init__(self, layers: Mapping[int, tuple[Layer, LayerState]], optimizer: Optimizer) -> None:
        self._layers = layers
        self._optimizer = optimizer
        self._packings = {layer: Packing(state) for layer, (_, state) in layers.items()}
        self._held: dict[int, list[Update]] = {layer: [] for layer in layers}
        self._applied = 0
        """Steps whose updates have been applied here."""
        self._over = False

    def holds(self, layer: int) -> bool:
        """Whether updates of `layer` are held back now."""
        return layer in self._layers and not self._over

    def hold(self, step: int, energies: Mapping[int, Sequence[float]], decision: CommitDecision) -> None:
        """Keep the gradients of `step`, which is committed.

        Args:
            energies: layer -> freezing statistics, where the job freezes.
        """
        if self._over:
            return
        for index, (layer, state) in self._layers.items():
            parcel = self._packings[index].pack(layer.gradients(), state.buffers, energies.get(index, ()))
            self._held[index].append(Update(step, parcel, decision))

    def parcels(self, layer: int) -> list[Tensor]:
        """Return all kept parcels of `layer`, in the order of steps."""
        return [update.parcel for update in self._held[layer]]

    def release(self) -> None:
        """Bring the layers to the newest step: apply the kept gradients here too, in order."""
        for index, held in self._held.items():
            for update in held[self._applied :]:
                if not update.decision.skipped:
                    gradients = self._packings[index].unpack(update.parcel).gradients
                    state = self._layers[index][1]
                    self._optimizer.update_(state, gradients, update.decision.scale, update.decision.lr)
        self._applied = max(map(len, self._held.values()), default=0)

    def end(self) -> None:
        """Release the kept updates and hold back no more."""
        self.release()
        self._over = True
