"""Stand-ins of the modules that other layers hold, so that a model's own forward pass runs in each of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

HiddenPlace = int | str
"""Argument of a block that is the hidden states: its position, or its name."""


class GivenHidden:
    """The hidden states of the pass that is running, as the layer got them."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None

    @contextmanager
    def for_now(self, hidden: Tensor) -> Iterator[None]:
        """Context manager: `hidden` is given inside."""
        self.hidden = hidden
        try:
            yield
        finally:
            self.hidden = None


class StandIn(nn.Module):
    """Zeros without memory, of the shapes that a module would return.

    Args:
        of: the module, on the meta device.
        given: tells the dtype of the zeros; without hidden states it is the module's own.
    """

    def __init__(self, of: nn.Module, given: GivenHidden) -> None:
        super().__init__()
        self._of, self._given = (of,), given

    def __getattr__(self, name: str) -> Any:
        """Attributes that the model reads of the module, such as the dtype of a weight."""
        if "_of" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._of[0], name)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        device = next((each.device for each in tensors if not each.is_meta), torch.device("cpu"))
        hidden = self._given.hidden

        def zeros(like: Tensor) -> Tensor:
            dtype = hidden.dtype if hidden is not None and like.is_floating_point() else like.dtype
            return torch.zeros((), dtype=dtype, device=device).expand(like.shape)

        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return tree_map_only(Tensor, zeros, self._of[0](*args, **kwargs))


class BlockReached(Exception):
    """The pass has come to the block: `args` are its positional and its named arguments."""


class StopAtBlock(nn.Module):
    """End of a pass, at a block.

    Args:
        of: the block.
    """

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        _take_attributes(self, of)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise BlockReached(args, kwargs)


class PassThrough(nn.Module):
    """Hidden states in the form in which the block that it stands for returns them: those that it gets, or the given
    ones.

    Args:
        of: the block.
        beside: what the block returns beside them; None: it returns nothing but them.
    """

    def __init__(
        self,
        of: nn.Module,
        place: HiddenPlace,
        beside: tuple[Any, ...] | None,
        given: GivenHidden | None = None,
    ) -> None:
        super().__init__()
        _take_attributes(self, of)
        self._place, self._beside, self._given = place, beside, given

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = argument_at(self._place, args, kwargs) if self._given is None else self._given.hidden
        return hidden if self._beside is None else (hidden, *self._beside)


def argument_at(place: HiddenPlace, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument at `place`; None: there is none."""
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


def _take_attributes(stand_in: nn.Module, of: nn.Module) -> None:
    """Give it what the model may read of the module: its kind of attention, for instance."""
    for name, value in vars(of).items():
        stand_in.__dict__.setdefault(name, value)
