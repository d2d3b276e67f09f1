"""One layer in the way of training and in that of a plain loop.

Training defers weight gradients, recomputes activations, and has several microbatches in flight. A layer may do
something that none of this understands. So it makes two microbatches both ways, from the same inputs, draws and
buffers: what comes out must be the same numbers. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workers.layer_check.numbers import Numbers, difference
from workers.layer_check.writes import Writes, watched
from workers.layers.backward import backward, ends_of
from workers.layers.blamed import blamed
from workers.layers.layer import Layer, Tensors, carries_gradient, input_gradients
from workers.process.torch_modes import check_modes_kept
from workers.protocol.errors import JobError
from workers.reproducibility import rng
from workers.reproducibility.canonical import canonical, first_of_each, has_channels_last
from workers.state.flat import SetAside
from workers.state.hidden import bits, hidden_tensors, hidden_values, is_plain
from workers.state.own_memory import share

NEAR = {"float32": 1e-4, "float16": 2.0**-6, "bfloat16": 2.0**-4, "bfloat16-autocast": 2.0**-4}
"""By precision, by how much of its length a tensor may differ where kernels do: those of compiled layers."""
NEAR_SUMS = {"float32": 0.0, "float16": 2.0**-9, "bfloat16": 2.0**-6, "bfloat16-autocast": 2.0**-6}
"""The same of a weight gradient, a sum of products that a plain loop rounds to 16 bits, and ranks do not."""


_NOT_THERE = object()


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names whose value is another, or gone. New ones are none: notes may grow."""
    return [name for name, value in before.items() if after.get(name, _NOT_THERE) != value]


def outputs_of(layer: Layer, inputs: Tensors, draw_key: int) -> Tensors:
    """The outputs of a plain loop's forward pass, after which the layer is as it was."""
    buffers = [buffer.clone() for buffer in layer.buffers]
    try:
        return layer.plain_forward(inputs, draw_key)[1]
    finally:
        _put_back(layer, buffers)


def _put_back(layer: Layer, buffers: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, before in zip(layer.buffers, buffers, strict=True):
            buffer.copy_(before)


class LayerComparison:
    """One layer in training's way and in that of a plain loop."""

    def __init__(
        self, layer: Layer, inputs: Tensors, draw_key: int, precision: str, tell: Callable[[str], None]
    ) -> None:
        self._layer = layer
        self.left = layer.whole
        """Why the layer was left to plain autograd before."""
        self._keys = (draw_key, rng.key(draw_key, "another microbatch"))
        rolled = [_rolled(t) for t in inputs]
        self._inputs = (inputs, tuple(rolled[first] for first in first_of_each(inputs)))
        self._tell = tell
        self._near = 0.0 if layer.compiled is None else NEAR[precision]
        # Ranks add products of 16 bits up in 32; a plain loop rounds each of them.
        self._near_sums = max(self._near, NEAR_SUMS[precision])
        self._backward = blamed(f"the backward pass of layer {layer.name}")
        self._draws_back = self._writes_back = False
        self._aside: SetAside | None = None
        """The gradients of the step that is under way, while the comparison is."""
        self._buffers: list[Tensor] = []
        """Values of the buffers before it."""
        self._before: dict[str, Any] = {}
        """The hidden values before it."""
        self._first: list[str] = []
        """Prints of what the first pass of all has made."""
        self._after_second: dict[str, Any] = {}
        """The hidden values after the first pass of all, from the second microbatch."""
        self._laid_out_otherwise = False
        self._attached: set[int] = set()
        self._detached: set[int] = set()
        self._made = _named_persistently(layer.module)
        self.modes: dict[str, bool] = {}
        """By name, whether a module is in training mode after a pass; once compared."""
        self.unmoved: dict[str, Any] = {}
        """By name, what attributes held through all passes; once compared."""

    @property
    def detached(self) -> frozenset[int]:
        """The outputs that lie, without a gradient, in the memory of one that carries one, or of such an input; once
        compared. Others may carry one in other passes."""
        return frozenset(self._detached - self._attached)

    @property
    def attached(self) -> frozenset[int]:
        """Outputs that carry a gradient, once compared."""
        return frozenset(self._attached)

    def begin(self) -> Tensors:
        """Make the first passes, up to the plain loop's first forward pass, and return the outputs of that. `end` or
        `abandon` follows, before the layer does anything else."""
        layer = self._layer
        self._aside = layer.summed.set_aside()
        self._buffers = [buffer.clone() for buffer in layer.buffers]
        try:
            self._refuse_modes()
            self._before = self._hidden()
            self._first = self._refuse_writes(self._buffers)
            self._loop = self._plain(self._buffers)
            return next(self._loop)
        except BaseException:
            self.abandon()
            raise

    def end(self) -> str:
        """Compare; returns why the layer is left to plain autograd, if it is."""
        layer = self._layer
        try:
            # What a step needs no scratch for, such as one microbatch of a parameter, shall not keep any.
            with layer.deferral.workspace.lent(layer.deferral.accumulators.values()):
                return self._compare(self._buffers)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Have the layer as it was before `begin`; once it is, nothing happens."""
        if self._aside is not None:
            self._restore(self._buffers)
            self._layer.summed.take_back(self._aside)
            self._aside = None

    def _compare(self, buffers: Sequence[Tensor]) -> str:
        layer = self._layer
        expected = _ended(self._loop)
        if layer.trained and not expected.weight_grads:
            self._tell(
                f"no gradient reaches layer {layer.name}, though it has"
                f" {len(layer.trained)} parameters to train: they stay as they are"
            )
        if self._laid_out_otherwise:
            self._tell(
                f"layer {layer.name} returns a tensor that is not contiguous, and the next layer gets one that is: the"
                " last bits of what it makes of it may be others than in a plain loop. With y.contiguous() they are not"
            )
        reason = layer.whole
        if not reason:
            reason = self._problem(buffers, expected)
            if reason:
                layer.compute_whole(reason)
            else:
                reason = layer.whole  # found while it ran
        if reason:
            problem = self._problem(buffers, expected)
            if problem:
                raise JobError(self._why_not(buffers, expected, problem))
        if self._after_second != self._before:
            self._refuse_first_pass(buffers, self._before, self._first)
        return reason

    def _problem(self, buffers: Sequence[Tensor], expected: Numbers) -> str:
        """Problem of training with activations kept, or recomputed; empty: none."""
        for keep in (True, False):
            try:
                if problem := self._in_training(buffers, keep=keep).differs(
                    expected, self._near, self._near_sums
                ):
                    return problem
            except JobError as error:
                return str(error)
        return ""

    def _why_not(self, buffers: Sequence[Tensor], expected: Numbers, problem: str) -> str:
        name = self._layer.name
        if self._draws_back:
            return (
                f"layer {name} draws in its backward pass, from wherever the generators then stand, which differs"
                f" from a plain loop: {problem}. Draw in the forward pass; a checkpoint draws the same again with"
                " preserve_rng_state=True"
            )
        self._restore(buffers)
        again = _ended(self._plain(buffers)).differs(expected)
        if again:
            return (
                f"layer {name} computes something else each time, from the same inputs, weights, buffers and draws:"
                f" {again}. It keeps a state that training cannot repeat or move: hold it in a"
                " persistent buffer (register_buffer), and draw from the default generators of torch, random or numpy,"
                " whose draws are keyed"
            )
        if self._writes_back:
            return (
                f"layer {name} changes a buffer in its backward pass, as a checkpoint does that runs a BatchNorm again:"
                f" other microbatches go forward before that, so {problem}. Have the pass that recomputes leave it"
            )
        return (
            f"layer {name} does not train as in a plain loop: {problem}, once a second microbatch goes forward before"
            " the first goes back, and one is recomputed. It keeps something from one pass to the next outside of its"
            " buffers: hand it on as an output, or hold it in a persistent buffer (register_buffer)"
        )

    def _restore(self, buffers: Sequence[Tensor]) -> None:
        self._layer.summed.drop()
        _put_back(self._layer, buffers)

    def _plain(self, buffers: Sequence[Tensor]) -> Generator[Tensors, None, Numbers]:
        """The numbers of a plain loop: the module as it was made, forward and back, then the next microbatch.

        Yields:
            The outputs of each microbatch, before it goes back.
        """
        layer = self._layer
        held, outputs, input_grads = list[Tensor](), list[Tensor](), list[Tensor]()
        # Fixed ones too: somebody may average others into them.
        parameters = dict(layer.module.named_parameters())
        before = {name: _print(p) for name, p in parameters.items()}
        states = [self._after_second]
        for inputs, key in zip(self._inputs, self._keys, strict=True):
            given = [t.detach().clone() for t in inputs]
            leaves, roots = layer.plain_forward(inputs, key)
            if any(difference(t.detach(), saved, 0.0) for t, saved in zip(inputs, given, strict=True)):
                raise JobError(layer.changes_input())
            self._refuse_overwritten(held, outputs)
            if not outputs:
                self._refuse_early_gradients()
            written = [n for n, p in parameters.items() if before[n] != _print(p)]
            if written:
                raise JobError(self._changes(written[0]))
            self._refuse_results(roots)
            self._attached |= {number for number, t in enumerate(roots) if t.requires_grad}
            self._laid_out_otherwise |= any(
                carries_gradient(t) and not t.is_contiguous() and not has_channels_last(t) for t in roots
            )
            carrying = [t for t in (*leaves, *roots) if t.requires_grad]
            self._detached |= {
                number
                for number, t in enumerate(roots)
                if carries_gradient(t) and not t.requires_grad and any(share(t, other) for other in carrying)
            }
            self._check_graph(roots)
            states.append(self._hidden())
            yield roots
            held += [canonical(t.detach()) for t in roots]
            outputs += [t.detach().clone() for t in roots]
            grads = [(o, g) for o, g in zip(roots, self._grads(roots, key), strict=True) if o.requires_grad]
            if grads:
                held_before = [bits(buffer) for buffer in layer.buffers]
                with rng.turn, self._backward, layer.as_made():
                    drawn = rng.state(layer.device)
                    backward([o for o, _ in grads], [g for _, g in grads])
                    self._draws_back |= drawn != rng.state(layer.device)
                self._writes_back |= held_before != [bits(buffer) for buffer in layer.buffers]
            input_grads += input_gradients(leaves)
        self._refuse_sparse_gradients()
        with rng.turn:
            check_modes_kept(f"the forward pass of layer {layer.name}")
        numbers = self._numbers(outputs, input_grads)
        moved = [name for one, other in pairwise(states) for name in changed(one, other)]
        if moved:
            self._refuse_states(buffers, moved)
        self.modes = {name: part.training for name, part in layer.module.named_modules()}
        self.unmoved = {name: value for name, value in states[0].items() if name not in moved}
        return numbers

    def _hidden(self) -> dict[str, Any]:
        with self._layer.as_made():
            return hidden_values(self._layer.module)

    def _refuse_overwritten(self, held: Sequence[Tensor], as_given: Sequence[Tensor]) -> None:
        for number, (output, saved) in enumerate(zip(held, as_given, strict=True)):
            if difference(output, saved, 0.0):
                raise JobError(
                    f"output {number} of layer {self._layer.name} is memory that its next forward pass overwrites,"
                    " while the layer after it still needs it: return a new tensor, as clone() does"
                )

    def _refuse_early_gradients(self) -> None:
        layer = self._layer
        early = [name for name, p in layer.trained.items() if p.grad is not None]
        if early:
            raise JobError(
                f"layer {layer.name} gives {early[0]} a gradient in its forward pass, as backward() does there: give"
                " the loss that it needs as an output of the layer"
            )

    def _refuse_sparse_gradients(self) -> None:
        layer = self._layer
        for name, parameter in layer.trained.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise JobError(
                    f"the gradient of parameter {name} of layer {layer.name} is sparse, which neither ranks exchange"
                    " nor optimizers here take: make it dense, as torch.nn.Embedding does with sparse=False"
                )

    def _refuse_results(self, roots: Tensors) -> None:
        """Refuse a pass that has made a buffer, or returns what is more than a tensor."""
        layer = self._layer
        new = _named_persistently(layer.module) - self._made
        if new:
            raise JobError(
                f"layer {layer.name} makes its buffer {min(new)} in its forward pass: register it with a tensor of its"
                " final shape and type where the module is built"
            )
        strange = next((type(t) for t in roots if type(t) not in (Tensor, nn.Parameter)), None)
        if strange is not None:
            raise JobError(
                f"layer {layer.name} returns a {strange.__name__}: return a torch.Tensor, as as_subclass(torch.Tensor)"
                " makes it"
            )
        noted = next((name for t in roots for name in t.__dict__ if not name.startswith("_")), None)
        if noted is not None:
            raise JobError(
                f"layer {layer.name} sets an attribute {noted!r} on a tensor that it returns, which goes nowhere with"
                " it: return what the next layer needs as an output"
            )

    def _refuse_states(self, buffers: Sequence[Tensor], suspects: Sequence[str]) -> None:
        """Refuse a layer of which one of `suspects` is a state: it differs after passes from the same inputs, draws and
        buffers. What a layer merely notes of a pass, as the newest attention, does not. A count never comes back; nor
        does an extreme: the first microbatch, which came in between, has larger ones."""
        layer = self._layer
        found = [self._after_second]
        for _ in range(2):
            self._restore(buffers)
            layer.plain_forward(self._inputs[1], self._keys[1])
            found.append(self._hidden())
        apart = {name for one, other in pairwise(found) for name in changed(one, other)}
        for name in suspects:
            if name in apart:
                raise JobError(
                    f"layer {layer.name} changes its {name} in each forward pass, which is no state of the model: it is"
                    " not saved, not undone with a step that is run again, and not moved. Hold it in a persistent"
                    " buffer (register_buffer), and draw from the default generators of torch, random or numpy, whose"
                    " draws are keyed"
                )

    def _refuse_first_pass(
        self, buffers: Sequence[Tensor], before: Mapping[str, Any], first: Sequence[str]
    ) -> None:
        """Refuse a layer that does in its first pass what it does in no later one, by an attribute that tells.

        Args:
            before: what its attributes held before that pass, from the second microbatch.
            first: prints of what that made.
        """
        layer, after = self._layer, self._after_second
        self._restore(buffers)
        _, roots = layer.plain_forward(self._inputs[1], self._keys[1])
        if self._made_by(roots) != first:
            told = next(name for name in (*after, *before) if before.get(name, _NOT_THERE) != after.get(name))
            raise JobError(
                f"layer {layer.name} does in its first pass what it does in no later one, as its {told} tells: a layer"
                " that is moved, or built again, would do it once more. Do it where the module is built, or have a"
                " persistent buffer tell (register_buffer)"
            )

    def _made_by(self, roots: Tensors) -> list[str]:
        return [bits(canonical(t.detach())) for t in roots] + [bits(buffer) for buffer in self._layer.buffers]

    def _refuse_writes(self, buffers: Sequence[Tensor]) -> list[str]:
        """Refuse a layer that writes into a parameter, or updates a tensor that is none of its buffers, as a slow copy
        is. What such a write gives may equal what was there, as long as the two do.

        Returns:
            Prints of what the pass made.
        """
        layer = self._layer
        with layer.as_made():
            hidden = hidden_tensors(layer.module)
        lay = {name: tensor.data_ptr() for name, tensor in hidden.items() if is_plain(tensor)}
        (_, roots), writes = watched(lambda: layer.plain_forward(self._inputs[1], self._keys[1]))
        made = self._made_by(roots)
        self._restore(buffers)
        self._after_second = self._hidden()
        with layer.as_made():
            held = hidden_tensors(layer.module)
        for name, (tensor, owner) in layer.aliases.items():
            if held.get(name) is tensor:
                raise JobError(
                    f"layer {layer.name} holds in its {name} the memory of {owner}, which does not follow what training"
                    " and moves make of that: take it in the forward pass, or by a property"
                )
        for name, parameter in layer.module.named_parameters():
            if writes.into(parameter):
                raise JobError(self._changes(name))
        for name, tensor in hidden.items():
            moved = name in lay and held.get(name) is tensor and tensor.data_ptr() != lay[name]
            if moved or writes.update(tensor):
                raise JobError(
                    f"layer {layer.name} updates its {name} in its forward pass, which is no state of the model: hold"
                    " it in a persistent buffer (register_buffer)"
                )
        return made

    def _refuse_modes(self) -> None:
        """Refuse a layer that changes what it computes with as it goes to evaluation and back: validation does."""
        layer = self._layer
        modes = [(part, part.training) for part in layer.module.modules()]
        with Writes() as writes:
            layer.module.eval()
            layer.module.train()
        for part, training in modes:
            part.training = training
        named = (*layer.module.named_parameters(), *layer.module.named_buffers())
        for name, tensor in named:
            if writes.into(tensor):
                raise JobError(
                    f"layer {layer.name} changes its {name} as it goes to evaluation mode or back, as one that merges"
                    " weights there does: rounding would leave others to train. Have it keep them apart"
                )

    def _changes(self, parameter: str) -> str:
        return (
            f"layer {self._layer.name} changes its parameter {parameter} in its forward pass, while other microbatches"
            " still need it as it was: compute what you need of it as a new tensor, or hold it in a persistent buffer"
            " (register_buffer)"
        )

    def _check_graph(self, roots: Tensors) -> None:
        layer, ends = self._layer, ends_of(roots)
        own = set(map(id, layer.trained.values()))
        strange = [t for t in ends.leaves if isinstance(t, nn.Parameter) and id(t) not in own]
        if strange:
            raise JobError(
                f"layer {layer.name} uses a parameter {list(strange[0].shape)} that is not one of its own, so that"
                " nothing would train it: make it an attribute of the layer's module before the first pass (in a list:"
                " nn.ParameterList), or set its requires_grad to False; if it is another layer's, give each layer its"
                " own and name them in ties"
            )
        if not layer.whole and (ends.checkpoint or (layer.uncovered and ends.custom)):
            layer.compute_whole(
                "its graph has a checkpoint that runs again in the backward pass, with what is frozen by then"
                if ends.checkpoint
                else "it has autograd functions of its own, and a second walk would call them again"
            )

    def _in_training(self, buffers: Sequence[Tensor], *, keep: bool) -> Numbers:
        """The numbers of training: the second microbatch goes forward before the first goes back; the first one's
        weight gradients come last.

        Args:
            keep: whether activations are kept; else they are recomputed.
        """
        layer = self._layer
        # The pass before the plain loop's first one was from the second microbatch: what is left of it is other now,
        # and so is a state that alternates.
        layer.plain_forward(self._inputs[0], self._keys[0])
        self._restore(buffers)
        passes, outputs, input_grads = [], list[Tensor](), list[Tensor]()
        recomputed = ""
        for inputs, key in zip(self._inputs, self._keys, strict=True):
            found, done = layer.forward(inputs, key, keep=keep)
            passes.append((found, done, key))
            outputs += [t.detach().clone() for t in found]
        for number, (found, done, key) in enumerate(passes):
            if not keep:
                layer.recompute(done)
                assert done.outputs is not None
                again = [canonical(t.detach()) for t in done.outputs]
                apart = (difference(*pair, 0.0) for pair in zip(again, found, strict=True))
                recomputed = next(
                    (f"its output {text} when it is recomputed" for text in apart if text), recomputed
                )
            input_grads += layer.backward(done, self._carried(found, key), weights=number > 0)
        layer.weight_grad(passes[0][1])
        return replace(self._numbers(outputs, input_grads), recomputed=recomputed)

    def _numbers(self, outputs: Sequence[Tensor], input_grads: Sequence[Tensor]) -> Numbers:
        layer = self._layer
        # Not copied: the next way to form them takes other memory, and each is compared before it is dropped.
        weight_grads = {n: p.grad for n, p in layer.trained.items() if p.grad is not None}
        buffers = tuple(buffer.clone() for buffer in layer.buffers)
        return Numbers(
            tuple(canonical(t.detach()) for t in outputs), buffers, tuple(input_grads), weight_grads
        )

    def _carried(self, outputs: Tensors, key: int) -> Tensors:
        """The gradients of the outputs that carry one."""
        if not self._layer.trained and not any(t.requires_grad for t in self._inputs[0]):
            return ()
        return tuple(
            grad
            for number, (output, grad) in enumerate(zip(outputs, self._grads(outputs, key), strict=True))
            if carries_gradient(output) and number not in self._layer.detached
        )

    def _grads(self, outputs: Tensors, key: int) -> list[Tensor]:
        """Some gradient of each output, the same for the same shapes and key."""
        generator = rng.generator(key)
        return [
            torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.device, t.dtype)
            for t in outputs
        ]


def _ended(loop: Generator[Tensors, None, Numbers]) -> Numbers:
    """Run a plain loop to its end; its numbers."""
    while True:
        try:
            next(loop)
        except StopIteration as stop:
            return stop.value


def _print(parameter: Tensor) -> tuple[int, int, str]:
    """A print of a parameter, which changes if that does, be it by its `.data`."""
    return parameter._version, parameter.data_ptr(), bits(parameter)


def _named_persistently(module: nn.Module) -> set[str]:
    """The names of the persistent buffers that there are."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def _rolled(tensor: Tensor) -> Tensor:
    """Another microbatch: the same samples in another order, or a single one with other values."""
    given, other = tensor.detach(), tensor.detach()
    if tensor.dim():
        other = given.roll(1, 0)
        if carries_gradient(given):
            # Other values too: sums and means over the samples shall not be the same.
            other = other.flip(-1) * 0.75
        elif torch.equal(other, given):
            other = given.flip([*range(given.dim())])
    laid_out = torch.empty_like(given).copy_(other)
    return canonical(laid_out).requires_grad_(tensor.requires_grad)
