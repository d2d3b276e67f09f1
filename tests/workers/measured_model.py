"""A model whose storages can be counted by hand: two layers of one matrix each, and a loss."""

import ctypes
import sys
import time

import torch
from torch import Tensor, nn

from workers.data.dataset import Batch
from workers.models.definition import LayerBuilder, ModelDefinition

WIDTH, HIDDEN = 32, 64
BATCH = 4
READ_S = 0.02
"""What `SlowVectors` takes for a microbatch."""
SLEPT_S = 0.03
"""What a forward pass of each layer of the model `slow` takes at least."""


class Vectors:
    """Random vectors: float32[B, WIDTH] as both input and target."""

    train_samples = 64
    validation_samples = 8

    def train(self, indices: list[int]) -> Batch:
        generator = torch.Generator().manual_seed(sum(indices))
        x = torch.randn(len(indices), WIDTH, generator=generator)
        return Batch((x,), (x.clone(),))

    def validation(self, indices: list[int]) -> Batch:
        return self.train(indices)


class SlowVectors(Vectors):
    """Takes its time to read a microbatch."""

    def train(self, indices: list[int]) -> Batch:
        time.sleep(READ_S)
        return super().train(indices)


class Up(nn.Module):
    """relu(x @ W + b): the ReLU keeps its output, and the matrix keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class SlowUp(Up):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEPT_S)
        return super().forward(x)


class SlowDown(Down):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEPT_S)
        return super().forward(x)


class Raw(nn.Module):
    """A bare matrix beside one inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x @ self.matrix)


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def model(kind: str = "mlp") -> ModelDefinition:
    if kind == "slow":
        return ModelDefinition((LayerBuilder("up", SlowUp), LayerBuilder("down", SlowDown)), mean_square)
    middle = {
        "mlp": [],
        "raw": [LayerBuilder("raw", Raw)],
        "broken": [LayerBuilder("raw", Broken)],
        "crashed": [LayerBuilder("crashed", Crashed)],
        "exits": [LayerBuilder("exits", Exits)],
    }[kind]
    return ModelDefinition(
        (LayerBuilder("up", Up), LayerBuilder("down", Down), *middle),
        mean_square,
    )


class Broken(nn.Module):
    """A layer that works only on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this layer does not work")


class Crashed(Broken):
    def forward(self, x: Tensor) -> Tensor:
        ctypes.string_at(0)
        return x


class Exits(Broken):
    def forward(self, x: Tensor) -> Tensor:
        sys.exit(3)
