"""A clock for operations that are not carried out: each takes what its multiplications or its bytes would, whichever is
more (the roofline model; Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from planner.accelerators import Accelerator
from workers.process.dispatch_mode import DispatchMode

aten = torch.ops.aten
OVERWRITES = ("copy_", "fill_", "zero_")
WIDEST = 256
"""Width of the widest head that the fused attention takes."""


class Roofline(DispatchMode):
    """Inside the context it adds up the seconds of every operation, on tensors that need no values.

    What an operation reads from memory is its arguments, what it writes its results: nothing is taken to stay in a
    cache from one to the next, and nothing to wait for its launch. Causal attention counts the upper half of its
    scores too, and an embedding its whole table.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.now_s = 0.0
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.now_s += self._seconds(func, args, kwargs, results)
        return results

    def _seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
        memory_s = _moved_bytes(func, args, kwargs, results) / self._accelerator.memory_rate()
        flops = flops_of(func, args, kwargs, results)
        if flops is None:
            return memory_s
        self.flops += flops
        bits = 8 * next(_tensors(args)).element_size()
        return max(memory_s, flops / self._accelerator.matrix_flops(bits))


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float | None:
    """Floating-point operations of an operation; None where it is no product of matrices, convolution or attention."""
    count = flop_registry.get(func._overloadpacket)
    return None if count is None else float(count(*args, **kwargs, out_val=results))


def _moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> int:
    """Bytes that an operation reads and writes: none for a view, or where it makes memory without content."""
    name = func._schema.name.rpartition("::")[2]
    if name.startswith(("empty", "new_empty")):
        return 0
    given: set[int] = set()
    moved = 0
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        for tensor in _tensors(value):
            given.add(tensor.untyped_storage()._cdata)
            changed = argument.alias_info is not None and argument.alias_info.is_write
            # What is written over is not read first.
            over = argument.is_out or (changed and name in OVERWRITES)
            moved += (changed + (not over)) * _bytes(tensor)
    fresh = [t for t in _tensors(results) if t.untyped_storage()._cdata not in given]
    if given and not fresh and not func._schema.is_mutable:
        return 0
    return moved + sum(map(_bytes, fresh))


class FusedAttention(TorchFunctionMode):
    """Has attention take the kernel that a GPU has for 16 bits, also on tensors that are on none: its memory does not
    grow with the square of the length (Dao 2023, FlashAttention-2). In 32 bits deterministic training has none
    (`workers/reproducibility/determinism.py`)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        fused = _fused(*args, **kwargs) if func is scaled_dot_product_attention else None
        return func(*args, **kwargs) if fused is None else fused


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention by the fused kernel; None where there is none for these arguments."""
    if attn_mask is not None or query.element_size() != 2 or query.shape[-1] > WIDEST or query.dim() != 4:
        return None
    return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's elements; an expanded dimension counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()
