"""Sees what memory operations write into, past autograd too: in `no_grad`, and through a tensor's `.data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

from workers.process.dispatch_mode import DispatchMode
from workers.protocol.errors import JobError
from workers.state.hidden import is_plain

Result = TypeVar("Result")
_OVERWRITING = (
    "copy_ fill_ zero_ set_ resize_ detach_ index_copy_ index_fill_ index_put_ masked_fill_ masked_scatter_ scatter_"
    " _foreach_zero_ _foreach_copy_"
)
_DRAWING = "normal_ log_normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_"
_REPLACING = frozenset(f"{_OVERWRITING} {_DRAWING}".split())
"""Operations in place that do not use what was there, where they write at all."""


class Writes(DispatchMode):
    """Inside the context it notes the memory that this thread's operations write into."""

    def __init__(self) -> None:
        super().__init__()
        self._written: list[tuple[int, int, bool]] = []
        """(first address, the one behind the last, whether what was there was used), in order."""

    def into(self, tensor: Tensor) -> bool:
        """Whether any of them wrote into the memory of `tensor`, which must have lived all the time."""
        return self._first(tensor) is not None

    def update(self, tensor: Tensor) -> bool:
        """Whether the first of them changed what `tensor` held, instead of replacing it, as scratch memory is."""
        return bool(self._first(tensor))

    def _first(self, tensor: Tensor) -> bool | None:
        begin, stop = _addresses(tensor)
        return next((used for low, high, used in self._written if low < stop and begin < high), None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        for number, argument in enumerate(func._schema.arguments if isinstance(func, OpOverload) else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else given.get(argument.name)
                used = not argument.is_out and func._opname not in _REPLACING
                self._written += [
                    (*_addresses(tensor), used) for tensor in tree_iter(value) if isinstance(tensor, Tensor)
                ]
        return func(*args, **given)


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """(the first, the one behind the last) that a tensor may use; none of one that is empty, or sparse."""
    if not is_plain(tensor) or not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def watched(run: Callable[[], Result]) -> tuple[Result, Writes]:
    """Result of `run`, and its writes: those up to an operation that cannot be watched, as `torch.cond`, if it has one.

    Raises:
        JobError: from `run`.
    """
    writes = Writes()
    try:
        with writes:
            return run(), writes
    except JobError as error:
        cause = error.__cause__
        if not isinstance(cause, NotImplementedError) and not type(cause).__module__.startswith(
            "torch._dynamo"
        ):
            raise
    # The compiler remembers that it could not compile.
    torch.compiler.reset()
    return run(), writes
