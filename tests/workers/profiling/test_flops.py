"""Floating-point operations of a sample: those that a hand counts, whatever is trained of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.config import DataConfig, ModelConfig
from workers.data.dataset import Batch
from workers.data.registry import open_dataset
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.registry import build_definition
from workers.profiling.flops import flops_per_sample

WIDTH, HIDDEN, LENGTH, LAYERS = 16, 64, 32, 3


def language(folder: Path, **model: Any) -> float:
    settings = {"layers": LAYERS, "width": WIDTH, "heads": 2, "context": LENGTH, **model}
    config = ModelConfig(family="gpt", **settings)
    data = open_dataset(DataConfig(source="python-docs"), config, str(folder))
    found = flops_per_sample(build_definition(config, data.vocabulary), data.dataset)
    assert found is not None
    return found


def products(vocabulary: int = 256) -> float:
    """Parameters of the matrices that a token passes through; the table of embeddings is none."""
    return LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) + WIDTH * vocabulary


def test_a_model_of_language_takes_six_per_parameter_and_token_and_its_attention(tmp_path: Path) -> None:
    """Kaplan et al. 2020, table 1, times three for the backward pass."""
    attention = LAYERS * 2 * 2 * LENGTH * WIDTH
    expected = 3 * LENGTH * (2 * products() + attention)
    assert language(tmp_path) == pytest.approx(expected, rel=1e-6)


def test_a_fixed_weight_has_no_gradient(tmp_path: Path) -> None:
    fixed = language(tmp_path, fixed=["block*.*", "embed.*"])
    assert fixed == pytest.approx(LENGTH * (2 * products() + LAYERS * 4 * LENGTH * WIDTH + 4 * WIDTH * 256))


class Wide(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads and float(x.sum()) > 0:
            return self.matrix(-x)
        return self.matrix(x)


def of(module: Any) -> float | None:
    definition = ModelDefinition((LayerBuilder("only", module),), functional.cross_entropy)
    return flops_per_sample(definition, Batch((torch.zeros(4, WIDTH),), (torch.zeros(4),)))


def test_the_first_layers_input_has_no_gradient() -> None:
    assert of(lambda: Wide(reads=False)) == 2 * 2 * WIDTH * HIDDEN


def test_a_convolution_counts() -> None:
    convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    definition = ModelDefinition((LayerBuilder("only", lambda: convolution),), functional.cross_entropy)
    found = flops_per_sample(definition, Batch((torch.zeros(2, 3, 10, 10),), ()))
    assert found == 2 * 2 * 10 * 10 * 8 * 3 * 3 * 3


def test_nothing_is_said_of_what_reads_values_or_multiplies_nothing() -> None:
    assert of(lambda: Wide(reads=True)) is None
    assert of(nn.ReLU) is None


def test_no_number_is_drawn() -> None:
    before = torch.get_rng_state()
    of(lambda: nn.Sequential(Wide(reads=False), nn.Dropout()))
    assert torch.equal(before, torch.get_rng_state())
