"""The loss after the last layer, as training computes it and goes back through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from workers.layers.backward import backward, ends_of
from workers.layers.blamed import blamed
from workers.layers.deferred.queue import WeightGradQueue
from workers.layers.layer import (
    NOTHING_FROZEN,
    Layer,
    Pass,
    Tensors,
    between_layers,
    each_once,
    input_gradients,
    leaf_of,
)
from workers.metrics.measure import Measure
from workers.models.loss import share_of_targets
from workers.models.trained_loss import LOSS, loss_beside
from workers.protocol.errors import JobError
from workers.reproducibility import rng
from workers.state.precision import autocast, boundary_dtype


class Loss:
    """The loss after the last layer, treated as a layer. What it trains is part of that layer.

    Args:
        layer: the last one.
        function: the loss, where nothing of it is trained.
        measure: tells of samples in evaluation; None: nothing.
    """

    def __init__(
        self,
        layer: Layer,
        function: Callable[..., Tensor],
        *,
        precision: str,
        device: torch.device,
        measure: Measure | None = None,
    ) -> None:
        self.layer = layer
        self.trained = loss_beside(layer.module)
        self.function = function if self.trained is None else self.trained
        self._known = False
        self.compared: int | None = None
        """The step from which on its newest look for a state was due (`layer_check/loss_state.py`)."""
        self._precision = precision
        self._cast = boundary_dtype(precision)
        self.device = device
        self._measure = measure
        self.scale = 1.0
        """Factor on the gradients that the next backward passes begin with."""
        self._forward_pass, self._backward_pass = blamed("the loss"), blamed("the backward pass of the loss")

    def forward(
        self,
        outputs: Tensors,
        targets: Tensors,
        draw_key: int,
        *,
        keep: bool,
        frozen: frozenset[str] = NOTHING_FROZEN,
    ) -> tuple[Tensor, Pass]:
        """The microbatch's mean loss, a detached scalar, and the pass to go back through.

        Args:
            frozen: as for the last layer.
        """
        of_layer = Pass(draw_key, (), None, WeightGradQueue(), frozen)
        loss = self.run(of_layer, outputs, targets, keep=keep, write=keep)
        if keep and not self._known:
            self.check_graph(loss)
        of_layer.outputs = (loss,) if keep else None
        return loss.detach(), of_layer

    def run(self, of_layer: Pass, outputs: Tensors, targets: Tensors, *, keep: bool, write: bool) -> Tensor:
        """The loss, with its graph if that is to be kept; the ends of that become the inputs of `of_layer`."""
        of_layer.inputs = each_once(outputs, lambda t: leaf_of(t, t.requires_grad and keep))
        with self._buffers(of_layer, write=write), torch.set_grad_enabled(keep):
            return self._value(of_layer, targets)

    @contextmanager
    def plain(self, outputs: Tensors, targets: Tensors, draw_key: int) -> Iterator[tuple[Tensors, Tensor]]:
        """Context manager: the ends of its graph and the loss, as in a plain loop, which goes back inside; what it does
        to buffers, there too, is kept."""
        done = Pass(
            draw_key, each_once(outputs, lambda t: leaf_of(t, t.requires_grad)), None, WeightGradQueue()
        )
        with self._buffers(done, write=True), torch.enable_grad():
            yield done.inputs, self._value(done, targets)

    def _buffers(self, done: Pass, *, write: bool) -> AbstractContextManager[object]:
        return nullcontext() if self.trained is None else self.layer.seen_buffers(done, write=write)

    def _value(self, done: Pass, targets: Tensors) -> Tensor:
        with (
            self._forward_pass,
            rng.keyed(done.draw_key, self.device),
            autocast(self._precision, self.device),
        ):
            # A loss in 16 bits would lose what a mean over many tokens is made of.
            given = (t.float() if t.dtype == self._cast else t for t in between_layers(done.inputs))
            loss = self.function(*given, *targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise JobError("the loss must be a scalar tensor, the mean over the microbatch")
        return loss

    def check_graph(self, loss: Tensor) -> None:
        """Check that the loss uses no parameters but those that are trained.

        Raises:
            JobError: it uses another.
        """
        self._known = True
        own = set() if self.trained is None else set(map(id, self.trained.parameters()))
        for leaf in ends_of([loss]).leaves:
            if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in own:
                raise JobError(
                    f"the loss uses a parameter {list(leaf.shape)} that nothing would train: return the module that"
                    " holds it as the loss itself, not a function that calls it, and have no closure of that module"
                    " refer to it, which a copy of the module would not follow"
                )

    def share(self, targets: Tensors) -> Tensor | None:
        """Share of the targets that the loss is a mean over; None: it does not say. See `share_of_targets`."""
        with self._forward_pass, torch.no_grad():
            return share_of_targets(self.function, targets)

    def measured(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Statistics of each sample, as `Measure.of_samples` has them."""
        if self._measure is None:
            return torch.empty((0,), dtype=torch.float64)
        with torch.no_grad():
            found = self._measure.of_samples(outputs, targets)
        expected = (targets[0].shape[0], self._measure.width)
        if tuple(found.shape) != expected:
            raise JobError(
                f"{type(self._measure).__name__}.of_samples returned {list(found.shape)}, and should return its numbers"
                f" of each sample, {list(expected)}"
            )
        return found

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """The mean loss in evaluation mode, a detached scalar."""
        module = self.function if isinstance(self.function, nn.Module) else None
        if module is not None:
            module.eval()
        try:
            return self.forward(outputs, targets, 0, keep=False)[0]
        finally:
            if module is not None:
                module.train()

    def backward(self, done: Pass, share: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The canonical gradient of each output of the last layer; None if the output carries none, `absent_like` of
        one that the loss does not use.

        Args:
            share: the microbatch's; None: 1.
        """
        assert done.outputs is not None
        (loss,) = done.outputs
        trained = {} if self.trained is None else dict(self.trained.named_parameters(LOSS))
        still = [name for name in trained if name in done.frozen]
        moving = [p for name, p in trained.items() if p.requires_grad and name not in still]
        leaves = [*{id(t): t for t in done.inputs if t.requires_grad}.values()]
        seed = torch.full_like(loss, self.scale)
        if share is not None:
            seed.mul_(share)
        # A checkpoint draws again as it recomputes, from the generator of the whole process.
        with self._backward_pass, rng.turn:
            backward([loss], [seed], inputs=[*leaves, *moving] if still else None)
        gradients = iter(input_gradients(done.inputs))
        return tuple(next(gradients) if t.requires_grad else None for t in done.inputs)
