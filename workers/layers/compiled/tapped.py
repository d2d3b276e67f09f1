"""A traced layer with a tap behind each product whose matrix defers its gradient.

The compiler sees a pure function: a tap is one more input, without memory, whose gradient is that of the product's
output; the product's other factor is one more output. So the compiled backward pass yields input gradients and what
the weight gradients need, and those are formed as in a layer that is not compiled. Knows no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.fx import Graph, GraphModule, Node

from workers.layers.deferred import traced
from workers.layers.deferred.defer import UseOf
from workers.layers.deferred.modules import convolution_use, embedding_use, linear_use
from workers.layers.deferred.queue import Accumulator, WeightGradQueue


@dataclass(frozen=True)
class Product:
    """One product with a matrix."""

    mark: Callable[..., Tensor]
    """One of `traced.MARKS`."""
    weight: int
    """Number of the input that is the matrix."""
    factor: int
    """Number of the further output that is the other factor."""
    shape: torch.Size
    """Shape of its output."""
    dtype: torch.dtype
    device: torch.device
    rest: tuple[Any, ...]
    """Its further arguments, none of them a tensor."""

    def use_of(self, accumulator: Accumulator, factor: Tensor) -> UseOf:
        if self.mark in (traced.linear, traced.transposed_linear):
            return linear_use(accumulator, factor, transposed=self.mark is traced.transposed_linear)
        if self.mark is traced.embedding:
            return embedding_use(accumulator, factor, *self.rest)
        return convolution_use(accumulator, factor, self.rest)

    def tap(self) -> Tensor:
        return torch.empty(1, dtype=self.dtype, device=self.device).expand(self.shape)


@dataclass(frozen=True)
class Like:
    """Metadata of a tensor that the compiler knows."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Like:
        sizes, strides = (tuple(map(int, part)) for part in (tensor.shape, tensor.stride()))
        return Like(sizes, strides, tensor.dtype, tensor.device, tensor.requires_grad)

    def tensor(self) -> Tensor:
        """One with undefined values."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Tapped:
    """A traced layer: `graph(*inputs, *taps) -> (*outputs, *factors)`."""

    graph: GraphModule
    inputs: tuple[Like, ...]
    """Inputs of the traced layer."""
    outputs: tuple[Like, ...]
    products: tuple[Product, ...]

    @property
    def shareable(self) -> bool:
        """Whether all that it computes with is among its inputs."""
        return all(node.op not in ("get_attr", "call_module") for node in self.graph.graph.nodes)

    @property
    def key(self) -> str:
        """Equal for layers that one compiled function can serve."""
        lines = [node.format_node() for node in self.graph.graph.nodes]
        return "\n".join(map(str, (self.inputs, self.outputs, self.products, *lines)))


class _Tap(Function):
    """`output` as it is; its gradient is the tap's too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tap: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad


def linear(tap: Tensor, *arguments: Any) -> Tensor:
    return _Tap.apply(traced.linear(*arguments), tap)  # type: ignore[return-value]


def transposed_linear(tap: Tensor, *arguments: Any) -> Tensor:
    return _Tap.apply(traced.transposed_linear(*arguments), tap)  # type: ignore[return-value]


def embedding(tap: Tensor, *arguments: Any) -> Tensor:
    return _Tap.apply(traced.embedding(*arguments), tap)  # type: ignore[return-value]


def convolution(tap: Tensor, *arguments: Any) -> Tensor:
    return _Tap.apply(traced.convolution(*arguments), tap)  # type: ignore[return-value]


_WITH_TAP = dict(zip(traced.MARKS, (linear, transposed_linear, embedding, convolution), strict=True))


def with_taps(module: GraphModule) -> Tapped:
    """The traced layer with taps.

    Raises:
        ValueError: a marked product is of something else than a parameter.
    """
    nodes = [*module.graph.nodes]
    inputs = [node for node in nodes if node.op == "placeholder"]
    marked = [node for node in nodes if node.target in traced.MARKS]
    graph, copied = Graph(), dict[Node, Node]()
    for node in inputs:
        copied[node] = graph.node_copy(node)
    taps = {node: graph.placeholder(f"tap_{number}") for number, node in enumerate(marked)}
    factors: dict[tuple[Node, torch.dtype], Node] = {}
    products = []
    outputs: Sequence[Node] = ()
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            (outputs,) = node.args  # type: ignore[assignment]
            graph.output((*(copied[one] for one in outputs), *factors.values()))
        elif node in taps:
            given = tuple(copied[one] if isinstance(one, Node) else one for one in node.args)
            copied[node] = graph.call_function(_WITH_TAP[node.target], (taps[node], *given))  # type: ignore[index]
            products.append(_product(node, inputs, graph, copied, factors))
        else:
            copied[node] = graph.node_copy(node, lambda one: copied[one])
    return Tapped(
        GraphModule(module, graph),
        tuple(Like.of(node.meta["example_value"]) for node in inputs),
        tuple(Like.of(node.meta["example_value"]) for node in outputs),
        tuple(products),
    )


def _product(
    node: Node,
    inputs: list[Node],
    graph: Graph,
    copied: dict[Node, Node],
    factors: dict[tuple[Node, torch.dtype], Node],
) -> Product:
    """The product at `node`, with its other factor among `factors`."""
    factor, weight, *rest = node.args
    if weight not in inputs or not isinstance(factor, Node):
        raise ValueError("a matrix is computed, not a parameter")
    value = node.meta["example_value"]
    floats = factor.meta["example_value"].is_floating_point()
    place = (factor, value.dtype)
    if place not in factors:
        given = graph.call_method("to", (copied[factor], value.dtype)) if floats else copied[factor]
        factors[place] = graph.call_method("detach", (given,))
    return Product(
        mark=node.target,  # type: ignore[arg-type]
        weight=inputs.index(weight),  # type: ignore[arg-type]
        factor=[*factors].index(place),
        shape=torch.Size(map(int, value.shape)),
        dtype=value.dtype,
        device=value.device,
        rest=tuple(
            rest[1:] if node.target is traced.convolution else rest if node.target is traced.embedding else ()
        ),
    )


class Taps(Function):
    """The taps of one microbatch: one node at which the gradients of all products meet, and which queues their uses.

    Args:
        uses: filled by the caller after the forward pass: of each tap, what its gradient makes of it.
        anchor: any of the matrices, so that the node is part of the graph.
    """

    @staticmethod
    def forward(
        ctx: Any, queue: WeightGradQueue, uses: list[UseOf], products: Sequence[Product], anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.queue, ctx.uses = queue, uses
        ctx.set_materialize_grads(False)
        return tuple(product.tap() for product in products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        queue, uses = ctx.queue, ctx.uses
        if not queue.closed:
            # As a backward pass meets them: the last product first.
            for use_of, grad in zip(reversed(uses), reversed(grads), strict=True):
                if grad is not None:
                    queue.put(use_of(grad))
        uses.clear()
        return None, None, None, None
