"""Compares a layer as training runs it with plain autograd, before the first step that it takes part in.

Training defers weight gradients, recomputes activations, and has several microbatches in flight. A layer may do
something that none of this understands. So each kind of layer makes two microbatches in the way of training and in that
of a plain loop, from the same inputs, draws and buffers: what comes out must be the same numbers. Knows no schedule.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.absent import absent_like, is_absent
from workers.backward import backward, ends_of
from workers.blamed import blamed
from workers.layer import Layer, Tensors, carries_gradient
from workers.protocol import JobError, LayersChecked
from workers.reproducibility import rng
from workers.reproducibility.canonical import canonical
from workers.writes import Writes

NEAR = {"float32": 1e-4, "float16": 2.0**-6, "bfloat16": 2.0**-4, "bfloat16-autocast": 2.0**-4}
"""By precision, by how much of its length a tensor may differ where kernels do: compiled layers, sums of 16 bits."""


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
    """Of all, those that are left to plain autograd, and why."""
    seconds: float = 0.0
    """How long that took."""
    _kinds: dict[str, str] = field(default_factory=dict)
    """Kind -> why its layers are left to plain autograd; empty: they are not."""

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
                reason = _Comparison(layer, inputs, draw_key, self.precision, self.tell).made()
            self._kinds[kind] = reason
            if reason:
                self.tell(
                    f"layer {layer.name}, with those of its kind, trains by plain autograd: {reason}. All gradients are"
                    " formed in its backward pass: no schedule can put its weight gradients off, and freezing does not"
                    " make its steps shorter"
                )
        elif self._kinds[kind]:
            layer.compute_whole(self._kinds[kind])
        layer.checked, layer.tell = True, self.tell
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


@dataclass(frozen=True)
class Numbers:
    """The results of two microbatches."""

    outputs: Tensors
    buffers: Tensors
    input_grads: Tensors
    weight_grads: Mapping[str, Tensor]
    recomputed: str = ""
    """How the recomputed outputs differ from those of the first pass, in words."""

    def differs(self, other: Numbers, near: float = 0.0, near_sums: float = 0.0) -> str:
        """The first difference, in words; empty if there is none.

        Args:
            near: by how much of its length a tensor may differ; 0: not at all.
            near_sums: the same for weight gradients, which are sums over microbatches.
        """
        if self.recomputed:
            return self.recomputed
        for what, mine, theirs in (
            ("output", self.outputs, other.outputs),
            ("buffer", self.buffers, other.buffers),
            ("input gradient", self.input_grads, other.input_grads),
        ):
            if len(mine) != len(theirs):
                return f"it has {len(mine)} {what}s instead of {len(theirs)}"
            for one, expected in zip(mine, theirs, strict=True):
                absent = what == "input gradient" and (is_absent(one), is_absent(expected))
                if absent and any(absent):
                    if not all(absent):
                        return f"its {what} is absent on one side"
                elif text := _difference(one, expected, near):
                    return f"its {what} {text}"
        # What is zero but for rounding, as of a bias before a norm, is measured by the layer.
        least = 0.0
        if near_sums:
            least = 1e-3 * sum(_length(grad) ** 2 for grad in other.weight_grads.values()) ** 0.5
        for name in sorted(self.weight_grads.keys() | other.weight_grads.keys()):
            one, expected = self.weight_grads.get(name), other.weight_grads.get(name)
            if one is None or expected is None:
                return f"{name} gets {'no' if one is None else 'a'} gradient"
            if text := _difference(one, expected, near_sums, least):
                return f"the gradient of {name} {text}"
        return ""


def _length(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _difference(one: Tensor, expected: Tensor, near: float, least: float = 0.0) -> str:
    if one.shape != expected.shape or one.dtype != expected.dtype:
        return f"is {one.dtype} {list(one.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if torch.equal(one, expected):
        return ""
    if not carries_gradient(one):
        return "has other values"
    one, expected = (
        torch.view_as_real(t) if t.is_complex() else t for t in (one.detach(), expected.detach())
    )
    same = (one == expected) | (one.isnan() & expected.isnan())
    if bool(same.all()):
        return ""
    length = max(_length(expected), least) or 1.0
    apart = _length((one - expected).masked_fill_(same, 0.0))
    return "" if apart <= near * length else f"differs by {apart / length:.1e} of its length"


class _Comparison:
    """One layer in training's way and in that of a plain loop."""

    def __init__(
        self, layer: Layer, inputs: Tensors, draw_key: int, precision: str, tell: Callable[[str], None]
    ) -> None:
        self._layer = layer
        self._keys = (draw_key, rng.key(draw_key, "another microbatch"))
        self._inputs = (inputs, tuple(_rolled(t) for t in inputs))
        self._tell = tell
        self._near = 0.0 if layer.compiled is None else NEAR[precision]
        # Ranks add products of 16 bits up in 32; a plain loop rounds each of them.
        self._near_sums = self._near if precision == "float32" else NEAR[precision]
        self._backward = blamed(f"the backward pass of layer {layer.name}")
        self._draws_back = False

    def made(self) -> str:
        """Compare; returns why the layer is left to plain autograd, if it is."""
        layer = self._layer
        aside, buffers = layer.summed.set_aside(), [buffer.clone() for buffer in layer.buffers]
        try:
            # What a step needs no scratch for, such as one microbatch of a parameter, shall not keep any.
            with layer.deferral.workspace.lent(layer.deferral.accumulators.values()):
                return self._compare(buffers)
        finally:
            self._restore(buffers)
            layer.summed.take_back(aside)

    def _compare(self, buffers: Sequence[Tensor]) -> str:
        layer = self._layer
        self._refuse_averages(buffers)
        expected = self._plain()
        if layer.trained and not expected.weight_grads:
            self._tell(
                f"no gradient reaches layer {layer.name}, though it has"
                f" {len(layer.trained)} parameters to train: they stay as they are"
            )
        reason = layer.whole
        if not reason:
            reason = self._problem(buffers, expected)
            if reason:
                layer.compute_whole(reason)
            else:
                reason = layer.whole  # found while it ran
        if not reason:
            return ""
        problem = self._problem(buffers, expected)
        if problem:
            raise JobError(self._why_not(buffers, expected, problem))
        return reason

    def _problem(self, buffers: Sequence[Tensor], expected: Numbers) -> str:
        """What training gets wrong with activations kept, or recomputed; empty: nothing."""
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
        self._restore(buffers)
        again = self._plain().differs(expected)
        if again:
            return (
                f"layer {name} computes something else each time, from the same inputs, weights, buffers and draws:"
                f" {again}. It keeps a state that training cannot repeat or move: hold it in a"
                " persistent buffer (register_buffer), and draw from the default generators of torch, random or numpy,"
                " whose draws are keyed"
            )
        if self._draws_back:
            return (
                f"layer {name} draws in its backward pass, from wherever the generators then stand, which differs"
                f" from a plain loop: {problem}. Draw in the forward pass; a checkpoint draws the same again with"
                " preserve_rng_state=True"
            )
        return (
            f"layer {name} does not train as in a plain loop: {problem}, once a second microbatch goes forward before"
            " the first goes back, and one is recomputed. It keeps something from one pass to the next outside of its"
            " buffers: hand it on as an output, or hold it in a persistent buffer (register_buffer)"
        )

    def _restore(self, buffers: Sequence[Tensor]) -> None:
        self._layer.summed.drop()
        with torch.no_grad():
            for buffer, before in zip(self._layer.buffers, buffers, strict=True):
                buffer.copy_(before)

    def _plain(self) -> Numbers:
        """The numbers of a plain loop: the module as it was made, forward and back, then the next microbatch."""
        layer = self._layer
        held, outputs, input_grads = list[Tensor](), list[Tensor](), list[Tensor]()
        made = _named_persistently(layer.module)
        # Fixed ones too: somebody may average others into them.
        parameters = dict(layer.module.named_parameters())
        before = {name: _print(p) for name, p in parameters.items()}
        states = [_states(layer.module)]
        for inputs, key in zip(self._inputs, self._keys, strict=True):
            given = [t.detach().clone() for t in inputs]
            leaves, roots = layer.plain_forward(inputs, key)
            if any(_difference(t.detach(), saved, 0.0) for t, saved in zip(inputs, given, strict=True)):
                raise JobError(layer.changes_input())
            for number, (output, as_given) in enumerate(zip(held, outputs, strict=True)):
                if _difference(output, as_given, 0.0):
                    raise JobError(
                        f"output {number} of layer {layer.name} is memory that its next forward pass overwrites, while"
                        " the layer after it still needs it: return a new tensor, as clone() does"
                    )
            early = [name for name, p in layer.trained.items() if p.grad is not None and not outputs]
            if early:
                raise JobError(
                    f"layer {layer.name} gives {early[0]} a gradient in its forward pass, as backward() does there:"
                    " give the loss that it needs as an output of the layer"
                )
            changed = [n for n, p in parameters.items() if before[n] != _print(p)]
            if changed:
                raise JobError(self._changes(changed[0]))
            new = _named_persistently(layer.module) - made
            if new:
                raise JobError(
                    f"layer {layer.name} makes its buffer {min(new)} in its forward pass: register it with a tensor of"
                    " its final shape and type where the module is built"
                )
            strange = next((type(t) for t in roots if type(t) not in (Tensor, nn.Parameter)), None)
            if strange is not None:
                raise JobError(
                    f"layer {layer.name} returns a {strange.__name__}: return a torch.Tensor, as"
                    " as_subclass(torch.Tensor) makes it"
                )
            self._check_graph(roots)
            states.append(_states(layer.module))
            held += [canonical(t.detach()) for t in roots]
            outputs += [t.detach().clone() for t in roots]
            grads = [(o, g) for o, g in zip(roots, self._grads(roots, key), strict=True) if o.requires_grad]
            if grads:
                drawn = rng.state(layer.device)
                with self._backward, layer.as_made():
                    backward([o for o, _ in grads], [g for _, g in grads])
                self._draws_back |= drawn != rng.state(layer.device)
            input_grads += [
                absent_like(t) if t.grad is None else canonical(t.grad) for t in leaves if t.requires_grad
            ]
        moved = [
            name for name, first in states[0].items() if first != states[1].get(name) != states[2].get(name)
        ]
        if moved:
            raise JobError(
                f"layer {layer.name} changes its {moved[0]} in each forward pass, which is no state of the model: it is"
                " not saved, not undone with a step that is run again, and not moved. Hold it in a persistent buffer"
                " (register_buffer), and draw from the default generators of torch, random or numpy, whose draws are"
                " keyed"
            )
        for name, parameter in layer.trained.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise JobError(
                    f"the gradient of parameter {name} of layer {layer.name} is sparse, which neither ranks exchange"
                    " nor optimizers here take: make it dense, as torch.nn.Embedding does with sparse=False"
                )
        numbers = self._numbers(outputs, input_grads)
        # One more, so that training's passes find a state that alternates as these did not.
        layer.plain_forward(self._inputs[0], self._keys[0])
        return numbers

    def _refuse_averages(self, buffers: Sequence[Tensor]) -> None:
        """Refuse a layer that writes into a fixed parameter, as into the slow copy of another. What such a write gives
        may equal what was there, as long as the two do."""
        layer = self._layer
        fixed = {name: p for name, p in layer.module.named_parameters() if not p.requires_grad}
        if not fixed:
            return
        with Writes() as writes:
            layer.plain_forward(self._inputs[0], self._keys[0])
        self._restore(buffers)
        for name, parameter in fixed.items():
            if writes.into(parameter):
                raise JobError(self._changes(name))

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
                " nn.ParameterList); if it is another layer's, give each layer its own and name them in ties"
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
                apart = (_difference(*pair, 0.0) for pair in zip(again, found, strict=True))
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
            for output, grad in zip(outputs, self._grads(outputs, key), strict=True)
            if carries_gradient(output)
        )

    def _grads(self, outputs: Tensors, key: int) -> list[Tensor]:
        """Some gradient of each output, the same for the same shapes and key."""
        generator = rng.generator(key)
        return [
            torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.device, t.dtype)
            for t in outputs
        ]


def _print(parameter: Tensor) -> tuple[int, int, float]:
    """What changes if a parameter does, be it by its `.data`."""
    return parameter._version, parameter.data_ptr(), float(torch.sum(parameter.detach(), dtype=torch.float64))


def _states(module: nn.Module) -> dict[str, Any]:
    """The numbers, generators and buffers of a module that are no part of a model's state."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            what = f"attribute {path}.{name}".replace(" .", " ")
            if isinstance(value, (int, float)):
                found[what] = value
            elif isinstance(value, random.Random):
                found[what] = hash(value.getstate())
            elif isinstance(value, torch.Generator):
                found[what] = value.get_state().numpy().tobytes()
            elif isinstance(value, np.random.Generator):
                found[what] = repr(value.bit_generator.state)
            elif isinstance(value, np.random.RandomState):
                found[what] = repr(value.get_state())
        for name in getattr(part, "_non_persistent_buffers_set", ()):
            buffer = part._buffers.get(name)
            if buffer is not None and buffer.numel() and not buffer.is_complex():
                found[f"buffer {path}.{name}, which is not persistent,".replace(" .", " ")] = float(
                    torch.sum(buffer.detach(), dtype=torch.float64)
                )
    return found


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
    return canonical(other).requires_grad_(tensor.requires_grad)


def kind_of(layer: Layer, inputs: Tensors) -> str:
    """A digest that two layers share only if nothing in their modules tells them apart but the values of parameters and
    buffers."""
    own = {id(part): number for number, part in enumerate(layer.module.modules())}
    tensors: dict[int, int] = {}
    with layer.as_made():
        parts = [(name, _traits(part, own, tensors)) for name, part in layer.module.named_modules()]
    shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in inputs]
    text = repr((parts, shapes, layer.compiled is not None, layer.whole, layer.uncovered, [*layer.trained]))
    return hashlib.sha256(text.encode()).hexdigest()


_LISTED = ("_parameters", "_buffers", "_modules")
_DEPTH = 6
"""How far what an attribute refers to is looked at."""
_HEAP_TYPE = 1 << 9
"""Python's flag of classes that are made while it runs."""
_unlike_all = itertools.count()


def _traits(part: nn.Module, own: Mapping[int, int], known: dict[int, int]) -> tuple[Any, ...]:
    """The traits of one module.

    Args:
        known: tensors by identity, numbered as they are met: which modules share one.
    """
    if isinstance(part, torch.jit.ScriptModule):
        return (next(_unlike_all),)
    # Hooks are registered under numbers that the process counts.
    attributes = {
        name: [*value.values()] if "hooks" in name and isinstance(value, dict) else value
        for name, value in part.__dict__.items()
        if name not in _LISTED
    }
    tensors = [
        (
            name,
            None
            if t is None
            else (
                known.setdefault(id(t), len(known)),
                type(t),
                tuple(t.shape),
                t.dtype,
                t.requires_grad,
                _hooks(t),
            ),
        )
        for held in (part._parameters, part._buffers)
        for name, t in held.items()
    ]
    return (type(part), id(type(part)), _trait(attributes, own, _DEPTH), tensors, [*part._modules])


def _hooks(tensor: Tensor) -> int | None:
    return next(_unlike_all) if tensor._backward_hooks else None


def _trait(value: Any, own: Mapping[int, int], depth: int) -> Any:
    """The trait of a value: what of it makes a difference; where that cannot be told, what no other has.

    Args:
        own: the layer's modules by identity, which are looked at in their turn.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return value
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, nn.Module):
        return ("module", own[id(value)]) if id(value) in own else next(_unlike_all)
    if isinstance(value, type):
        return (value, id(value))
    if not depth or isinstance(value, (Tensor, torch.Generator)):
        return next(_unlike_all)
    if isinstance(value, (tuple, list, set, frozenset)):
        each = [_trait(one, own, depth - 1) for one in value]
        return (type(value), sorted(map(repr, each)) if isinstance(value, (set, frozenset)) else each)
    if isinstance(value, dict):
        return [(_trait(key, own, depth - 1), _trait(one, own, depth - 1)) for key, one in value.items()]
    if isinstance(value, partial):
        return ("partial", _trait([value.func, value.args, value.keywords], own, depth - 1))
    if isinstance(value, FunctionType):
        held = [_content(cell) for cell in value.__closure__ or ()]
        more = [held, value.__defaults__, value.__kwdefaults__, value.__dict__]
        return (value.__qualname__, id(value.__code__), _trait(more, own, depth - 1))
    if isinstance(value, MethodType):
        return (value.__func__.__qualname__, id(value.__func__), _trait(value.__self__, own, depth - 1))
    if all(_is_of_python(kind) for kind in type(value).__mro__[:-1]) and getattr(value, "__dict__", None):
        return (type(value), id(type(value)), _trait(vars(value), own, depth - 1))
    return next(_unlike_all)


def _is_of_python(kind: type) -> bool:
    """Whether `kind` is a class statement's, whose instances are what their `__dict__` holds."""
    return (
        "__doc__" in kind.__dict__ and "__slots__" not in kind.__dict__ and bool(kind.__flags__ & _HEAP_TYPE)
    )


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return "empty"
