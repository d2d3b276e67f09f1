"""Covers modules: their backward pass yields the input gradient and queues what the weight gradient needs.

`cover` overrides the forward of the modules that it knows, so that they put what their matrices' gradients need
into the `WeightGradQueue` of the microbatch at hand. Draining the queue forms each gradient and adds it once. This
module knows neither stages nor schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from workers.deferred.attention import attention_forward, attention_is_covered
from workers.deferred.modules import convolution_forward, embedding_forward, linear_forward
from workers.deferred.queue import Deferral, Home, WeightGradQueue, Workspace, new_home

__all__ = ["Deferral", "WeightGradQueue", "Workspace", "cover"]


def _override(module: nn.Module, deferral: Deferral) -> tuple[Callable[..., Any], tuple[Tensor, ...]] | None:
    """A forward that defers, and the parameters whose gradients it defers."""
    # Exact types only: a subclass may use its weight in ways of its own.
    if type(module) is nn.Linear:
        return linear_forward(module.weight, module.bias, deferral), (module.weight,)
    if (
        type(module) is nn.Embedding
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    ):
        return embedding_forward(module, deferral), (module.weight,)
    if (
        type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    ):
        return convolution_forward(module, deferral), (module.weight,)  # type: ignore[arg-type]
    if type(module) is nn.MultiheadAttention and attention_is_covered(module):
        return attention_forward(module, deferral), (module.in_proj_weight, module.out_proj.weight)
    return None


def cover(module: nn.Module, workspace: Workspace, home: Home = new_home) -> tuple[Deferral, tuple[str, ...]]:
    """Defer the weight gradients of every Linear, Embedding, Conv and MultiheadAttention inside `module`.

    Their weights and biases must stay the parameters that they are now.

    Args:
        home: where the gradients belong.

    Returns:
        The deferral whose `queue` is to be set before each forward pass, and the names of the matrices that no
        deferral covers (parameters of two or more dimensions): their gradient takes a second walk of the graph.
    """
    deferral = Deferral(workspace, home)
    covered: set[int] = set()
    for part in module.modules():
        override = _override(part, deferral)
        if override is not None:
            part.forward, parameters = override
            covered.update(map(id, parameters))
    uncovered = tuple(
        name
        for name, parameter in module.named_parameters()
        if parameter.dim() >= 2 and id(parameter) not in covered and parameter.requires_grad
    )
    for name, parameter in module.named_parameters():
        if id(parameter) in covered and parameter.requires_grad:
            parameter.register_hook(_refuse_second_path(name))
    return deferral, uncovered


def _refuse_second_path(name: str) -> Callable[[Tensor | None], None]:
    def refuse(grad: Tensor | None) -> None:
        if grad is not None:
            raise RuntimeError(
                f"parameter {name} is used both through its module and directly; the order of its gradient's sums"
                " would depend on the schedule. Call the module in both places, or hold the matrix as a parameter"
                " of the layer itself"
            )

    return refuse
