"""Layers that do otherwise from a later pass on, by a count in a buffer, as training does not before step 6."""

from __future__ import annotations

import torch
from small_models import WIDTH, Head, Residual, cross_entropy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workers.models.definition import LayerBuilder, ModelDefinition

EARLY_PASSES = 24


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return x + torch.tanh(self.late(x) if self.passes > EARLY_PASSES else self.linear(x))

    def late(self, x: Tensor) -> Tensor:
        return self.linear(x)


class LateHook(Late):
    def late(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda grads: (2 * grads[0],))
        return y


class LateCount(Late):
    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def late(self, x: Tensor) -> Tensor:
        self.counted += 1
        return self.linear(x) * self.counted


class LateFlag(Late):
    def __init__(self) -> None:
        super().__init__()
        self.warm = False

    def late(self, x: Tensor) -> Tensor:
        self.warm = True
        return self.linear(x)


class LateMode(Late):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))

    def late(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return self.linear(x)


class LateModeOnce(LateMode):
    def late(self, x: Tensor) -> Tensor:
        if self.passes == EARLY_PASSES + 1:
            self.norm.eval()
        return self.linear(x)


class LateCheckpoint(Late):
    def late(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=True)


LATE: dict[str, type[Late]] = {
    kind.__name__: kind for kind in (LateHook, LateCount, LateFlag, LateMode, LateModeOnce, LateCheckpoint)
}


def model(late: str) -> ModelDefinition:
    """Four layers, the second of which does otherwise later on."""
    kinds = [Residual, LATE[late], Residual, Head]
    return ModelDefinition(tuple(LayerBuilder(f"l{i}", kind) for i, kind in enumerate(kinds)), cross_entropy)
