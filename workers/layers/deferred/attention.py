"""Forward pass of `nn.MultiheadAttention` with the gradients of its matrices deferred.

That module hides them: the three projections into it are one bare parameter, and `out_proj` is never called. So its
forward pass is written out here, operation by operation that of torch's training path, for the same bits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from workers.layers.deferred.defer import Held, compute_dtype, defer_together, product
from workers.layers.deferred.intact import Intact
from workers.layers.deferred.modules import product_forward
from workers.layers.deferred.queue import Deferral, ParameterUse


def attention_is_covered(module: nn.MultiheadAttention) -> bool:
    """Whether `attention_forward` knows this configuration: one width, no extra keys, stock projections."""
    return (
        module.in_proj_weight is not None
        and module.bias_k is None
        and module.bias_v is None
        and not module.add_zero_attn
        and type(module.out_proj) is NonDynamicallyQuantizableLinear
    )


def attention_forward(
    module: nn.MultiheadAttention, deferral: Deferral
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Takes the place of `module.forward`, for a module that `attention_is_covered`."""
    held = weakref.ref(module)  # a module whose forward kept it alive would outlive its layer
    as_covered, out_as_covered = Intact(module, deferral), Intact(module.out_proj, deferral)
    project_in = product_forward(module.in_proj_weight, module.in_proj_bias, deferral)
    project_out = product_forward(module.out_proj.weight, module.out_proj.bias, deferral)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module = held()
        assert module is not None
        compiling = torch.compiler.is_dynamo_compiling()
        if (not module.training and not torch.is_grad_enabled()) or not (
            deferral.compiles if compiling else as_covered(query, key, value) and out_as_covered()
        ):
            return as_covered.stock(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        batched = query.dim() == 3
        if batched and module.batch_first:
            query, key, value = _each_once(lambda x: x.transpose(1, 0), query, key, value)
        elif not batched:
            # Not once for equal ones: torch takes the three for different tensors here.
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal only says that attn_mask is the causal mask: give the mask too")
        # Where nothing else is masked, torch trusts the hint and leaves the mask unread.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _mask(module, query, key, attn_mask, key_padding_mask)
        if query is key is value:
            q, k, v = _unpacked(project_in(query), 3)
        else:
            q, k, v = _project_apart(module, deferral, query, key, value)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            output, weights = _weighed(module, q, k, v, mask, dropout)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            output = _attended(module, q, k, v, mask, dropout, causal)
        output = project_out(output).view(q.shape)
        if not batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return output.transpose(1, 0) if module.batch_first else output, weights

    return forward


def _each_once(
    function: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`function` of the three, such that what was one tensor stays one, as far as torch looks at that."""
    if key is not value:
        return function(query), function(key), function(value)
    both = function(key)
    return both if query is key else function(query), both, both


def _unpacked(packed: Tensor, parts: int) -> tuple[Tensor, ...]:
    """[L, N, parts * E] -> `parts` times [L, N, E]."""
    stacked = packed.unflatten(-1, (parts, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return tuple(stacked[part] for part in range(parts))


def _project_apart(
    module: nn.MultiheadAttention, deferral: Deferral, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Query [L, N, E], key and value [S, N, E] of all heads, each from its own rows of `in_proj_weight`."""
    width = module.embed_dim
    if key is value:
        q, both = _products(module, deferral, (query, key), (width, 2 * width))
        return q, *_unpacked(both, 2)
    return _products(module, deferral, (query, key, value), (width,) * 3)


def _products(
    module: nn.MultiheadAttention,
    deferral: Deferral,
    inputs: tuple[Tensor, ...],
    sizes: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """The product of each input with its `sizes` rows of `in_proj_weight`, together one use of that."""
    if torch.compiler.is_dynamo_compiling():
        # Of parts of a matrix, which no tap follows: the gradient would be lost.
        torch._dynamo.graph_break(msg="attention over several tensors")
    dtype, device = compute_dtype(inputs[0], module.in_proj_weight), inputs[0].device
    inputs = tuple(x.to(dtype) for x in inputs)
    # Each part is cast by itself, as torch does it: alignment can change bits.
    weights = [part.to(dtype) for part in module.in_proj_weight.detach().split(sizes)]
    biases = (None,) * len(sizes) if module.in_proj_bias is None else module.in_proj_bias.split(sizes)
    accumulator = deferral.accumulator(module.in_proj_weight)
    held = [Held(x) for x in inputs]

    def use_of(*grads: Tensor | None) -> ParameterUse:
        inputs = [one.pop() for one in held]
        operands = [
            None if grad is None else (grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]))
            for grad, x in zip(grads, inputs, strict=True)
        ]

        def form(out: Tensor | None) -> Tensor:
            parts = [
                torch.zeros(size, module.embed_dim, dtype=dtype, device=device)
                if pair is None
                else torch.mm(pair[0].t(), pair[1])
                for size, pair in zip(sizes, operands, strict=True)
            ]
            return torch.cat(parts, out=out) if out is not None else torch.cat(parts)

        return ParameterUse(accumulator, form, dtype)

    outputs = tuple(product(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    return defer_together(outputs, accumulator, deferral.queue, use_of)


def _mask(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """Additive mask of the scores: [1 or N * heads, L or 1, S].

    Raises:
        ValueError: a mask of another shape or of integers.
    """
    length, rows, sources = query.shape[0], query.shape[1], key.shape[0]
    heads = module.num_heads
    mask = padding = None
    if attn_mask is not None:
        shapes = {2: (length, sources), 3: (rows * heads, length, sources)}
        if attn_mask.shape != shapes.get(attn_mask.dim()):
            raise ValueError(f"attn_mask is {tuple(attn_mask.shape)}, must be {shapes[2]} or {shapes[3]}")
        mask = _additive(attn_mask, query.dtype)
        mask = mask.unsqueeze(0) if mask.dim() == 2 else mask
    if key_padding_mask is not None:
        if key_padding_mask.shape != (rows, sources):
            raise ValueError(
                f"key_padding_mask is {tuple(key_padding_mask.shape)}, must be {(rows, sources)}"
            )
        padding = _additive(key_padding_mask, query.dtype).view(rows, 1, 1, sources)
        padding = padding.expand(-1, heads, -1, -1).reshape(rows * heads, 1, sources)
    if mask is None or padding is None:
        return padding if mask is None else mask
    return mask + padding


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask of {mask.dtype}: must be boolean (true is masked) or floating (added)")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _by_head(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """[L, N, E] -> [N * heads, L, E / heads]."""
    return x.view(x.shape[0], x.shape[1] * module.num_heads, module.head_dim).transpose(0, 1)


def _weighed(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Rows [L * N, E] for the projection out, and the weights [N, heads, L, S]."""
    length, rows, width = q.shape
    q, k, v = _by_head(module, q), _by_head(module, k), _by_head(module, v)
    q = q * math.sqrt(1.0 / float(module.head_dim))
    keys = k.transpose(-2, -1)
    scores = torch.bmm(q, keys) if mask is None else torch.baddbmm(mask, q, keys)
    weights = functional.softmax(scores, dim=-1)
    if dropout > 0.0:
        weights = functional.dropout(weights, p=dropout)
    output = torch.bmm(weights, v).transpose(0, 1).reshape(length * rows, width)
    return output, weights.view(rows, module.num_heads, length, -1)


def _attended(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
) -> Tensor:
    """Rows [L * N, E] for the projection out."""
    length, rows, width = q.shape
    q, k, v = (_by_head(module, x).view(rows, module.num_heads, x.shape[0], -1) for x in (q, k, v))
    if mask is not None:
        mask = mask.view(rows if mask.shape[0] > 1 else 1, -1, mask.shape[1], mask.shape[2])
    output = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    return output.permute(2, 0, 1, 3).reshape(rows * length, width)
