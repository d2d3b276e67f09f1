"""Profiles of devices that are not there: the same bytes as a measurement counts, and times that a hand works out."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import small_config
from measured_model import BATCH, HIDDEN, WIDTH
from test_profiler import config, measured
from torch import Tensor
from torch.nn import functional

from benchmarks.parts.configs import changed
from planner.accelerators import MATRIX_EFFICIENCY, MEMORY_EFFICIENCY, Accelerator
from planner.profile import DeviceProfile, LayerProfile, Link, Profile
from workers.config import DataConfig, ModelConfig, WorkerConfig
from workers.data.registry import open_dataset
from workers.models.registry import build_definition
from workers.profiling.on_paper import profile_on_paper
from workers.profiling.roofline import FusedAttention, Roofline

FLOPS, RATE = 1e12, 1e10
"""What products and memory reach on the device of these tests."""
DEVICE = Accelerator(
    name="made up",
    memory_bytes=10**9,
    float32_flops=FLOPS / MATRIX_EFFICIENCY,
    tf32_flops=None,
    half_flops=4 * FLOPS / MATRIX_EFFICIENCY,
    bytes_per_s=RATE / MEMORY_EFFICIENCY,
    link_bytes_per_s=1e9,
)
LINK = Link(latency_s=1e-5, bytes_per_s=1e9)
BYTES = [field.name for field in fields(LayerProfile) if field.name.endswith("_bytes")]
META = {"device": "meta"}


def on_paper(config: WorkerConfig) -> Profile:
    data = open_dataset(config.data, config.model, config.job.folder)
    definition = build_definition(config.model, data.vocabulary)
    devices = [
        DeviceProfile(kind="cuda", name="made up", memory_bytes=10**9, machine=str(n)) for n in range(2)
    ]
    return profile_on_paper(config, definition, data, DEVICE, devices, LINK)


def language(folder: Path, **model: Any) -> WorkerConfig:
    settings = {"family": "llama", "layers": 1, "width": 64, "heads": 2, "context": 32, **model}
    return small_config(
        folder,
        model=ModelConfig(**settings),
        data=DataConfig(source="python-docs"),
        microbatch_size=2,
        precision="bfloat16",
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["mlp", "raw"])
def test_it_counts_the_bytes_that_a_measurement_counts(tmp_path: Path, kind: str, precision: str) -> None:
    settings = config(tmp_path, kind, precision=precision)
    paper, real = on_paper(settings), measured(settings)
    for one, other in zip(paper.model.layers, real.model.layers, strict=True):
        assert {name: getattr(one, name) for name in BYTES} == {name: getattr(other, name) for name in BYTES}
        assert [(m.name, m.shape, m.scratch_bytes) for m in one.matrices] == [
            (m.name, m.shape, m.scratch_bytes) for m in other.matrices
        ]
        assert one.uncovered == other.uncovered
    assert paper.model.settings == real.model.settings


def test_16_bits_take_2_bytes_for_the_cast_4_for_the_gradient_and_12_for_the_rest(tmp_path: Path) -> None:
    layers = on_paper(language(tmp_path)).model.layers
    parameters = sum(layer.parameters for layer in layers)
    assert sum(layer.parameter_bytes for layer in layers) == (2 + 4) * parameters
    assert sum(layer.gradient_bytes for layer in layers) == 4 * parameters
    assert sum(layer.optimizer_bytes for layer in layers) == 8 * parameters


def test_the_parameters_are_those_of_the_published_model(tmp_path: Path) -> None:
    model = {"width": 4096, "heads": 32, "hidden": 11008, "context": 16, "vocabulary": 32_000}
    embed, block, head = (layer.parameters for layer in on_paper(language(tmp_path, **model)).model.layers)
    assert embed + 32 * block + head == 6_738_415_616  # LLaMA 7 B


def seconds(run: Any) -> float:
    with Roofline(DEVICE) as clock:
        run()
    return clock.now_s


def test_a_product_takes_its_multiplications_and_all_else_its_bytes() -> None:
    a, b = torch.empty(100, 200, **META), torch.empty(200, 300, **META)
    assert seconds(lambda: a @ b) == pytest.approx(4 * (100 * 200 + 200 * 300 + 100 * 300) / RATE)
    large = torch.empty(4000, 4000, **META)
    assert seconds(lambda: large @ large) == pytest.approx(2 * 4000**3 / FLOPS)
    half = large.bfloat16()
    assert seconds(lambda: half @ half) == pytest.approx(2 * 4000**3 / (4 * FLOPS))
    x = torch.empty(1000, **META)
    assert seconds(lambda: x + x) == pytest.approx(4 * (2 * 1000 + 1000) / RATE)
    assert seconds(lambda: x.add_(1.0)) == pytest.approx(4 * 2 * 1000 / RATE)
    assert seconds(lambda: x.add_(x.clone())) == pytest.approx(4 * (2 + 3) * 1000 / RATE)
    assert seconds(lambda: x.copy_(x.clone())) == pytest.approx(4 * (2 + 2) * 1000 / RATE)
    assert seconds(lambda: torch.empty_like(x)) == 0.0
    assert seconds(lambda: x.expand(50, 1000).sum(0)) == pytest.approx(4 * 2 * 1000 / RATE)
    assert seconds(lambda: x.view(10, 100).t()[1:]) == 0.0


def test_a_pass_of_a_layer_takes_what_its_operations_take(tmp_path: Path) -> None:
    up, _ = on_paper(config(tmp_path)).model.layers
    x, hidden, matrix = 4 * BATCH * WIDTH, 4 * BATCH * HIDDEN, 4 * WIDTH * HIDDEN
    product, relu = x + matrix + 4 * HIDDEN + hidden, 2 * hidden
    assert up.forward_s == pytest.approx((product + relu) / RATE)


def test_attention_of_16_bits_keeps_no_square_of_the_length(tmp_path: Path) -> None:
    contexts = (64, 128)
    kept: dict[str, list[int]] = {}
    for precision in ("float32", "bfloat16"):
        for context in contexts:
            settings = changed(language(tmp_path, context=context), precision=precision)
            kept.setdefault(precision, []).append(on_paper(settings).model.layers[1].activation_bytes)
    assert kept["bfloat16"][1] == pytest.approx(2 * kept["bfloat16"][0], rel=0.01)
    assert kept["float32"][1] > 2.1 * kept["float32"][0]  # deterministic training has no kernel for it


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_in_any_spelling_is_the_fused_one(batch_first: bool) -> None:
    query = torch.empty(1, 2, 8, 4, dtype=torch.bfloat16, **META)
    with FusedAttention(), Roofline(DEVICE) as clock:
        functional.scaled_dot_product_attention(query, query, query, None, 0.0, True)
        functional.scaled_dot_product_attention(query=query, key=query, value=query, is_causal=batch_first)
    assert clock.flops == 2 * 2 * 2 * 2 * 8 * 8 * 4


def test_a_mask_of_its_own_is_left_to_torch() -> None:
    def run() -> Tensor:
        query = torch.empty(1, 2, 8, 4, **META)
        return functional.scaled_dot_product_attention(
            query, query, query, attn_mask=torch.empty(8, 8, **META)
        )

    with FusedAttention():
        assert run().shape == (1, 2, 8, 4)
