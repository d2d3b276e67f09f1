"""Choice of the layers to compare, each kind once, and of the steps to do so; reports of the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from workers.layer_check.comparison import LayerComparison, changed, outputs_of
from workers.layer_check.kinds import kind_of
from workers.layer_check.loss_state import check_loss
from workers.layers.blamed import blamed
from workers.layers.layer import Compared, Layer, Tensors
from workers.layers.loss import Loss
from workers.protocol.errors import JobError
from workers.protocol.reports import LayersChecked
from workers.reproducibility.canonical import first_of_each

FURTHER = 8
"""Layers are compared again at the steps that are powers of this: some do otherwise from a later pass on."""


def due(step: int) -> int:
    """The newest step, up to `step`, at which a comparison is due; 0 is that before the first step."""
    newest = 0
    while step >= FURTHER:
        newest, step = max(newest, 1) * FURTHER, step // FURTHER
    return newest


@dataclass
class LayerCheck:
    """The check of one rank's layers. A kind that it knows is not compared again until the next comparison is due.

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
    _kinds: dict[tuple[int, str], Compared] = field(default_factory=dict)
    """By when the comparison was due, and by kind."""

    def compare(self, layer: Layer, inputs: Tensors, draw_key: int, step: int) -> None:
        """Compare `layer` with plain autograd, unless that was done. Afterwards the layer is as it was, but for the way
        in which its gradients are formed.

        Args:
            inputs: those of a microbatch, as `Layer.forward` takes them.
            draw_key: of its random draws.
            step: the step that it is in; 0 of a profile.

        Raises:
            JobError: no way of training it gives the numbers of plain autograd, or not that in which it has trained
                since it was compared before; names the layer and what differs.
        """
        newest = due(step)
        if not _is_due(layer, newest) or _on_meta(layer, inputs):
            return
        begun_s = time.perf_counter()
        kind = newest, kind_of(layer, inputs)
        comparison = None if kind in self._kinds else self._begun(layer, inputs, draw_key)[0]
        self._end(layer, kind, comparison)
        self.seconds += time.perf_counter() - begun_s

    def falls_due(self, layers: Sequence[Layer], step: int) -> bool:
        """Whether one of `layers` is to be compared."""
        newest = due(step)
        return any(_is_due(layer, newest) for layer in layers)

    def compare_ahead(
        self,
        layers: Sequence[Layer],
        inputs: Tensors,
        draw_keys: Sequence[int],
        step: int,
        hand_on: Callable[[Tensors], None],
    ) -> bool:
        """Compare consecutive layers, but have another rank go on with the outputs of the last one before. Ranks would
        otherwise compare one after the other, as each waits for its inputs: P comparisons in place of one.

        Args:
            inputs: those of the first layer.
            draw_keys: one for each layer.
            hand_on: takes the outputs of the last layer, which training is to repeat bit for bit: it is refused else.

        Returns:
            Whether it has. If not, `compare` does the rest: nothing is due, or training may have other bits.

        Raises:
            JobError: as `compare`.
        """
        newest = due(step)
        if any(_may_differ(layer) or _on_meta(layer, inputs) for layer in layers):
            return False
        begun_s, tensors, ahead = time.perf_counter(), inputs, True
        begun: dict[tuple[int, str], LayerComparison] = {}
        kinds: list[tuple[int, str]] = []
        try:
            for layer, key in zip(layers, draw_keys, strict=True):
                kind = newest, kind_of(layer, tensors)
                if not _is_due(layer, newest) or kind in self._kinds or kind in begun:
                    outputs = outputs_of(layer, tensors, key)
                else:
                    begun[kind], outputs = self._begun(layer, tensors, key)
                kinds.append(kind)
                of_kind = self._kinds.get(kind) or begun.get(kind)
                ahead = of_kind is None or not of_kind.detached
                if not ahead:
                    break
                tensors = layer.handed_on(outputs, tensors, first_of_each(outputs))
            self.seconds += time.perf_counter() - begun_s
            if ahead:
                hand_on(tensors)
            begun_s = time.perf_counter()
            for layer, kind in zip(layers, kinds, strict=False):
                if _is_due(layer, newest):
                    self._end(layer, kind, begun.get(kind))
            self.seconds += time.perf_counter() - begun_s
        finally:
            for comparison in begun.values():
                comparison.abandon()
        return ahead

    def _begun(self, layer: Layer, inputs: Tensors, draw_key: int) -> tuple[LayerComparison, Tensors]:
        """A comparison, and the outputs of its microbatch in a plain loop."""
        comparison = LayerComparison(layer, inputs, draw_key, self.precision, self.tell)
        with _comparing(layer):
            return comparison, comparison.begin()

    def _end(self, layer: Layer, kind: tuple[int, str], comparison: LayerComparison | None) -> None:
        """Let the layer train as its kind does.

        Args:
            comparison: the one of its kind; None, or of another layer: that is known.
        """
        found, before = self._kinds.get(kind), layer.compared
        if found is None:
            assert comparison is not None
            found = self._compared(layer, comparison, kind[0])
            self._kinds[kind] = replace(found, unmoved={})
        if found.whole and not layer.whole:
            layer.compute_whole(found.whole)
        if before is None:
            layer.detached = found.detached
        else:
            self._hold_against(before, layer, found)
        layer.compared = found
        layer.tell, layer.aliases = self.tell, {}
        self.names.append(layer.name)
        self.whole.pop(layer.name, None)
        if layer.whole:
            self.whole[layer.name] = layer.whole

    def _compared(self, layer: Layer, comparison: LayerComparison, newest: int) -> Compared:
        with _comparing(layer):
            reason = comparison.end()
        if reason and not comparison.left:
            self._refuse_later(layer, f"it would have to be left to plain autograd now, as {reason}")
            self.tell(
                f"layer {layer.name}, with those of its kind, trains by plain autograd: {reason}. All gradients are"
                " formed in its backward pass: no schedule can put its weight gradients off, and freezing does not"
                " make its steps shorter"
            )
        return Compared(
            due=newest,
            whole=reason,
            detached=comparison.detached,
            attached=comparison.attached,
            modes=comparison.modes,
            unmoved=comparison.unmoved,
        )

    def compare_loss(self, loss: Loss, outputs: Tensors, targets: Tensors, draw_key: int, step: int) -> None:
        """Look at `loss` for a state that it keeps, unless that was done; as `compare` does.

        Args:
            outputs, targets: those of a microbatch, as `Loss.forward` takes them.

        Raises:
            JobError: it keeps one, or does what a loss must not.
        """
        newest = due(step)
        if loss.compared is None or loss.compared < newest:
            begun_s = time.perf_counter()
            with blamed("the comparison of the loss with plain autograd"):
                check_loss(loss, outputs, targets, draw_key)
            loss.compared = newest
            self.seconds += time.perf_counter() - begun_s

    def _hold_against(self, before: Compared, layer: Layer, found: Compared) -> None:
        """Refuse or tell what has become another since `layer` was compared before."""
        for name in changed(before.modes, found.modes):
            mode = "training" if found.modes.get(name) else "evaluation"
            self._refuse_later(layer, f"its {name or 'module'} is in {mode} mode now")
        for name in changed(before.unmoved, found.unmoved) if found.unmoved else ():
            self.tell(
                f"layer {layer.name} has changed its {name}, which is no state of the model: it is not saved, not"
                " undone with a step that is run again, and not moved. If what it computes depends on it, hold it in a"
                " persistent buffer (register_buffer)"
            )

    def _refuse_later(self, layer: Layer, what: str) -> None:
        if layer.compared is not None:
            raise JobError(
                f"layer {layer.name} does otherwise than when it was compared with plain autograd before: {what}. Which"
                " passes still did as before depends on the schedule: let it do the same from the first pass on, and"
                " choose by values, as torch.where does"
            )

    def taken(self, rank: int) -> LayersChecked | None:
        """The report of what was compared since the last call; None: nothing."""
        if not self.names:
            return None
        names, self.names = tuple(self.names), []
        took_s, self.seconds = self.seconds, 0.0
        whole = {name: self.whole[name] for name in names if name in self.whole}
        return LayersChecked(rank=rank, layers=names, whole=whole, seconds=took_s)


def _is_due(layer: Layer, newest: int) -> bool:
    """Whether a comparison of `layer` is due since step `newest`."""
    return layer.compared is None or layer.compared.due < newest


def _on_meta(layer: Layer, inputs: Tensors) -> bool:
    """Whether nothing is computed, as in an outline."""
    return any(t.is_meta for t in (*inputs, *layer.trained.values()))


def _may_differ(layer: Layer) -> bool:
    """Whether training may have other outputs than the plain loop, as with other kernels."""
    return (layer.compiled is not None and not layer.whole) or bool(layer.detached)


def _comparing(layer: Layer) -> AbstractContextManager[None]:
    return blamed(f"the comparison of layer {layer.name} with plain autograd")
