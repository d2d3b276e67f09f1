"""Sees which storages operations write into, past autograd too: in `no_grad`, and through a tensor's `.data`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter

from workers.dispatch_mode import DispatchMode


class Writes(DispatchMode):
    """Inside the context it notes the storages that this thread's operations write into."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()
        """Addresses of the storages themselves: their wrappers in Python come and go."""

    def into(self, tensor: Tensor) -> bool:
        """Whether any of them wrote into the storage of `tensor`, which must have lived all the time."""
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else given.get(argument.name)
                self._storages.update(
                    t.untyped_storage()._cdata for t in tree_iter(value) if isinstance(t, Tensor)
                )
        return func(*args, **given)
