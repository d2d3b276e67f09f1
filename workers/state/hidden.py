"""Attributes of modules, beside parameters and buffers: places where a layer could keep a state that no checkpoint has.

A walk over attributes, and over what they refer to: containers, objects of classes written in Python, closures, modules
in lists. Knows nothing of training.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.state.layer_state import saved_tensors
from workers.state.own_memory import share

_DEPTH = 4
"""Steps from an attribute to the last thing that is looked at."""
_MOST = 1_000
"""Entries of a container that are looked at."""
_LISTED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")
_HEAP_TYPE = 1 << 9
"""Python's flag of classes that are made while it runs."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hidden_values(module: nn.Module) -> dict[str, Any]:
    """Prints of all that attributes refer to and of the buffers that are not persistent, by name, as in
    `attribute layer.calls`; equal as long as nothing has changed."""
    return {name: _told(value) for name, value in _walk(module)}


def hidden_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that attributes refer to, of modules in lists too, and the buffers that are not persistent."""
    return {name: value for name, value in _walk(module) if isinstance(value, Tensor)}


def aliases_of(module: nn.Module) -> dict[str, tuple[Tensor, str]]:
    """The hidden tensors that lie in the memory of a parameter or a persistent buffer, each with the name of that."""
    parameters, buffers = saved_tensors(module)
    owners = {f"its parameter {name}": parameter for name, parameter in parameters.items()}
    owners |= {f"its buffer {name}": buffer for name, buffer in buffers.items()}
    storages = {t.untyped_storage()._cdata for t in owners.values() if _is_plain(t)}
    return {
        name: (tensor, owner)
        for name, tensor in hidden_tensors(module).items()
        if _is_plain(tensor) and tensor.untyped_storage()._cdata in storages
        for owner in (
            next((owner for owner, own in owners.items() if _is_plain(own) and share(own, tensor)), None),
        )
        if owner is not None
    }


def bits(tensor: Tensor) -> int | str:
    """A sum over what a tensor holds, bit by bit, which NaN does not blur; of one that has no elements in plain memory,
    a constant."""
    own = tensor.detach()
    if not _is_plain(own) or own.is_meta:
        return str(own.dtype)
    own = torch.view_as_real(own) if own.is_complex() else own
    integer = _INTEGER.get(own.element_size())
    if integer is None or not own.numel():
        return str(own.dtype)
    return int(own.contiguous().view(integer).sum(dtype=torch.int64))


def is_of_python(kind: type) -> bool:
    """Whether `kind` is a class statement's, whose instances are what their `__dict__` holds."""
    return (
        "__doc__" in kind.__dict__ and "__slots__" not in kind.__dict__ and bool(kind.__flags__ & _HEAP_TYPE)
    )


def _walk(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of what is no container."""
    seen = {id(part) for part in module.modules()}
    seen |= {id(t) for t in (*module.parameters(), *module.buffers())}
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if name not in _LISTED and "hooks" not in name:
                yield from _within(f"attribute {path}.{name}".replace(" .", " "), value, seen, _DEPTH)
        for name in getattr(part, "_non_persistent_buffers_set", ()):
            buffer = part._buffers.get(name)
            if buffer is not None:
                yield f"buffer {path}.{name}, which is not persistent,".replace(" .", " "), buffer


def _within(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield name, value
        return
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(
        value,
        (Tensor, np.ndarray, random.Random, torch.Generator, np.random.Generator, np.random.RandomState),
    ):
        yield name, value
        return
    if not depth:
        return
    for label, inner in _parts(value):
        yield from _within(f"{name}{label}", inner, seen, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(what to add to its name, what it refers to)."""
    if isinstance(value, nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        yield from ((f".{name}", tensor) for name, tensor in named)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", value[key]) for key in list(value)[:_MOST] if _is_value(key))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{number}]", one) for number, one in enumerate(list(value)[:_MOST]))
    elif isinstance(value, partial):
        yield from ((f" (argument {number})", one) for number, one in enumerate(value.args))
        yield from ((f" (argument {name})", one) for name, one in value.keywords.items())
    elif isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            try:
                yield f" (its {name})", cell.cell_contents
            except ValueError:  # not set yet
                continue
    elif isinstance(value, MethodType):
        yield " (its object)", value.__self__
    elif all(is_of_python(kind) for kind in type(value).__mro__[:-1]):
        yield from ((f".{name}", one) for name, one in getattr(value, "__dict__", {}).items())


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _is_value(key: Any) -> bool:
    return isinstance(key, (str, int, float, bool, tuple))


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), bits(value))
    if isinstance(value, (float, complex)):
        return repr(value)  # NaN is no change
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.dtype.hasobject else value.tobytes()
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return value
