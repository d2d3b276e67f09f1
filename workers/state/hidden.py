"""Attributes of modules, beside parameters and buffers: places where a layer could keep a state that no checkpoint has.

A walk over attributes, and over what they refer to: containers, objects of classes written in Python, closures, modules
in lists. Knows nothing of training.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
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
_SIMPLE = (bool, int, float, complex, str, bytes)
_TOLD = (
    Tensor,
    np.ndarray,
    np.generic,
    random.Random,
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
)
_PIECE = 1 << 22
"""Elements that are added up at once."""
_MACHINERY = ("threading", "concurrent", "queue", "logging", "multiprocessing", "asyncio")
"""Modules of Python's library whose objects change by themselves."""
_HEAP_TYPE = 1 << 9
"""Python's flag of classes that are made while it runs."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hidden_values(module: nn.Module) -> dict[str, Any]:
    """Prints of all that attributes refer to and of the buffers that are not persistent, by name, as in
    `attribute layer.calls`; equal as long as nothing has changed."""
    return {name: _told(value) for name, value in _walk(module)}


def values_behind(function: Callable[..., Any]) -> dict[str, Any]:
    """`hidden_values` of a function with what it closes over, or of a module."""
    if isinstance(function, nn.Module):
        return hidden_values(function)
    return {name: _told(value) for name, value in _within("function", function, {}, _DEPTH)}


def hidden_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that attributes refer to, of modules in lists too, and the buffers that are not persistent."""
    return {name: value for name, value in _walk(module) if isinstance(value, Tensor)}


def aliases_of(module: nn.Module) -> dict[str, tuple[Tensor, str]]:
    """The hidden tensors that lie in the memory of a parameter or a persistent buffer, each with the name of that."""
    parameters, buffers = saved_tensors(module)
    owners = {f"its parameter {name}": parameter for name, parameter in parameters.items()}
    owners |= {f"its buffer {name}": buffer for name, buffer in buffers.items()}
    storages = {t.untyped_storage()._cdata for t in owners.values() if is_plain(t)}
    return {
        name: (tensor, owner)
        for name, tensor in hidden_tensors(module).items()
        if is_plain(tensor) and tensor.untyped_storage()._cdata in storages
        for owner in (
            next((owner for owner, own in owners.items() if is_plain(own) and share(own, tensor)), None),
        )
        if owner is not None
    }


def bits(tensor: Tensor) -> str:
    """Sums over what a tensor holds, bit by bit, which NaN does not blur; of one without elements in plain memory, a
    constant."""
    own = tensor.detach()
    if not is_plain(own) or own.is_meta:
        return str(own.dtype)
    own = own.resolve_conj().resolve_neg()
    own = torch.view_as_real(own) if own.is_complex() else own
    integer = _INTEGER.get(own.element_size())
    if integer is None or not own.numel():
        return str(own.dtype)
    # Elements that an expansion repeats count once; the first half by itself tells some other orders.
    own = own[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in own.stride())]
    flat = own.contiguous().view(-1).view(integer)
    half = len(flat) // 2
    return " ".join(str(int(sum(_sums(part)))) for part in (flat[:half], flat[half:]))


def _sums(flat: Tensor) -> Iterator[Tensor]:
    """The sums of pieces, as a sum in 64 bits first makes such a copy of all that it adds."""
    return (piece.sum(dtype=torch.int64) for piece in flat.split(_PIECE)) if len(flat) else iter(())


def is_of_python(kind: type) -> bool:
    """Whether `kind` is a class statement's, whose instances are what their `__dict__` holds."""
    return (
        "__doc__" in kind.__dict__ and "__slots__" not in kind.__dict__ and bool(kind.__flags__ & _HEAP_TYPE)
    )


def _walk(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of what is no container."""
    seen: dict[int, Any] = {
        id(one): one for one in (*module.modules(), *module.parameters(), *module.buffers())
    }
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        for label, value in tensor.__dict__.items():
            yield from _within(f"attribute {label} of {name}", value, seen, _DEPTH)
    for path, part in module.named_modules():
        yield f"class of {path}".removesuffix(" of "), type(part).__qualname__
        for name, value in _attributes(part):
            yield from _within(f"attribute {path}.{name}".replace(" .", " "), value, seen, _DEPTH)
        for name in getattr(part, "_non_persistent_buffers_set", ()):
            buffer = part._buffers.get(name)
            if buffer is not None:
                yield f"buffer {path}.{name}, which is not persistent,".replace(" .", " "), buffer


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    return (
        (name, value) for name, value in part.__dict__.items() if name not in _LISTED and "hooks" not in name
    )


def _within(name: str, value: Any, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """`value`, or what it refers to.

    Args:
        seen: everything that was met, by identity, so that none is met twice, nor its identity given to another.
    """
    if value is None or isinstance(value, _SIMPLE):
        yield name, value
        return
    if id(value) in seen or isinstance(value, type):
        return
    seen[id(value)] = value
    if isinstance(value, _TOLD):
        yield name, value
        return
    if isinstance(value, (FunctionType, MethodType)):
        yield name, value.__qualname__
    if not depth:
        return
    for label, inner in _parts(value):
        yield from _within(f"{name}{label}", inner, seen, depth - 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """(what to add to its name, what it refers to)."""
    if isinstance(value, nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        notes = ((name, one) for part in value.modules() for name, one in _attributes(part))
        return [(f".{name}", one) for name, one in (*named, *notes)]
    # Not any mapping: a lookup may compute, and fail.
    if isinstance(value, dict):
        some = itertools.islice(dict.items(value), _MOST)
        return [(f"[{key!r}]", one) for key, one in some if isinstance(key, (*_SIMPLE, tuple))]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{number}]", one) for number, one in enumerate(itertools.islice(value, _MOST))]
    if isinstance(value, (set, frozenset)):
        return [("", repr(sorted(map(repr, itertools.islice(value, _MOST)))))]
    if isinstance(value, itertools.count):
        return [("", repr(value))]
    if isinstance(value, partial):
        given = (*enumerate(value.args), *value.keywords.items())
        return [(f" (argument {name})", one) for name, one in given]
    if isinstance(value, FunctionType):
        return [
            *((f" (its {name})", cell) for name, cell in _held(value)),
            *((f" (default {number})", one) for number, one in enumerate(value.__defaults__ or ())),
        ]
    if isinstance(value, MethodType):
        return [(" (its object)", value.__self__)]
    if type(value).__module__.partition(".")[0] in _MACHINERY:
        return []
    if isinstance(value, SimpleNamespace) or all(is_of_python(kind) for kind in type(value).__mro__[:-1]):
        return [(f".{name}", one) for name, one in getattr(value, "__dict__", {}).items()]
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return [(f".{name}", getattr(value, name)) for name in slots if _is_set(value, name)]


def _held(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue


def _is_set(value: Any, slot: str) -> bool:
    return isinstance(getattr(type(value), slot, None), MemberDescriptorType) and hasattr(value, slot)


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements lie in memory, one by one."""
    return not tensor.is_nested and tensor.layout == torch.strided and not tensor.is_quantized


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (bits(value), *(value.shape if is_plain(value) else ()))
    if isinstance(value, (float, complex, np.generic)):
        return repr(value)  # NaN is no change
    if isinstance(value, np.ndarray):
        text = repr(value.tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(value).data
        return value.shape, hashlib.blake2b(text).hexdigest()
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return value
