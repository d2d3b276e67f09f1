"""One layer on its rank: forward, backward and weight gradient of single microbatches.

Every layer is an autograd graph of its own, from detached inputs to canonical outputs. So its numbers cannot
depend on whether its neighbours are on the same rank: there is no graph to cut. This module knows no schedule
and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.absent import absent_like, is_absent
from workers.layers.backward import backward
from workers.layers.blamed import blamed
from workers.layers.compiled.forward import CompiledForward, Traced, Untraceable
from workers.layers.deferred.cover import cover
from workers.layers.deferred.queue import WeightGradQueue, Workspace
from workers.layers.sharded_weights import ComputeWeights
from workers.models.trained_loss import layer_alone
from workers.protocol.errors import JobError
from workers.reproducibility import rng
from workers.reproducibility.canonical import canonical, first_of_each, has_channels_last
from workers.state.flat import FlatGradients, GradientBuffers
from workers.state.precision import autocast, boundary_dtype, cast_floats

Tensors = tuple[Tensor, ...]

NOTHING_FROZEN: frozenset[str] = frozenset()


@dataclass
class Pass:
    """State that a layer keeps of one microbatch between its actions."""

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
    buffers: Tensors = ()
    """The persistent buffers as the forward pass found them, for a recomputation."""
    whole: bool = False
    """Whether stock autograd forms all gradients in one walk of the graph; nothing is queued."""


@dataclass(frozen=True)
class Compared:
    """A comparison of a layer, or of one of its kind, with plain autograd."""

    due: int
    """Step from which on it was due."""
    whole: str
    """Reason why the layer is left to plain autograd; empty if it is not."""
    detached: frozenset[int]
    """Outputs that carry no gradient though numbers of their kind could: they share memory with one that does."""
    attached: frozenset[int]
    """Outputs that carry a gradient in a plain loop."""
    modes: Mapping[str, bool]
    """By name, whether a module was in training mode after a pass."""
    unmoved: Mapping[str, Any]
    """By name, the values that attributes held through all of the comparison; empty if another layer was compared."""


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
        self._fixed = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        self.summed = GradientBuffers(self.trained)
        """Its gradients, side by side."""
        self.shared: ComputeWeights | None = None
        """Its weights, where siblings share out its states."""
        self.compiled: CompiledForward | None = None
        """Computes the forward passes of training; None: the module does, operation by operation."""
        self._cover = cover(layer_alone(module), workspace, self.summed.home)
        self.deferral, self.uncovered = self._cover.deferral, self._cover.uncovered
        self.aliases: dict[str, tuple[Tensor, str]] = {}
        """Tensors of its attributes that lay in the memory of a parameter or buffer when it was built, and its name."""
        self.compared: Compared | None = None
        """Its newest comparison with plain autograd (`layer_check/`)."""
        self.tell: Callable[[str], None] | None = None
        """Takes what a user should know of it, once it was compared."""
        self.whole = ""
        """Why stock autograd forms all its gradients in one walk of the graph, in B or I; empty: they are deferred."""
        self._uncovered = {n: self.trained[n] for n in self.uncovered}
        self._covered = {n: p for n, p in self.trained.items() if n not in self._uncovered}
        self._buffers = _persistent_buffers(module)
        self.detached: frozenset[int] = frozenset()
        """Outputs that carry no gradient though numbers of their kind could; known once it was compared."""
        self._firsts: tuple[int, ...] | None = None
        """Per output, the first that is the same tensor; known from the first pass on."""
        self._channels_last: tuple[bool, ...] = ()
        """Per output, whether it is an image whose channels lie last; known then too."""
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
            The canonical outputs, detached, with `requires_grad` set if they carry a gradient; and the pass. Outputs
            that are one tensor stay one, so that all who use it add their gradients in the order of a plain loop.
        """
        leaves = each_once(inputs, lambda t: leaf_of(t, t.requires_grad))
        versions = [t._version for t in leaves]
        done = Pass(draw_key, leaves, None, self._queue(), frozen)
        if not keep:
            done.buffers = tuple(buffer.clone() for _, _, buffer in self._buffers)
        # What is left to autograd may take gradients in its forward pass.
        with torch.set_grad_enabled(keep or bool(self.whole)):
            outputs = self._train(done, write_buffers=True)
        self._refuse_changed(leaves, versions)
        self._refuse_switched()
        if keep:
            self._refuse_attached(outputs)
            done.outputs = outputs
        firsts, last = first_of_each(outputs), tuple(map(has_channels_last, outputs))
        if self._firsts is None:
            self._firsts, self._channels_last = firsts, last
        elif self.compiled is None or self.whole:
            self._refuse_other_form(firsts, last)
        return self.handed_on(outputs, leaves, self._firsts), done

    def _refuse_other_form(self, firsts: tuple[int, ...], channels_last: tuple[bool, ...]) -> None:
        if firsts != self._firsts:
            raise JobError(
                f"layer {self.name} returns one tensor as several outputs in some passes only: return a copy, as"
                " clone() makes it, in all"
            )
        if channels_last != self._channels_last:
            raise JobError(
                f"layer {self.name} returns an image whose channels lie last in memory in some passes only, and the"
                " last bits of the next layer depend on it: return y.contiguous() in all"
            )

    def handed_on(self, outputs: Tensors, inputs: Tensors, firsts: Sequence[int]) -> Tensors:
        """Tensors that the next layer gets for `outputs`.

        Args:
            inputs: those of the pass.
            firsts: per output, the first that is the same tensor.
        """
        # Derived from the layer's parameters: with the activations dropped, autograd cannot tell.
        carries = bool(self.trained) or any(t.requires_grad for t in inputs)
        found = [leaf_of(canonical(t), carries and n not in self.detached) for n, t in enumerate(outputs)]
        return tuple(found[first] for first in firsts)

    def forward_frozen(self, inputs: Tensors, draw_key: int, *, training: bool) -> Tensors:
        """Run one microbatch that no backward pass follows, here and in all layers before this one.

        Args:
            training: with draws, and with changes of buffers; else as `evaluate`.

        Returns:
            The canonical outputs, which carry no gradient.
        """
        if not training:
            return self.evaluate(inputs)
        outputs, _ = self.forward(inputs, draw_key, keep=False)
        return tuple(t.detach() for t in outputs)

    @torch.no_grad()
    def evaluate(self, inputs: Tensors) -> Tensors:
        """Forward pass in evaluation mode: no draws, no gradients, no buffer changes."""
        self.module.eval()
        seen = Pass(0, inputs, None, WeightGradQueue())
        try:
            with self.seen_buffers(seen, write=False):
                return tuple(canonical(t) for t in self._run(self.module, inputs, 0, seen.queue))
        finally:
            self.module.train()

    def recompute(self, done: Pass) -> None:
        """Recompute the activations that `forward` dropped, with its draws and from the buffers that it found; change
        none."""
        assert done.outputs is None, f"layer {self.name}: activations are there already"
        with torch.enable_grad():
            done.outputs = self._train(done, write_buffers=False)
        self._refuse_attached(done.outputs)
        done.buffers = ()

    def backward(self, done: Pass, grads: Tensors, *, weights: bool) -> Tensors:
        """Input gradient: walk the graph and queue the weight gradients; with `weights`, compute them too.

        Args:
            grads: the canonical gradient of each output that carries one, in order. These are the
                floating-point and complex outputs but for `detached` ones, if the layer has weights or its inputs carry
                gradients. `absent` ones reach nothing.

        Returns:
            The canonical gradient of each input that carries one, in order; `absent_like` that of an unused input, and
            of one that is there for the second time.
        """
        assert done.outputs is not None, f"layer {self.name}: backward before its activations were recomputed"
        # A recomputation inside the graph (a checkpoint) defers for this microbatch too.
        self.deferral.queue = queue = done.queue
        queue.walked, queue.at_once = True, weights
        leaves = [*{id(t): t for t in done.inputs if t.requires_grad}.values()]
        carrying: list[Tensor] = []
        if self.trained or leaves:
            carrying = [
                o for n, o in enumerate(done.outputs) if carries_gradient(o) and n not in self.detached
            ]
        roots = [(o, g) for o, g in zip(carrying, grads, strict=True) if o.requires_grad and not is_absent(g)]
        if roots:
            parameters = {n: p for n, p in self.trained.items() if n not in done.frozen}
            later = [] if weights or done.whole else [n for n in self._uncovered if n in parameters]
            targets = [*leaves, *(p for n, p in parameters.items() if n not in later)]
            if targets:
                # What is covered and frozen has no gradient here anyway. A whole graph may hold a reentrant checkpoint,
                # which takes no choice of parameters: the frozen ones' gradients are formed and dropped.
                frozen = [p for n, p in self.trained.items() if n in done.frozen] if done.whole else []
                before = [p.grad for p in frozen]
                for parameter in frozen:
                    parameter.grad = None
                chosen = bool(later) or (
                    bool(self._uncovered) and not done.whole and len(parameters) < len(self.trained)
                )
                # A checkpoint draws again as it recomputes, from the generator of the whole process.
                with self._backward_pass, rng.turn if self.whole else nullcontext():
                    backward(
                        [o for o, _ in roots],
                        [g for _, g in roots],
                        retain_graph=bool(later),
                        inputs=targets if chosen else None,
                    )
                for parameter, grad in zip(frozen, before, strict=True):
                    parameter.grad = grad
            if later:
                done.root_grads = tuple(g for _, g in roots)
                done.outputs = tuple(o for o, _ in roots)
        if not done.root_grads:
            done.outputs = None
        gradients = input_gradients(done.inputs)
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

    def compute_whole(self, why: str) -> None:
        """Leave all gradients of the microbatches that follow to stock autograd, in one walk of the graph.

        Args:
            why: said of the layer, as in `a Linear has a hook on a weight`.
        """
        self.whole = why
        self._cover.lift()

    def plain_forward(self, inputs: Tensors, draw_key: int) -> tuple[Tensors, Tensors]:
        """A forward pass of the module as its builder made it, by stock autograd; writes buffers.

        Returns:
            (leaves, outputs): the ends of its graph, which is to be walked inside `as_made`.
        """
        leaves = each_once(inputs, lambda t: leaf_of(t, t.requires_grad))
        versions = [t._version for t in leaves]
        done = Pass(draw_key, leaves, None, self._queue())
        with self.as_made(), torch.enable_grad(), self.seen_buffers(done, write=True):
            outputs = self._run(self.module, between_layers(leaves), draw_key, done.queue)
        self._refuse_changed(leaves, versions)
        self._refuse_switched()
        if self._cover.replaced and not self.whole:
            self.compute_whole(self._cover.replaced)
        return leaves, outputs

    def _refuse_changed(self, leaves: Tensors, versions: list[int]) -> None:
        """Raises:
        JobError: a forward pass has changed its inputs, whose versions were these.
        """
        if [t._version for t in leaves] != versions:
            raise JobError(self.changes_input())

    def _refuse_attached(self, outputs: Tensors) -> None:
        """Raises:
        JobError: an output carries a gradient that did not when the layer was compared. Whoever takes it gives none.
        """
        if self.compiled is not None and not self.whole:
            return  # its inputs all carry gradients
        for number in self.detached:
            if outputs[number].requires_grad:
                raise JobError(
                    f"layer {self.name} has an output {number} that carries a gradient in some passes only: detach it"
                    " in all, or in none"
                )

    def changes_input(self) -> str:
        """Error text for a layer that changes its inputs."""
        return (
            f"layer {self.name} changes its input in place: the layer before may need it, and a recomputation would"
            " start from the changed one. Use the operation that returns a new tensor, or do both in one layer"
        )

    @property
    def buffers(self) -> Tensors:
        """The persistent buffers, which forward passes of training change."""
        return tuple(buffer for _, _, buffer in self._buffers)

    def as_made(self) -> AbstractContextManager[None]:
        """Context manager: the module is as its builder made it inside."""
        return self._cover.off()

    def _queue(self) -> WeightGradQueue:
        # A walk that skips the uncovered matrices must still reach the covered ones: the other factor of a
        # product may depend on uncovered ones only.
        return WeightGradQueue(anchored=bool(self._uncovered))

    def _train(self, done: Pass, *, write_buffers: bool) -> Tensors:
        """Run the forward pass of `done`, whose queue, buffers and way to the gradients are set as it needs them."""
        if self.compiled is not None and not self.whole:
            try:
                return self._train_compiled(self.compiled, done, write_buffers=write_buffers)
            except Untraceable:
                # Nothing has run. The way depends on the layer as it is now, not on what it was before.
                pass
        if not self.whole:
            outputs = self._train_deferring(done, write_buffers=write_buffers)
            if outputs is not None:
                return outputs
            done.queue = self._queue()
        done.whole = True
        with self.seen_buffers(done, write=write_buffers):
            return self._run(self.module, between_layers(done.inputs), done.draw_key, done.queue)

    def _train_deferring(self, done: Pass, *, write_buffers: bool) -> Tensors | None:
        """`_train` with the covered modules deferring; None: the pass met what none understands."""
        # Not the uncovered ones: torch's product of a stack and a matrix depends on whether the matrix has a
        # gradient, which may change the last bits. The backward walks leave them out instead.
        still = [self._covered[name] for name in done.frozen if name in self._covered]
        for parameter in still:
            parameter.requires_grad_(False)
        try:
            # Entered for each layer and microbatch: most have no buffers.
            seen = (
                self.seen_buffers(done, write=write_buffers) if self._buffers else nullcontext(lambda: None)
            )
            with seen as keep_old:
                outputs = self._run(self.module, between_layers(done.inputs), done.draw_key, done.queue)
                if not done.queue.odd:
                    return outputs
                keep_old()
        finally:
            for parameter in still:
                parameter.requires_grad_(True)
        self.compute_whole(done.queue.odd)
        if self.tell is not None:
            self.tell(f"layer {self.name} trains by plain autograd from here on: {done.queue.odd}")
        return None

    def _train_compiled(self, compiled: CompiledForward, done: Pass, *, write_buffers: bool) -> Tensors:
        """`_train` with one and the same compiled function, whatever is frozen, kept, or carries a gradient."""
        compiled.frozen = frozenset(id(self.trained[name]) for name in done.frozen if name in self.trained)
        with torch.enable_grad(), self.seen_buffers(done, write=write_buffers):
            return self._run(compiled, self._requiring(done.inputs), done.draw_key, done.queue)

    def _requiring(self, inputs: Tensors) -> Tensors:
        """`inputs` as a compiled function takes them: with a gradient wherever a layer before this one may have any."""
        if self.index == 0:
            return inputs
        return tuple(t if t.requires_grad or not carries_gradient(t) else leaf_of(t, True) for t in inputs)

    def warm(self, compiled: CompiledForward, inputs: Callable[[], Tensors]) -> list[Traced]:
        """Trace what `compiled` will compute in training, without running it; as `CompiledForward.warm`.

        Args:
            inputs: makes a microbatch's.
        """
        with (
            torch.enable_grad(),
            autocast(self._precision, self.device),
            attributes_kept(self.module),
        ):
            return compiled.warm(lambda: cast_floats(self._requiring(inputs()), self._cast))

    @contextmanager
    def seen_buffers(self, done: Pass, *, write: bool) -> Iterator[Callable[[], None]]:
        """Autograd keeps the buffers that a forward pass read, and the next microbatch would change them. So each pass
        gets copies, whose values are copied back afterwards if they are to be written. A recomputation starts from
        those that its first pass found.

        Yields:
            A function that has nothing written.
        """
        found = done.buffers or tuple(buffer for _, _, buffer in self._buffers)
        copies: dict[int, Tensor] = {}
        for (owner, name, buffer), seen in zip(self._buffers, found, strict=True):
            # Modules that share one go on sharing it.
            copied = owner._buffers[name] = copies.setdefault(id(buffer), seen.clone())
            for noted, value in buffer.__dict__.items():
                setattr(copied, noted, value)
        written = [write]
        try:
            yield written.clear
            if written and write:
                with torch.no_grad():
                    for owner, name, buffer in self._buffers:
                        left = self._like(buffer, getattr(owner, name), name)
                        buffer.copy_(left)
                        for noted, value in left.__dict__.items():
                            setattr(buffer, noted, value)
        finally:
            for owner, name, buffer in self._buffers:
                owner._buffers[name] = buffer

    def _like(self, buffer: Tensor, written: Tensor | None, name: str) -> Tensor:
        """`written`, if it fits the buffer: copying would cast and broadcast it without a word."""
        if written is not None and written.shape == buffer.shape and written.dtype == buffer.dtype:
            return written
        now = "None" if written is None else f"{written.dtype} {list(written.shape)}"
        raise JobError(
            f"layer {self.name} gives its buffer {name} another shape or type in its forward pass, {now} instead of"
            f" {buffer.dtype} {list(buffer.shape)}: register it with the shape and type that it is to have"
        )

    def _refuse_switched(self) -> None:
        """Raises:
        JobError: a forward pass has switched gradients of a parameter on or off for good.
        """
        for name, parameter in self.trained.items():
            if not parameter.requires_grad:
                raise JobError(
                    f"layer {self.name} switches requires_grad of its parameter {name} off in its forward pass, while"
                    " other microbatches are still to go back: use detach() where it shall not be trained, or freeze it"
                    " by the job ([freeze])"
                )
        for name, parameter in self._fixed.items():
            if parameter.requires_grad:
                raise JobError(
                    f"layer {self.name} switches requires_grad of its parameter {name} on in its forward pass: build it"
                    " with requires_grad = True, and use detach() where it shall not be trained"
                )

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
        found = (outputs,) if isinstance(outputs, Tensor) else outputs
        if isinstance(found, tuple | list) and found and all(isinstance(t, Tensor) for t in found):
            if any(t.layout is not torch.strided or t.is_nested for t in found):
                raise JobError(
                    f"layer {self.name} returns a sparse or nested tensor: what goes from layer to layer has one shape"
                    " and is dense; return its values, and what tells where they belong, as tensors of their own"
                )
            return cast_floats(tuple(found), self._cast)
        returned = type(outputs).__name__
        if isinstance(found, tuple | list) and found:
            at = next(i for i, t in enumerate(found) if not isinstance(t, Tensor))
            returned = f"a {returned} with {type(found[at]).__name__} at {at}"
        raise JobError(
            f"layer {self.name} returned {returned}; a layer returns a tensor or a tuple of tensors"
        )


def between_layers(leaves: Tensors) -> Tensors:
    """The inputs as a layer in the middle of a model has them: no leaves, which hooks, autocast and in-place operations
    treat in other ways."""
    return each_once(leaves, lambda t: t.view_as(t) if t.requires_grad else t)


def each_once(tensors: Tensors, make: Callable[[Tensor], Tensor]) -> Tensors:
    """The results of `make`; a tensor that is there several times has one."""
    if len(tensors) == 1:
        return (make(tensors[0]),)
    made: dict[int, Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in made:
            made[id(tensor)] = make(tensor)
    return tuple(made[id(tensor)] for tensor in tensors)


def input_gradients(inputs: Tensors) -> Tensors:
    """The canonical gradient of each of the leaves `inputs` that carries one, which gives it up; `absent_like` of one
    that nothing used, or that is there for the second time."""
    found: list[Tensor] = []
    for leaf in inputs:
        if leaf.requires_grad:
            found.append(absent_like(leaf) if leaf.grad is None else canonical(leaf.grad))
            leaf.grad = None
    return tuple(found)


def carries_gradient(tensor: Tensor) -> bool:
    """Whether a gradient can belong to numbers of its kind."""
    return tensor.is_floating_point() or tensor.is_complex()


def _persistent_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """(module that holds it, its name there, buffer) of every buffer that is state, not a constant."""
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    ]


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a forward pass that is traced sets on its modules: a counter, for instance."""
    before = [(part.__dict__, dict(part.__dict__)) for part in module.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            for name in attributes.keys() - kept.keys():
                del attributes[name]
            attributes.update(kept)


def leaf_of(tensor: Tensor, carries: bool) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if carries and carries_gradient(leaf) else leaf
