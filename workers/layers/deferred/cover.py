"""Covers modules: their backward pass yields the input gradient and queues what the weight gradient needs.

`cover` overrides the forward of the modules that it knows and that nothing else has changed, so that they put what
their matrices' gradients need into the `WeightGradQueue` of the microbatch at hand. Draining the queue forms each
gradient and adds it once. Everything else is left to stock autograd. This module knows neither stages nor schedules.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from workers.layers.deferred.attention import attention_forward, attention_is_covered
from workers.layers.deferred.modules import (
    convolution_forward,
    embedding_forward,
    linear_forward,
    transposed_linear_forward,
)
from workers.layers.deferred.queue import Deferral, Home, WeightGradQueue, Workspace, new_home

__all__ = ["Cover", "Deferral", "WeightGradQueue", "Workspace", "cover"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OVERRIDES = ("forward", "__deepcopy__")
"""The attributes that an overridden module has of its own."""
_COMPILED = "OptimizedModule"
"""Class of a module that the user has compiled; by name, as its import takes a second."""


class Cover:
    """The overridden forwards of one layer's modules.

    Attributes:
        deferral: its `queue` is to be set before each forward pass.
        uncovered: the names of the trained matrices that no deferral covers.
        lifted: whether the modules are as the user made them, so that stock autograd forms all gradients.
        replaced: which of them got a forward of its own meanwhile; empty: none.
    """

    def __init__(self, module: nn.Module, workspace: Workspace, home: Home) -> None:
        self.deferral = Deferral(workspace, home)
        self.lifted = False
        self.replaced = ""
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._guarded: list[tuple[str, Tensor]] = []
        self._guards: list[torch.utils.hooks.RemovableHandle] = []
        candidates = _candidates(module)
        held_elsewhere = _held_by_others(module, candidates)
        covered: set[int] = set()
        for part in candidates:
            parameters = _deferred_parameters(part)
            if held_elsewhere.isdisjoint(map(id, parameters)):
                self._forwards.append((part, _deferring_forward(part, self.deferral)))
                covered.update(map(id, parameters))
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._guarded = [(name, p) for name, p in named if id(p) in covered]
        self.uncovered = tuple(name for name, p in named if is_matrix(p) and id(p) not in covered)
        self.restore()

    def lift(self) -> None:
        """Give the modules back their own forwards."""
        if self.lifted:
            return
        self.lifted = True
        for part, forward in self._forwards:
            if part.__dict__.get("forward") is forward:
                for name in _OVERRIDES:
                    part.__dict__.pop(name, None)
        for guard in self._guards:
            guard.remove()
        self._guards.clear()

    def restore(self) -> None:
        """Override the forwards, at first and after `lift`."""
        self.lifted = False
        for part, forward in self._forwards:
            if "forward" in part.__dict__:
                self.replaced = f"a {type(part).__name__} has got another forward"
                continue
            part.forward = forward
            part.__dict__["__deepcopy__"] = _copied_without(part)
        self._guards = [
            p.register_hook(_refuse_second_path(name)) for name, p in self._guarded if p.requires_grad
        ]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context manager: the modules are as the user made them inside."""
        was_lifted = self.lifted
        self.lift()
        try:
            yield
        finally:
            if not was_lifted:
                self.restore()


def cover(module: nn.Module, workspace: Workspace, home: Home = new_home) -> Cover:
    """Defer the weight gradients of every plain Linear, Embedding, Conv, MultiheadAttention and transformers' Conv1D
    inside `module`.

    Args:
        home: where the gradients belong.
    """
    return Cover(module, workspace, home)


def is_matrix(parameter: Tensor) -> bool:
    """Whether elements lie along two dimensions or more; a class token [1, 1, D] is a vector. The gradient of a vector
    is cheap: it is formed with the input gradient, and not deferred."""
    return sum(size > 1 for size in parameter.shape) >= 2


def _candidates(module: nn.Module) -> list[nn.Module]:
    """The modules inside `module` that could be covered, were it for each alone."""
    if any(getattr(module_hooks, f"_global{kind}") for kind in _HOOKS):
        return []
    compiled = {
        id(inner)
        for part in module.modules()
        if type(part).__name__ == _COMPILED or part._compiled_call_impl is not None
        for inner in part.modules()
    }
    return [part for part in module.modules() if id(part) not in compiled and _is_plain(part)]


def _is_plain(part: nn.Module) -> bool:
    """Whether `part` computes what its class does, with parameters of its own, and nothing hangs on them."""
    # Exact types only: a subclass, as parametrizations make one, may use its weight in ways of its own.
    if (
        not _is_known(part)
        or not _holds_its_weights(part)
        or "forward" in part.__dict__
        or any(getattr(part, kind) for kind in _HOOKS)
    ):
        return False
    held = (part, part.out_proj) if type(part) is nn.MultiheadAttention else (part,)
    parameters = [p for each in held for p in each._parameters.values() if p is not None]
    return all(type(p) is nn.Parameter and not p._backward_hooks for p in parameters)


def _holds_its_weights(part: nn.Module) -> bool:
    """Whether its weights are parameters, not tensors that something else makes of others at each call."""
    if type(part) is nn.MultiheadAttention:
        return part._parameters.get("in_proj_weight") is not None and "weight" in part.out_proj._parameters
    return part._parameters.get("weight") is not None


def _is_known(part: nn.Module) -> bool:
    if type(part) is nn.Linear:
        return True
    if type(part) is nn.Embedding:
        return part.max_norm is None and not part.scale_grad_by_freq and not part.sparse
    if type(part) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return part.padding_mode == "zeros" and not isinstance(part.padding, str)
    return _is_transposed_linear(part) or (type(part) is nn.MultiheadAttention and attention_is_covered(part))


def _is_transposed_linear(part: nn.Module) -> bool:
    """Whether it is GPT-2's Linear; by name, as its import takes seconds."""
    return (type(part).__module__, type(part).__name__) == ("transformers.pytorch_utils", "Conv1D")


def _deferred_parameters(part: nn.Module) -> tuple[Tensor, ...]:
    """The parameters whose gradients the overridden forward defers."""
    if type(part) is nn.MultiheadAttention:
        return part.in_proj_weight, part.out_proj.weight  # type: ignore[return-value]
    return (part.weight,)  # type: ignore[return-value]


def _deferring_forward(part: nn.Module, deferral: Deferral) -> Callable[..., Any]:
    if type(part) is nn.Linear:
        return linear_forward(part, deferral)
    if type(part) is nn.Embedding:
        return embedding_forward(part, deferral)
    if _is_transposed_linear(part):
        return transposed_linear_forward(part, deferral)
    if type(part) is nn.MultiheadAttention:
        return attention_forward(part, deferral)
    return convolution_forward(part, deferral)  # type: ignore[arg-type]


def _held_by_others(module: nn.Module, candidates: list[nn.Module]) -> set[int]:
    """Identities of the parameters that a module beside the candidates holds too: it may use them in its own way."""
    covering = {id(part) for part in candidates}
    covering |= {id(part.out_proj) for part in candidates if type(part) is nn.MultiheadAttention}
    return {
        id(parameter)
        for part in module.modules()
        if id(part) not in covering
        for parameter in part._parameters.values()
        if parameter is not None
    }


def _copied_without(part: nn.Module) -> Callable[[dict[int, Any]], nn.Module]:
    """A `__deepcopy__` for a module whose forward is overridden: the copy computes with its own parameters."""
    held = weakref.ref(part)  # a module that kept itself alive would outlive its layer

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        original = held()
        assert original is not None
        overriding = {name: original.__dict__.pop(name) for name in _OVERRIDES if name in original.__dict__}
        try:
            return copy.deepcopy(original, memo)
        finally:
            original.__dict__.update(overriding)

    return deepcopy


def _refuse_second_path(name: str) -> Callable[[Tensor | None], None]:
    def refuse(grad: Tensor | None) -> None:
        if grad is not None:
            raise RuntimeError(
                f"parameter {name} is used both through its module and directly; the order of its gradient's sums"
                " would depend on the schedule. Call the module in both places, or hold the matrix as a parameter"
                " of the layer itself"
            )

    return refuse
