"""Small models with one awkward trait each, as factories and a data source for engine tests."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.data.dataset import Batch
from workers.models.definition import LayerBuilder, ModelDefinition, ParameterRef

WIDTH = 24


class Vectors:
    """Random vectors and labels by index: float32[B, WIDTH], int64[B]."""

    train_samples = 64
    validation_samples = 8

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(72, WIDTH, generator=generator)
        self._y = torch.randint(0, 5, (72,), generator=generator)

    def train(self, indices: list[int]) -> Batch:
        return Batch((self._x[indices].clone(),), (self._y[indices].clone(),))

    def validation(self, indices: list[int]) -> Batch:
        return self.train([64 + i for i in indices])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets)


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class TwoOutputs(nn.Module):
    """Returns the stream and a second tensor that only the next layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.left(x), self.right(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return x + self.mix(torch.tanh(side))


class Twice(nn.Module):
    """A layer that uses one matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.shared(x)))


class Transposed(nn.Module):
    """A layer whose output is a transposed view, [WIDTH, B]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).t()


class FromTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x).t())


class Normalized(nn.Module):
    """BatchNorm: buffers that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


class Adapted(Residual):
    """A layer with fixed parameters of its own and trainable ones beside them, like a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


class RawMatrix(nn.Module):
    """A bare matrix without a module: its gradient takes the second walk."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(torch.tanh(x @ self.matrix))


class Attention(nn.Module):
    """Torch's own attention, whose out_proj is never called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], 3, 8)
        return x + self.attention(rows, rows, rows, need_weights=False)[0].reshape(x.shape)


class Head(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class TiedHead(nn.Module):
    """A head whose matrix is tied to `Residual.up` of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.linear = nn.Linear(2 * WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.up(x)))


def steep(factor: float, outputs: Tensor, targets: Tensor) -> Tensor:
    return factor * cross_entropy(outputs, targets)


def model(trait: str, classes: int = 5, factor: float = 1.0) -> ModelDefinition:
    """A model of 8 layers with `trait` in the middle and a head of `classes` (the tied head has its own).

    Args:
        factor: on the loss, and so on all gradients.
    """
    plain = [Residual] * 3
    middle = {
        "plain": [Residual, Residual],
        "dropout": [lambda: Residual(0.2), lambda: Residual(0.2)],
        "two-outputs": [TwoOutputs, TwoInputs],
        "twice": [Twice, Residual],
        "transposed": [Transposed, FromTransposed],
        "batchnorm": [Normalized, Normalized],
        "raw-matrix": [RawMatrix, Residual],
        "attention": [Attention, Residual],
        "tied": [Residual, Residual],
        "fixed": [Adapted, Adapted],
    }[trait]
    head = TiedHead if trait == "tied" else partial(Head, classes)
    kinds = [*plain, *middle, Residual, Residual, head]
    ties = ()
    if trait == "tied":
        ties = ((ParameterRef("l0", "up.weight"), ParameterRef("l7", "up.weight")),)
    loss = cross_entropy if factor == 1.0 else partial(steep, factor)
    return ModelDefinition(tuple(LayerBuilder(f"l{i}", kind) for i, kind in enumerate(kinds)), loss, ties)
