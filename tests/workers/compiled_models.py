"""Layers that are compiled, and some that cannot be, as a factory for engine tests. Few kinds: each takes seconds."""

import torch
from small_models import WIDTH, cross_entropy
from torch import Tensor, nn
from torch.nn import functional

from workers.models.definition import LayerBuilder, ModelDefinition


class Mixed(nn.Module):
    """What a compiler can get wrong: one matrix used twice, running statistics, draws; and a break if told."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, WIDTH] -> float[B, WIDTH]."""
        if self.breaks and x.sum().item() > 1e9:
            raise ValueError("too large")
        hidden = self.up(functional.gelu(self.up(self.norm(x))))
        return x + functional.dropout(self.down(hidden), 0.2)


class Counts(Mixed):
    """Its code depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, WIDTH] -> float[B, WIDTH]."""
        self.calls += 1
        return super().forward(x) * (1.0 + self.calls)


class Raises(Mixed):
    """A user's mistake."""

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, WIDTH] -> float[B, WIDTH]."""
        return self.down(torch.cat((x, x), dim=-1))


def model() -> ModelDefinition:
    """Five layers of `Mixed`, the third of which breaks the graph."""
    kinds = [Mixed, Mixed, lambda: Mixed(breaks=True), Mixed, Mixed]
    return ModelDefinition(
        tuple(LayerBuilder(f"l{number}", kind) for number, kind in enumerate(kinds)), cross_entropy
    )


class Transposed(nn.Module):
    """The feed-forward part of GPT-2, whose matrices lie transposed."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D  # its import takes seconds

        self.up, self.down = Conv1D(2 * WIDTH, WIDTH), Conv1D(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, WIDTH] -> float[B, WIDTH]."""
        return x + self.down(functional.gelu(self.up(x)))
