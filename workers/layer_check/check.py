"""Which layers are compared, each kind once, and what is said of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.blamed import blamed
from workers.layer import Layer, Tensors
from workers.layer_check.comparison import LayerComparison
from workers.layer_check.kinds import kind_of
from workers.protocol import LayersChecked


@dataclass
class LayerCheck:
    """The check of one rank's layers. A kind that it knows is not compared again.

    Args:
        tell: takes what a user should know: a layer that is left to plain autograd, or that nothing trains.
    """

    tell: Callable[[str], None]
    precision: str
    names: list[str] = field(default_factory=list)
    """The layers that were compared or are of a kind that was, since this list was last emptied."""
    whole: dict[str, str] = field(default_factory=dict)
    """Layer -> why it is left to plain autograd; of all layers so far."""
    seconds: float = 0.0
    """Time that this took."""
    _kinds: dict[str, tuple[str, frozenset[int]]] = field(default_factory=dict)
    """Kind -> why its layers are left to plain autograd, empty if they are not; and their detached outputs."""

    def __call__(self, layer: Layer, inputs: Tensors, draw_key: int) -> None:
        """Compare `layer` with plain autograd, unless that was done. Afterwards the layer is as it was, but for the way
        in which its gradients are formed.

        Args:
            inputs: those of a microbatch, as `Layer.forward` takes them.
            draw_key: of its random draws.

        Raises:
            JobError: no way of training it gives the numbers of plain autograd; names the layer and what differs.
        """
        if layer.checked or any(t.is_meta for t in (*inputs, *layer.trained.values())):
            return
        begun_s = time.perf_counter()
        kind = kind_of(layer, inputs)
        if kind not in self._kinds:
            with blamed(f"the comparison of layer {layer.name} with plain autograd"):
                comparison = LayerComparison(layer, inputs, draw_key, self.precision, self.tell)
                reason = comparison.made()
            self._kinds[kind] = reason, comparison.detached
            if reason:
                self.tell(
                    f"layer {layer.name}, with those of its kind, trains by plain autograd: {reason}. All gradients are"
                    " formed in its backward pass: no schedule can put its weight gradients off, and freezing does not"
                    " make its steps shorter"
                )
        reason, layer.detached = self._kinds[kind]
        if reason and not layer.whole:
            layer.compute_whole(reason)
        layer.checked, layer.tell, layer.aliases = True, self.tell, {}
        self.names.append(layer.name)
        self.whole.pop(layer.name, None)
        if layer.whole:
            self.whole[layer.name] = layer.whole
        self.seconds += time.perf_counter() - begun_s

    def taken(self, rank: int) -> LayersChecked | None:
        """The report of what was compared since the last call; None: nothing."""
        if not self.names:
            return None
        names, self.names = tuple(self.names), []
        took_s, self.seconds = self.seconds, 0.0
        whole = {name: self.whole[name] for name in names if name in self.whole}
        return LayersChecked(rank=rank, layers=names, whole=whole, seconds=took_s)
