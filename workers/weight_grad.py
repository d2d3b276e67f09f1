"""Deferred weight gradients: the backward pass yields the input gradient and queues what the weight gradient needs.

`cover` overrides the forward of a module's Linear, Embedding and Conv instances with autograd functions that put
(input, output gradient, parameter) into the `WeightGradQueue` of the microbatch at hand. Draining the queue forms
each gradient and adds it once. This module knows neither stages nor schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(slots=True)
class Use:
    """One use of a parameter in one microbatch: enough to form its gradient later."""

    parameter: nn.Parameter
    form: Callable[[Tensor | None], Tensor]
    """Forms the gradient: float[parameter.shape], into the given scratch if that is of the right dtype."""
    dtype: torch.dtype
    """What `form` computes in: the autocast dtype, or the parameter's own."""
    held: tuple[Tensor, ...]
    """What waits between the input gradient and the weight gradient."""


class WeightGradQueue:
    """The uses of one layer's parameters in one microbatch, in the order the backward pass met them."""

    def __init__(self, *, walked_twice: bool = False) -> None:
        self.walked_twice = walked_twice
        """Whether the graph is walked again for what no deferral covers, so that operands must stay."""
        self._uses: dict[int, list[Use]] = {}
        self._forward_uses: dict[int, int] = {}
        self._at_once: Workspace | None = None
        self._closed = False

    def used(self, parameter: nn.Parameter) -> None:
        """The forward pass used `parameter`."""
        self._forward_uses[id(parameter)] = self._forward_uses.get(id(parameter), 0) + 1

    def put(self, use: Use) -> None:
        """The backward pass came to a use."""
        if self._closed:
            return
        uses = self._uses.setdefault(id(use.parameter), [])
        uses.append(use)
        if self._at_once is not None and len(uses) == self._forward_uses[id(use.parameter)]:
            _accumulate(self._uses.pop(id(use.parameter)), self._at_once)

    def drain_at_once(self, workspace: Workspace) -> None:
        """From now on form each parameter's gradient as soon as its last use has come, while its operands are still
        in the cache."""
        self._at_once = workspace

    def drain(self, workspace: Workspace) -> None:
        """Form every gradient that is queued and add it to its parameter's `.grad`, once per parameter.

        The uses of one parameter are summed in queue order, in the dtype they were computed in; the sum is added to
        `.grad` in the parameter's dtype.
        """
        while self._uses:
            _accumulate(self._uses.pop(next(iter(self._uses))), workspace)

    def close(self) -> None:
        """Take no more uses: a further walk of the graph comes to those again that were drained already."""
        self._closed = True

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for the weight gradients; a storage that several uses hold counts once."""
        held = [t.untyped_storage() for uses in self._uses.values() for use in uses for t in use.held]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


class Workspace:
    """Scratch and gradient buffers that live as long as the rank: no step allocates a weight's size anew."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def scratch(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer of `parameter`'s shape; its content is anyone's."""
        place = (parameter.shape, dtype, parameter.device)
        if place not in self._scratch:
            self._scratch[place] = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        return self._scratch[place]

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """`parameter`'s own gradient buffer; its content is from an earlier step."""
        buffer = self._gradients.get(id(parameter))
        if buffer is None:
            buffer = self._gradients[id(parameter)] = torch.empty_like(
                parameter, memory_format=torch.contiguous_format
            )
        return buffer


@torch.no_grad()
def _accumulate(uses: list[Use], workspace: Workspace) -> None:
    parameter = uses[0].parameter
    first_of_step = parameter.grad is None
    if first_of_step:
        parameter.grad = workspace.gradient(parameter)
    grad = parameter.grad
    assert grad is not None
    if first_of_step and len(uses) == 1 and uses[0].dtype == grad.dtype:
        formed = uses[0].form(grad)
    else:
        formed = uses[0].form(workspace.scratch(parameter, uses[0].dtype))
    for use in uses[1:]:
        formed.add_(use.form(None))
    if not first_of_step:
        grad.add_(formed)
    elif formed is not grad:
        grad.copy_(formed)


@dataclass
class Deferral:
    """What the overridden forwards of one layer share: the queue of the microbatch that runs now."""

    queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    _casts: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """`parameter` in `dtype`, cast once per change of the parameter rather than once per microbatch."""
        if parameter.dtype == dtype:
            return parameter.detach()
        kept = self._casts.get(id(parameter))
        if kept is None or kept[0] != parameter._version or kept[1].dtype != dtype:
            kept = (parameter._version, parameter.detach().to(dtype))
            self._casts[id(parameter)] = kept
        return kept[1]


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _unchanged(ctx: Any) -> Tensor:
    # The input is held outside autograd's own saved tensors, whose check this one stands in for.
    if ctx.x._version != ctx.version:
        raise RuntimeError("the input of a matrix was changed in place after its use; its gradient is gone")
    return ctx.x


def _release(ctx: Any) -> None:
    # As autograd does with its own saved tensors: what is freed early is used again while it is in the cache.
    if not ctx.queue.walked_twice:
        ctx.x = ctx.weight = None


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, parameter: nn.Parameter, weight: Tensor, queue: Any
    ) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.weight, ctx.parameter, ctx.queue = x, weight, parameter, queue
        ctx.version = x._version
        queue.used(parameter)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        x, weight, parameter = _unchanged(ctx), ctx.weight, ctx.parameter
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[1] else None
        if parameter.requires_grad:
            x_rows = x.reshape(-1, x.shape[-1])

            def form(out: Tensor | None) -> Tensor:
                return torch.mm(rows.t(), x_rows, out=out) if out is not None else torch.mm(rows.t(), x_rows)

            ctx.queue.put(Use(parameter, form, weight.dtype, (x_rows, rows)))
        _release(ctx)
        return grad_x, grad_bias, None, None, None


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: nn.Parameter, weight: Tensor, tokens: Tensor, padding_idx: int, queue: Any
    ) -> Tensor:  # type: ignore[override]
        ctx.parameter, ctx.tokens, ctx.padding_idx, ctx.queue = parameter, tokens, padding_idx, queue
        queue.used(parameter)
        return functional.embedding(tokens, weight, None if padding_idx < 0 else padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        parameter, tokens, padding_idx = ctx.parameter, ctx.tokens, ctx.padding_idx

        def form(out: Tensor | None) -> Tensor:
            dense = torch.ops.aten.embedding_dense_backward(
                grad_output, tokens, parameter.shape[0], padding_idx, False
            )
            return dense if out is None else out.copy_(dense)

        if parameter.requires_grad:
            ctx.queue.put(Use(parameter, form, grad_output.dtype, (tokens, grad_output)))
        return None, None, None, None, None


class _Convolution(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        parameter: nn.Parameter,
        weight: Tensor,
        geometry: Any,
        queue: Any,
    ) -> Tensor:
        ctx.x, ctx.weight, ctx.parameter, ctx.geometry, ctx.queue = x, weight, parameter, geometry, queue
        ctx.version = x._version
        queue.used(parameter)
        return torch.convolution(x, weight, bias, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        x, weight, parameter, geometry = _unchanged(ctx), ctx.weight, ctx.parameter, ctx.geometry
        sizes = [parameter.shape[0]]

        def gradients(mask: list[bool]) -> tuple[Tensor | None, ...]:
            return torch.ops.aten.convolution_backward(grad_output, x, weight, sizes, *geometry, mask)

        grad_x, _, grad_bias = gradients([ctx.needs_input_grad[0], False, ctx.needs_input_grad[1]])

        def form(out: Tensor | None) -> Tensor:
            grad = gradients([False, True, False])[1]
            assert grad is not None
            return grad if out is None else out.copy_(grad)

        if parameter.requires_grad:
            ctx.queue.put(Use(parameter, form, weight.dtype, (x, grad_output)))
        _release(ctx)
        return grad_x, grad_bias, None, None, None, None


def _linear_forward(module: nn.Linear, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if x.dim() < 2:
            x = x.unsqueeze(0)
            return forward(x).squeeze(0)
        dtype = _compute_dtype(x)
        bias = None if module.bias is None else module.bias.to(dtype)
        weight = deferral.cast(module.weight, dtype)
        return _Linear.apply(x.to(dtype), bias, module.weight, weight, deferral.queue)  # type: ignore[return-value]

    return forward


def _embedding_forward(module: nn.Embedding, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    padding_idx = -1 if module.padding_idx is None else module.padding_idx

    def forward(tokens: Tensor) -> Tensor:
        return _Embedding.apply(module.weight, module.weight.detach(), tokens, padding_idx, deferral.queue)  # type: ignore[return-value]

    return forward


def _convolution_forward(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, deferral: Deferral
) -> Callable[[Tensor], Tensor]:
    spatial = len(module.kernel_size)
    geometry = (module.stride, module.padding, module.dilation, False, (0,) * spatial, module.groups)

    def forward(x: Tensor) -> Tensor:
        if x.dim() == spatial + 1:
            return forward(x.unsqueeze(0)).squeeze(0)
        dtype = _compute_dtype(x)
        bias = None if module.bias is None else module.bias.to(dtype)
        weight = deferral.cast(module.weight, dtype)
        return _Convolution.apply(x.to(dtype), bias, module.weight, weight, geometry, deferral.queue)  # type: ignore[return-value]

    return forward


def _override(module: nn.Module, deferral: Deferral) -> Callable[..., Tensor] | None:
    # Exact types only: a subclass may use its weight in ways of its own.
    if type(module) is nn.Linear:
        return _linear_forward(module, deferral)
    if (
        type(module) is nn.Embedding
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    ):
        return _embedding_forward(module, deferral)
    if (
        type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    ):
        return _convolution_forward(module, deferral)  # type: ignore[arg-type]
    return None


def cover(module: nn.Module) -> tuple[Deferral, tuple[str, ...]]:
    """Defer the weight gradients of every Linear, Embedding and Conv inside `module`.

    Returns:
        The deferral whose `queue` is to be set before each forward pass, and the names of the matrices that no
        deferral covers (parameters of two or more dimensions): their gradient takes a second walk of the graph.
    """
    deferral = Deferral()
    covered: set[int] = set()
    for part in module.modules():
        forward = _override(part, deferral)
        if forward is not None:
            part.forward = forward
            covered.add(id(part.weight))
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
