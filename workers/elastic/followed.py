"""Forwards a rank's commits to peers outside the group that follow its layers. Knows no network."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from workers.commit.commit import CommitDecision
from workers.copies.redundancy import Packing
from workers.layers.layer import Layer
from workers.state.layer_state import LayerState, fresh, host_copy
from workers.state_stream.following import CommittedChange, Followers, Parcels


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

    def send(self, step: int, packed: Mapping[int, Tensor], energies: Mapping[int, Sequence[float]]) -> None:
        """Start sending the parcels of `step`, which is not committed yet, of the layers that are followed. Gradients
        and buffers are final.

        Args:
            packed: the parcels that there are already, by layer.
            energies: layer -> freezing statistics, where the job freezes.
        """
        parcels: dict[int, Tensor] = {}
        for index in sorted(self._followers.layers & self._layers.keys()):
            layer, state = self._layers[index]
            raw = packed.get(index)
            if raw is None:
                packing = self._packings.setdefault(index, Packing(state))
                raw = packing.pack(layer.gradients(), state.buffers, energies.get(index, ()))
            # One that was sent is the memory of the gradients: the next step forms there.
            parcels[index] = fresh(raw) if raw.is_cuda or index in packed else raw
        self._followers.send(Parcels(step=step, of_layers=parcels))

    def commit(self, decision: CommitDecision, freeze: tuple[int, int] | None) -> None:
        """Pass on a commit that is applied here; `send` sent its parcels.

        Args:
            freeze: epoch and version of the newest freeze plan.
        """
        copies: dict[int, LayerState] = {}

        def copied(layer: int) -> LayerState | None:
            if layer in self._layers and layer not in copies:
                copies[layer] = host_copy(self._layers[layer][1])
            return copies.get(layer)

        change = CommittedChange(
            step=decision.step,
            scale=decision.scale,
            lr=decision.lr,
            skipped=decision.skipped,
            scores=decision.scores,
        )
        self._followers.commit(change, copied, freeze)
        if decision.adopt is not None:
            self._followers.end("the ranks follow another freeze plan from here on")
