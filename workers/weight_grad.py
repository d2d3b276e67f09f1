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


class Workspace:
    """Scratch that a rank's layers share: no step allocates a weight's size anew, and it stays in the cache."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}

    def scratch(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer of `parameter`'s shape; its content is anyone's."""
        place = (parameter.shape, dtype, parameter.device)
        if place not in self._scratch:
            self._scratch[place] = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        return self._scratch[place]


class Accumulator:
    """Where the gradients of one parameter are summed, and what of it is needed again and again."""

    __slots__ = ("_cast", "_cast_version", "_gradient", "_scratch", "_workspace", "parameter")

    def __init__(self, parameter: Tensor, workspace: Workspace) -> None:
        self.parameter = parameter
        self._workspace = workspace
        self._gradient: Tensor | None = None
        self._scratch: Tensor | None = None
        self._cast: Tensor | None = None
        self._cast_version = -1

    def cast(self, dtype: torch.dtype) -> Tensor:
        """The parameter, detached, in `dtype`; cast once per change of it rather than once per microbatch."""
        parameter = self.parameter
        if parameter.dtype == dtype:
            return parameter.detach()
        if self._cast is None or self._cast.dtype != dtype or self._cast_version != parameter._version:
            self._cast, self._cast_version = parameter.detach().to(dtype), parameter._version
        return self._cast

    def add(self, uses: list[Use]) -> None:
        """Form the sum of `uses`, in order and in the dtype they were computed in, and add it once to `.grad`."""
        parameter, first = self.parameter, uses[0]
        grad = parameter.grad
        if grad is None:
            if self._gradient is None:
                self._gradient = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            parameter.grad = self._gradient
            if len(uses) == 1 and first.dtype == self._gradient.dtype:
                first.form(self._gradient)
                return
        scratch = self._scratch
        if scratch is None or scratch.dtype != first.dtype:
            scratch = self._scratch = self._workspace.scratch(parameter, first.dtype)
        first.form(scratch)
        for use in uses[1:]:
            scratch.add_(use.form(None))
        if grad is None:
            assert self._gradient is not None
            self._gradient.copy_(scratch)
        else:
            grad.add_(scratch)


@dataclass(slots=True)
class Use:
    """One use of a parameter in one microbatch: enough to form its gradient later."""

    accumulator: Accumulator
    form: Callable[[Tensor | None], Tensor]
    """Forms the gradient, float[parameter.shape]: into the given tensor, or a new one."""
    dtype: torch.dtype
    """What `form` computes in: the autocast dtype, or the parameter's own."""
    held: tuple[Tensor, ...]
    """What waits between the input gradient and the weight gradient."""


class WeightGradQueue:
    """The uses of one layer's parameters in one microbatch, in the order the backward pass met them."""

    __slots__ = ("_forward_uses", "_uses", "at_once", "closed")

    def __init__(self) -> None:
        self._uses: dict[Accumulator, list[Use]] = {}
        self._forward_uses: dict[Accumulator, int] = {}
        self.at_once = False
        """Whether each gradient is formed as soon as its last use has come, while its operands are in the cache."""
        self.closed = False
        """Whether a further walk of the graph goes on, whose uses were drained already."""

    def used(self, accumulator: Accumulator) -> None:
        """The forward pass used the parameter."""
        self._forward_uses[accumulator] = self._forward_uses.get(accumulator, 0) + 1

    def put(self, use: Use) -> None:
        """The backward pass came to a use."""
        accumulator = use.accumulator
        uses = self._uses.setdefault(accumulator, [])
        uses.append(use)
        if self.at_once and len(uses) == self._forward_uses[accumulator]:
            accumulator.add(self._uses.pop(accumulator))

    @torch.no_grad()
    def drain(self) -> None:
        """Form every gradient that is queued and add it to its parameter's `.grad`, once per parameter."""
        while self._uses:
            accumulator = next(iter(self._uses))
            accumulator.add(self._uses.pop(accumulator))

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for the weight gradients; a storage that several uses hold counts once."""
        held = [t.untyped_storage() for uses in self._uses.values() for use in uses for t in use.held]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


@dataclass
class Deferral:
    """What the overridden forwards of one layer share: the queue of the microbatch that runs now."""

    workspace: Workspace
    queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    accumulators: dict[int, Accumulator] = field(default_factory=dict)
    """By identity of the parameter: two modules may share one."""

    def accumulator(self, parameter: Tensor) -> Accumulator:
        return self.accumulators.setdefault(id(parameter), Accumulator(parameter, self.workspace))


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


UseOf = Callable[[Tensor], Use]
"""Gradient of a module's output -> the use of its matrix."""


def _defer(output: Tensor, accumulator: Accumulator, queue: WeightGradQueue, use_of: UseOf) -> Tensor:
    """`output`, made from a detached parameter, such that its gradient puts a use of the parameter into `queue`.

    The input gradient stays stock autograd's business. Python between two matrix products is expensive, because the
    product has thrown the interpreter out of the cache; so there is as little of it as can be.
    """
    if not (torch.is_grad_enabled() and accumulator.parameter.requires_grad):
        return output
    queue.used(accumulator)
    if not output.requires_grad:
        return _Source.apply(output, accumulator.parameter, queue, use_of)  # type: ignore[return-value]

    def hook(grad: Tensor) -> None:
        if not queue.closed:
            queue.put(use_of(grad))

    output.register_hook(hook)
    return output


class _Source(Function):
    """Begins a graph where neither input nor bias gave autograd a reason to."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, parameter: Tensor, queue: WeightGradQueue, use_of: UseOf) -> Tensor:  # type: ignore[override]
        ctx.queue, ctx.use_of = queue, use_of
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        if not ctx.queue.closed:
            ctx.queue.put(ctx.use_of(grad_output))
        return None, None, None, None


class _Held:
    """A matrix's input, held outside autograd's own saved tensors and so without their checks and early release."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = tensor._version

    def take(self) -> Tensor:
        """The input, once: what is freed early is used again while it is in the cache."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        if tensor._version != self._version:
            raise RuntimeError(
                "the input of a matrix was changed in place after its use; its gradient is gone"
            )
        return tensor


def _linear_forward(module: nn.Linear, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    accumulator, bias = deferral.accumulator(module.weight), module.bias

    def forward(x: Tensor) -> Tensor:
        if x.dim() < 2:
            return forward(x.unsqueeze(0)).squeeze(0)
        dtype = _compute_dtype(x)
        if x.dtype != dtype:
            x = x.to(dtype)
        held = _Held(x)

        def use_of(grad: Tensor) -> Use:
            x = held.take()
            x_rows, rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])

            def form(out: Tensor | None) -> Tensor:
                return torch.mm(rows.t(), x_rows, out=out) if out is not None else torch.mm(rows.t(), x_rows)

            return Use(accumulator, form, dtype, (x_rows, rows))

        output = functional.linear(x, accumulator.cast(dtype), bias)
        return _defer(output, accumulator, deferral.queue, use_of)

    return forward


def _embedding_forward(module: nn.Embedding, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    padding_idx = -1 if module.padding_idx is None else module.padding_idx
    accumulator, parameter = deferral.accumulator(module.weight), module.weight

    def forward(tokens: Tensor) -> Tensor:
        def use_of(grad: Tensor) -> Use:
            def form(out: Tensor | None) -> Tensor:
                dense = torch.ops.aten.embedding_dense_backward(
                    grad, tokens, parameter.shape[0], padding_idx, False
                )
                return dense if out is None else out.copy_(dense)

            return Use(accumulator, form, grad.dtype, (tokens, grad))

        output = functional.embedding(tokens, parameter.detach(), module.padding_idx)
        return _defer(output, accumulator, deferral.queue, use_of)

    return forward


def _convolution_forward(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, deferral: Deferral
) -> Callable[[Tensor], Tensor]:
    spatial = len(module.kernel_size)
    assert not isinstance(module.padding, str)
    geometry = (module.stride, module.padding, module.dilation, False, (0,) * spatial, module.groups)
    accumulator, bias, sizes = deferral.accumulator(module.weight), module.bias, [module.out_channels]

    def forward(x: Tensor) -> Tensor:
        if x.dim() == spatial + 1:
            return forward(x.unsqueeze(0)).squeeze(0)
        dtype = _compute_dtype(x)
        if x.dtype != dtype:
            x = x.to(dtype)
        weight = accumulator.cast(dtype)
        held = _Held(x)

        def use_of(grad: Tensor) -> Use:
            x = held.take()

            def form(out: Tensor | None) -> Tensor:
                formed = torch.ops.aten.convolution_backward(
                    grad, x, weight, sizes, *geometry, [False, True, False]
                )[1]
                return formed if out is None else out.copy_(formed)

            return Use(accumulator, form, dtype, (x, grad))

        output = torch.convolution(x, weight, bias, *geometry)
        return _defer(output, accumulator, deferral.queue, use_of)

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


def cover(module: nn.Module, workspace: Workspace) -> tuple[Deferral, tuple[str, ...]]:
    """Defer the weight gradients of every Linear, Embedding and Conv inside `module`.

    Their weights and biases must stay the parameters that they are now.

    Returns:
        The deferral whose `queue` is to be set before each forward pass, and the names of the matrices that no
        deferral covers (parameters of two or more dimensions): their gradient takes a second walk of the graph.
    """
    deferral = Deferral(workspace)
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
