"""What a rank passes on of its commits to peers outside the group that follow its layers. Knows no network."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from workers.commit import Decision
from workers.elastic.redundancy import Packing
from workers.layer import Layer
from workers.layer_state import LayerState, host_copy
from workers.state_stream.following import Change, Followers


class Followed:
    """One rank's layers under one plan, as its followers see them.

    Args:
        layers: the layers that the rank owns.
        held: those whose updates are held back: nobody can follow them.
    """

    def __init__(
        self,
        followers: Followers,
        layers: Mapping[int, tuple[Layer, LayerState]],
        held: Collection[int] = (),
    ) -> None:
        self._followers = followers
        self._layers = {layer: one for layer, one in layers.items() if layer not in held}
        self._packings: dict[int, Packing] = {}

    def pack(self, energies: Mapping[int, Sequence[float]]) -> dict[int, Tensor]:
        """Return the parcels of a step that is about to be applied, of the layers that are followed, on the host.

        Args:
            energies: layer -> freezing statistics, where the job freezes.
        """
        parcels: dict[int, Tensor] = {}
        for index in sorted(self._followers.layers & self._layers.keys()):
            layer, state = self._layers[index]
            packing = self._packings.setdefault(index, Packing(state))
            parcels[index] = packing.pack(layer.gradients(), state.buffers, energies.get(index, ())).cpu()
        return parcels

    def commit(
        self, decision: Decision, parcels: Mapping[int, Tensor], freeze: tuple[int, int] | None
    ) -> None:
        """Pass on a commit that is applied here.

        Args:
            parcels: what `pack` returned before.
            freeze: epoch and version of the newest freeze plan.
        """
        copies: dict[int, LayerState] = {}

        def copied(layer: int) -> LayerState | None:
            if layer in self._layers and layer not in copies:
                copies[layer] = host_copy(self._layers[layer][1])
            return copies.get(layer)

        change = Change(
            step=decision.step,
            scale=decision.scale,
            skipped=decision.skipped,
            scores=decision.scores,
            parcels=parcels,
        )
        self._followers.commit(change, copied, freeze)
        if decision.adopt is not None:
            self._followers.end("the ranks follow another freeze plan from here on")
