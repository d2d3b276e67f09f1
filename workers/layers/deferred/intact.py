"""Checks at each call that a covered module is still what was covered, so that stock autograd computes it otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.deferred.queue import Deferral

_top_hooks: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_HOOKS_OF_OURS = 1
"""On a covered parameter: the one that refuses a second path to its gradient."""


class Intact:
    """The check of one module.

    Stock modules look at their parameters at each call, and autograd at what is registered by then: somebody may call a
    module with other weights (`torch.func.functional_call`), hang a hook on one, or run it inside a checkpoint, which
    forgets what autograd saves and calls it again.
    """

    __slots__ = ("_deferral", "_expected", "_forward", "_owner", "_part")

    def __init__(self, part: nn.Module, deferral: Deferral) -> None:
        # Neither the module nor a method of it: what its forward refers to would keep the module alive.
        self._part, self._forward = weakref.ref(part), type(part).forward
        self._owner = part._parameters
        self._expected = tuple(part._parameters.items())
        self._deferral = deferral

    def __call__(self, *inputs: Tensor) -> bool:
        """Whether the overridden forward may compute this call."""
        owner = self._owner
        for name, parameter in self._expected:
            if owner.get(name) is not parameter:
                return self._not("is called with other weights than its own")
            if parameter is not None:
                hooks = parameter._backward_hooks
                if (
                    hooks is not None and len(hooks) > _HOOKS_OF_OURS
                ) or parameter._post_accumulate_grad_hooks:
                    return self._not("has a hook on a weight")
        for each in inputs:
            if type(each) is not Tensor and type(each) is not nn.Parameter:
                return self._not(f"takes a {type(each).__name__}")
        if _top_hooks(False) is not None:
            return self._not("is called where hooks change what autograd saves, as in a checkpoint")
        return True

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        part = self._part()
        assert part is not None
        return self._forward(part, *args, **kwargs)

    def _not(self, why: str) -> bool:
        # Without gradients both ways compute the same.
        if torch.is_grad_enabled():
            part = self._part()
            self._deferral.queue.found_odd(f"a {type(part).__name__} {why}")
        return False
