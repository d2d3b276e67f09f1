"""One layer on its rank: forward, backward and weight gradient of single microbatches.

Every layer is an autograd graph of its own, from detached inputs to canonical outputs. So its numbers cannot
depend on whether its neighbours are on the same rank: there is no graph to cut. This module knows no schedule
and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.backward import backward, gradient_of
from workers.blamed import blamed
from workers.compiled.forward import CompiledForward, Traced, Untraceable
from workers.deferred.cover import cover
from workers.deferred.queue import WeightGradQueue, Workspace
from workers.protocol import JobError
from workers.reproducibility import rng
from workers.reproducibility.canonical import canonical
from workers.shards.weights import ComputeWeights
from workers.state.flat import FlatGradients, GradientBuffers
from workers.state.precision import autocast, boundary_dtype, cast_floats

Tensors = tuple[Tensor, ...]

NOTHING_FROZEN: frozenset[str] = frozenset()


@dataclass
class Pass:
    """What a layer keeps of one microbatch between its actions."""

    draw_key: int
    """Key of the forward pass's random draws; a recomputation repeats them."""
    inputs: Tensors
    """Leaves of the layer's graph."""
    outputs: Tensors | None
    """Roots of the graph; None if the activations were dropped, to be recomputed."""
    queue: WeightGradQueue
    frozen: frozenset[str] = NOTHING_FROZEN
    """Parameters whose gradient this microbatch does not compute."""
    root_grads: Tensors = ()
    """Kept only for parameters whose gradient needs a second walk of the graph."""


class Layer:
    """A built layer. Weight gradients accumulate in its parameters' `.grad`."""

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        *,
        precision: str,
        device: torch.device,
        workspace: Workspace,
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.device = device
        self._precision = precision
        self._cast = boundary_dtype(precision)
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        """The parameters that it trains, as it computes with them."""
        self.summed = GradientBuffers(self.trained)
        """Its gradients, side by side."""
        self.shared: ComputeWeights | None = None
        """Its weights, where siblings share out its states."""
        self.compiled: CompiledForward | None = None
        """Computes the forward passes of training; None: the module does, operation by operation."""
        self.deferral, self.uncovered = cover(module, workspace, self.summed.home)
        self._uncovered = {n: self.trained[n] for n in self.uncovered}
        self._covered = {n: p for n, p in self.trained.items() if n not in self._uncovered}
        self._buffers = _persistent_buffers(module)
        self._forward_pass = blamed(f"the forward pass of layer {name}")
        self._backward_pass = blamed(f"the backward pass of layer {name}")

    def forward(
        self, inputs: Tensors, draw_key: int, *, keep: bool, frozen: frozenset[str] = NOTHING_FROZEN
    ) -> tuple[Tensors, Pass]:
        """Run one microbatch.

        Args:
            inputs: canonical tensors, each [B, ...]; those with `requires_grad` set get a gradient.
            draw_key: keys the random draws.
            keep: whether to keep the activations; else `recompute` must precede `backward`.
            frozen: parameters whose gradient this microbatch neither computes nor prepares for. The same
                tensors carry gradients between layers, with the same bits.

        Returns:
            The canonical outputs, detached, with `requires_grad` set if they carry a gradient; and the pass.
        """
        leaves = tuple(_leaf(t, t.requires_grad) for t in inputs)
        versions = [t._version for t in leaves]
        # A walk that skips the uncovered matrices must still reach the covered ones: the other factor of a
        # product may depend on uncovered ones only.
        queue = WeightGradQueue(anchored=bool(self._uncovered))
        if keep:
            outputs = self._train(leaves, draw_key, queue, frozen, write_buffers=True)
        else:
            with torch.no_grad():
                outputs = self._train(leaves, draw_key, queue, frozen, write_buffers=True)
        if [t._version for t in leaves] != versions:
            raise JobError(
                f"layer {self.name} changes its input in place: the layer before may need it, and a recomputation would"
                " start from the changed one. Use the operation that returns a new tensor, or do both in one layer"
            )
        # Derived from the layer's parameters: with the activations dropped, autograd cannot tell.
        carries = bool(self.trained) or any(t.requires_grad for t in leaves)
        detached = tuple(_leaf(canonical(t), carries) for t in outputs)
        return detached, Pass(draw_key, leaves, outputs if keep else None, queue, frozen)

    @torch.no_grad()
    def evaluate(self, inputs: Tensors) -> Tensors:
        """Forward pass in evaluation mode: no draws, no gradients, no buffer changes."""
        self.module.eval()
        try:
            return tuple(canonical(t) for t in self._run(self.module, inputs, 0, WeightGradQueue()))
        finally:
            self.module.train()

    def recompute(self, done: Pass) -> None:
        """Recompute the activations that `forward` dropped, with the same draws and unchanged buffers."""
        assert done.outputs is None, f"layer {self.name}: activations are there already"
        with torch.enable_grad():
            done.outputs = self._train(
                done.inputs, done.draw_key, done.queue, done.frozen, write_buffers=False
            )

    def backward(self, done: Pass, grads: Tensors, *, weights: bool) -> Tensors:
        """Input gradient: walk the graph and queue the weight gradients; with `weights`, compute them too.

        Args:
            grads: the canonical gradient of each output that carries one, in order. These are the
                floating-point outputs, if the layer has weights or its inputs carry gradients.

        Returns:
            The canonical gradient of each input that carries one, in order; zeros for unused inputs.
        """
        assert done.outputs is not None, f"layer {self.name}: backward before its activations were recomputed"
        if weights:
            done.queue.at_once = True
        leaves = [t for t in done.inputs if t.requires_grad]
        carrying = [o for o in done.outputs if o.is_floating_point()] if self.trained or leaves else []
        roots = [(o, g) for o, g in zip(carrying, grads, strict=True) if o.requires_grad]
        if roots:
            split = any(n not in done.frozen for n in self._uncovered)
            targets = [*leaves, *(p for n, p in self._covered.items() if n not in done.frozen)]
            if targets:
                with self._backward_pass:
                    backward(
                        [o for o, _ in roots],
                        [g for _, g in roots],
                        retain_graph=split,
                        inputs=targets if self._uncovered else None,
                    )
            if split:
                done.root_grads = tuple(g for _, g in roots)
                done.outputs = tuple(o for o, _ in roots)
        if not done.root_grads:
            done.outputs = None
        gradients = tuple(canonical(gradient_of(t)) for t in leaves)
        for leaf in leaves:
            leaf.grad = None
        if weights:
            self.weight_grad(done)
        return gradients

    def weight_grad(self, done: Pass) -> None:
        """Compute the weight gradients that `backward` queued and add them to `.grad`."""
        with self._backward_pass:
            done.queue.drain()
        done.queue.closed = True
        if done.root_grads:
            assert done.outputs is not None
            targets = [p for n, p in self._uncovered.items() if n not in done.frozen]
            with self._backward_pass:
                backward(done.outputs, done.root_grads, inputs=targets)
            done.outputs, done.root_grads = None, ()

    def gradients(self) -> FlatGradients:
        """The gradients summed in its parameters, which are final in this step; side by side from here on. Where
        siblings share out its states, those of this rank's shard."""
        return self.summed.gathered(None if self.shared is None else self.shared.own)

    def drop_gradients(self) -> None:
        """Drop the gradients summed in its parameters."""
        self.summed.drop()

    def _train(
        self,
        inputs: Tensors,
        draw_key: int,
        queue: WeightGradQueue,
        frozen: frozenset[str],
        *,
        write_buffers: bool,
    ) -> Tensors:
        if self.compiled is not None:
            try:
                return self._train_compiled(
                    self.compiled, inputs, draw_key, queue, frozen, write_buffers=write_buffers
                )
            except Untraceable:
                # Nothing has run. The way depends on the layer as it is now, not on what it was before.
                pass
        # Not the uncovered ones: torch's product of a stack and a matrix depends on whether the matrix has a
        # gradient, which may change the last bits. The backward walks leave them out instead.
        still = [self._covered[name] for name in frozen if name in self._covered]
        for parameter in still:
            parameter.requires_grad_(False)
        try:
            return self._run_on_buffers(self.module, inputs, draw_key, queue, write_buffers=write_buffers)
        finally:
            for parameter in still:
                parameter.requires_grad_(True)

    def _train_compiled(
        self,
        compiled: CompiledForward,
        inputs: Tensors,
        draw_key: int,
        queue: WeightGradQueue,
        frozen: frozenset[str],
        *,
        write_buffers: bool,
    ) -> Tensors:
        """`_train` with one and the same compiled function, whatever is frozen, kept, or carries a gradient."""
        compiled.frozen = frozenset(id(self.trained[name]) for name in frozen if name in self.trained)
        with torch.enable_grad():
            return self._run_on_buffers(
                compiled, self._requiring(inputs), draw_key, queue, write_buffers=write_buffers
            )

    def _requiring(self, inputs: Tensors) -> Tensors:
        """`inputs` as a compiled function takes them: with a gradient wherever a layer before this one may have any."""
        if self.index == 0:
            return inputs
        return tuple(t if t.requires_grad or not t.is_floating_point() else _leaf(t, True) for t in inputs)

    def warm(self, compiled: CompiledForward, inputs: Callable[[], Tensors]) -> list[Traced]:
        """Trace what `compiled` will compute in training, without running it; as `CompiledForward.warm`.

        Args:
            inputs: makes a microbatch's.
        """
        with (
            torch.enable_grad(),
            autocast(self._precision, self.device),
            _attributes_kept(self.module),
        ):
            return compiled.warm(lambda: cast_floats(self._requiring(inputs()), self._cast))

    def _run_on_buffers(
        self,
        call: Callable[..., object],
        inputs: Tensors,
        draw_key: int,
        queue: WeightGradQueue,
        *,
        write_buffers: bool,
    ) -> Tensors:
        with self._buffers_copied(write=write_buffers) if self._buffers else nullcontext():
            return self._run(call, inputs, draw_key, queue)

    @contextmanager
    def _buffers_copied(self, *, write: bool) -> Iterator[None]:
        """Autograd keeps the buffers that a forward pass read, and the next microbatch would change them. So each pass
        gets a copy, whose values are copied back afterwards if they are to be written."""
        for owner, name, buffer in self._buffers:
            owner._buffers[name] = buffer.clone()
        try:
            yield
            if write:
                with torch.no_grad():
                    for owner, name, buffer in self._buffers:
                        buffer.copy_(getattr(owner, name))
        finally:
            for owner, name, buffer in self._buffers:
                owner._buffers[name] = buffer

    def _run(
        self, call: Callable[..., object], inputs: Tensors, draw_key: int, queue: WeightGradQueue
    ) -> Tensors:
        self.deferral.queue = queue
        with self._forward_pass, rng.keyed(draw_key, self.device):
            inputs = cast_floats(inputs, self._cast)
            if self._precision == "float32":
                outputs = call(*inputs)
            else:
                with autocast(self._precision, self.device):
                    outputs = call(*inputs)
        if isinstance(outputs, Tensor):
            return cast_floats((outputs,), self._cast)
        if isinstance(outputs, tuple | list) and outputs and all(isinstance(t, Tensor) for t in outputs):
            return cast_floats(tuple(outputs), self._cast)
        raise JobError(
            f"layer {self.name} returned {type(outputs).__name__}; a layer returns a tensor or a tuple of tensors"
        )


class Loss:
    """The loss after the last layer, treated as a layer without weights."""

    def __init__(self, function: Callable[..., Tensor], *, precision: str, device: torch.device) -> None:
        self._function = function
        self._precision = precision
        self._cast = boundary_dtype(precision)
        self._device = device
        self.scale = 1.0
        """Factor on the gradients that the next backward passes begin with."""
        self._forward_pass, self._backward_pass = blamed("the loss"), blamed("the backward pass of the loss")

    def forward(
        self, outputs: Tensors, targets: Tensors, draw_key: int, *, keep: bool
    ) -> tuple[Tensor, Pass]:
        """The microbatch's mean loss, a detached scalar, and the pass to go back through."""
        leaves = tuple(_leaf(t, t.requires_grad and keep) for t in outputs)
        with (
            self._forward_pass,
            torch.set_grad_enabled(keep),
            rng.keyed(draw_key, self._device),
            autocast(self._precision, self._device),
        ):
            # A loss in 16 bits would lose what a mean over many tokens is made of.
            loss = self._function(*(t.float() if t.dtype == self._cast else t for t in leaves), *targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise JobError("the loss must be a scalar tensor, the mean over the microbatch")
        return loss.detach(), Pass(draw_key, leaves, (loss,) if keep else None, WeightGradQueue())

    def backward(self, done: Pass) -> tuple[Tensor | None, ...]:
        """The canonical gradient of each output of the last layer; None if the output carries none."""
        assert done.outputs is not None
        (loss,) = done.outputs
        with self._backward_pass:
            backward([loss], [torch.full_like(loss, self.scale)])
        return tuple(canonical(gradient_of(t)) if t.requires_grad else None for t in done.inputs)


def _persistent_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """(module that holds it, its name there, buffer) of every buffer that is state, not a constant."""
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    ]


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a forward pass that is traced sets on its modules: a counter, for instance."""
    before = [(part.__dict__, dict(part.__dict__)) for part in module.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            for name in attributes.keys() - kept.keys():
                del attributes[name]
            attributes.update(kept)


def _leaf(tensor: Tensor, carries: bool) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if carries and leaf.is_floating_point() else leaf
