"""A clock for operations that are not carried out: each takes what its multiplications or its bytes would, whichever is
more (the roofline model; Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from planner.accelerators import Accelerator

aten = torch.ops.aten


class Roofline(TorchDispatchMode):
    """Inside the context it adds up the seconds of every operation, on tensors that need no values.

    What an operation reads from memory is its arguments, what it writes its results: nothing is taken to stay in a
    cache from one to the next, and nothing to wait for its launch.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.now_s = 0.0
        self.flops = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `counted_memory.py`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.now_s += self._seconds(func, args, kwargs, results)
        return results

    def _seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
        given, made = list(_tensors((args, kwargs))), list(_tensors(results))
        if not given or (not func._schema.is_mutable and _only_views(given, made)):
            return 0.0
        written = [t for t in made if not any(t is other for other in given)]
        moved = sum(map(_bytes, given)) + sum(map(_bytes, written))
        memory_s = moved / self._accelerator.memory_rate()
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            return memory_s
        flops = float(count(*args, **kwargs, out_val=results))
        self.flops += flops
        bits = 8 * given[0].element_size()
        return max(memory_s, flops / self._accelerator.matrix_flops(bits))


class FusedAttention(TorchFunctionMode):
    """Has attention take the kernels that a GPU has for it, also on tensors that are on none: their memory does not
    grow with the square of the length (Dao 2023, FlashAttention-2)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention or kwargs.get("attn_mask") is not None or len(args) != 3:
            return func(*args, **kwargs)
        query, key, value = args
        dropout, causal = kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False)
        if query.element_size() == 2:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal)[0]
        return aten._scaled_dot_product_efficient_attention(query, key, value, None, True, dropout, causal)[0]


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _only_views(given: list[Tensor], made: list[Tensor]) -> bool:
    storages = {t.untyped_storage()._cdata for t in given}
    return all(t.untyped_storage()._cdata in storages for t in made)


def _bytes(tensor: Tensor) -> int:
    """What the tensor's elements take, those of an expanded one once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()
