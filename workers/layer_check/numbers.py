"""Results of two microbatches in one layer, and the first difference between two such."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.layers.absent import is_absent
from workers.layers.layer import Tensors, carries_gradient


@dataclass(frozen=True)
class Numbers:
    """The results of two microbatches."""

    outputs: Tensors
    buffers: Tensors
    input_grads: Tensors
    weight_grads: Mapping[str, Tensor]
    recomputed: str = ""
    """The difference of the recomputed outputs from those of the first pass, in words."""

    def differs(self, other: Numbers, near: float = 0.0, near_sums: float = 0.0) -> str:
        """The first difference, in words; empty if there is none.

        Args:
            near: by how much of its length a tensor may differ; 0: not at all.
            near_sums: the same for weight gradients, which are sums over microbatches.
        """
        if self.recomputed:
            return self.recomputed
        for what, mine, theirs in (
            ("output", self.outputs, other.outputs),
            ("buffer", self.buffers, other.buffers),
            ("input gradient", self.input_grads, other.input_grads),
        ):
            if len(mine) != len(theirs):
                return f"it has {len(mine)} {what}s instead of {len(theirs)}"
            for one, expected in zip(mine, theirs, strict=True):
                absent = what == "input gradient" and (is_absent(one), is_absent(expected))
                if absent and any(absent):
                    if not all(absent):
                        return f"its {what} is absent on one side"
                elif text := difference(one, expected, near):
                    return f"its {what} {text}"
        # What is zero but for rounding, as of a bias before a norm, is measured by the layer.
        least = 0.0
        if near_sums:
            least = 1e-3 * sum(_length(grad) ** 2 for grad in other.weight_grads.values()) ** 0.5
        for name in sorted(self.weight_grads.keys() | other.weight_grads.keys()):
            one, expected = self.weight_grads.get(name), other.weight_grads.get(name)
            if one is None or expected is None:
                return f"{name} gets {'no' if one is None else 'a'} gradient"
            if text := difference(one, expected, near_sums, least):
                return f"the gradient of {name} {text}"
        return ""


def _length(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def difference(one: Tensor, expected: Tensor, near: float, least: float = 0.0) -> str:
    if one.shape != expected.shape or one.dtype != expected.dtype:
        return f"is {one.dtype} {list(one.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if torch.equal(one, expected):
        return ""
    if not carries_gradient(one):
        return "has other values"
    one, expected = (
        torch.view_as_real(t) if t.is_complex() else t for t in (one.detach(), expected.detach())
    )
    same = (one == expected) | (one.isnan() & expected.isnan())
    if bool(same.all()):
        return ""
    length = max(_length(expected), least) or 1.0
    apart = _length((one - expected).masked_fill_(same, 0.0))
    return "" if apart <= near * length else f"differs by {apart / length:.1e} of its length"
