"""Kinds of layers: comparing one layer of a kind does for all."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.layer import Layer, Tensors
from workers.state.hidden import bits, is_of_python


def kind_of(layer: Layer, inputs: Tensors) -> str:
    """A digest that two layers share only if nothing in their modules tells them apart but the values of parameters
    that they train, of large buffers and of those of PyTorch's own modules."""
    own = {id(part): number for number, part in enumerate(layer.module.modules())}
    tensors: dict[int, int] = {}
    with layer.as_made():
        parts = [(name, _traits(part, own, tensors)) for name, part in layer.module.named_modules()]
    shapes = [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in inputs]
    text = repr((parts, shapes, layer.compiled is not None, layer.whole, layer.uncovered, [*layer.trained]))
    return hashlib.sha256(text.encode()).hexdigest()


_LISTED = ("_parameters", "_buffers", "_modules")
_DEPTH = 6
"""Steps from an attribute to the last thing that is looked at."""
_unlike_all = itertools.count()


def _traits(part: nn.Module, own: Mapping[int, int], known: dict[int, int]) -> tuple[Any, ...]:
    """The traits of one module.

    Args:
        known: tensors by identity, numbered as they are met: which modules share one.
    """
    if isinstance(part, torch.jit.ScriptModule):
        return (next(_unlike_all),)
    stock = type(part).__module__.startswith("torch.nn.")
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
                None if t.requires_grad or stock or t.numel() > _most_compared(t) else bits(t),
            ),
        )
        for held in (part._parameters, part._buffers)
        for name, t in held.items()
    ]
    return (type(part), id(type(part)), _trait(attributes, own, _DEPTH), tensors, [*part._modules])


def _most_compared(tensor: Tensor) -> int:
    """Elements of a tensor that is not trained, up to which its values make a difference: a forward pass may branch on
    it. Not on those of PyTorch's own modules, as means that run."""
    return 16 if tensor.is_floating_point() or tensor.is_complex() else 1 << 12


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
    if all(is_of_python(kind) for kind in type(value).__mro__[:-1]) and getattr(value, "__dict__", None):
        return (type(value), id(type(value)), _trait(vars(value), own, depth - 1))
    return next(_unlike_all)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return "empty"
