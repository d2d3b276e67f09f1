"""What `job.precision` makes of a layer: 16 bits where it computes, 32 where it sums and where training changes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from workers.build import build_layers
from workers.checkpoint.initial_weights import read_weights
from workers.config import OptimizerConfig
from workers.devices.cuda import check_gpu
from workers.layers.layer import Layer
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.protocol.errors import JobError
from workers.state.layer_state import LayerState, digest, host_copy, load_
from workers.state.optim import make_optimizer

CPU = torch.device("cpu")
ADAMW = make_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.1), 10)
HALF = torch.bfloat16


class Part(nn.Module):
    """A matrix, a fixed parameter, a constant, and a module with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.fixed = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("constant", torch.linspace(-1, 1, 6), persistent=False)
        self.constant: Tensor
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) * self.fixed + self.constant.to(x.dtype))


def built(precision: str, seed: int = 0) -> tuple[Layer, LayerState]:
    definition = ModelDefinition(layers=(LayerBuilder("part", Part),), loss=lambda x, y: x.mean())
    return build_layers(definition, [0], seed=seed, precision=precision, device=CPU, optimizer=ADAMW)[0]


def trained(precision: str, steps: int = 3) -> tuple[Layer, LayerState]:
    layer, state = built(precision)
    for step in range(steps):
        torch.manual_seed(step)
        (output,), done = layer.forward((torch.randn(8, 6),), step, keep=True)
        layer.backward(done, (torch.randn_like(output),), weights=True)
        ADAMW.update_(state, layer.gradients(), 1.0, ADAMW.lr(step))
        layer.summed.drop()
    return layer, state


def assert_casts_follow(layer: Layer, state: LayerState) -> None:
    for name in ("linear.weight", "linear.bias"):
        assert torch.equal(layer.module.get_parameter(name), state.weights[name].to(HALF))


def test_weights_and_boundaries_have_16_bits_sums_and_what_changes_32() -> None:
    layer, state = built("bfloat16")
    module = layer.module
    (output,), done = layer.forward((torch.randn(8, 6),), 1, keep=True)
    assert output.dtype == HALF
    layer.backward(done, (torch.ones_like(output),), weights=True)
    assert {name: p.dtype for name, p in module.named_parameters()} == {
        "linear.weight": HALF,
        "linear.bias": HALF,
        "fixed": HALF,
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
    }
    assert module.get_buffer("constant").dtype == torch.float32
    assert module.get_buffer("norm.running_mean").dtype == torch.float32
    assert {gradient.dtype for gradient in layer.gradients().values()} == {torch.float32}
    assert {state.weights[name].dtype for name in state.updates} == {torch.float32}
    assert {slot.dtype for slots in state.slots.values() for slot in slots.values()} == {torch.float32}
    assert state.slots.keys() == state.updates.keys() == layer.gradients().keys()


def test_training_begins_with_the_values_of_32_bits() -> None:
    _, state = built("bfloat16")
    _, wide = built("float32")
    for name in state.updates:
        assert torch.equal(state.weights[name], wide.weights[name])
    assert_casts_follow(*built("bfloat16"))


def test_an_update_smaller_than_16_bits_tell_is_not_lost() -> None:
    layer, state = built("bfloat16")
    before = state.weights["linear.weight"].clone()
    gradients = {"linear.weight": torch.ones(6, 6)}
    small = make_optimizer(OptimizerConfig(lr=1e-6), 10)
    for step in range(4):
        small.update_(state, gradients, 1.0, small.lr(step))
    assert (state.weights["linear.weight"] != before).all()
    assert_casts_follow(layer, state)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
def test_a_copy_goes_on_with_the_same_bits(precision: str) -> None:
    first, state = trained(precision, 2)
    second, other = built(precision, seed=7)
    load_(other, host_copy(state))
    for layer, own in ((first, state), (second, other)):
        torch.manual_seed(9)
        (output,), done = layer.forward((torch.randn(8, 6),), 5, keep=True)
        layer.backward(done, (torch.randn_like(output),), weights=True)
        ADAMW.update_(own, layer.gradients(), 1.0, ADAMW.lr(2))
    assert digest(state) == digest(other)


def test_weights_that_were_loaded_or_read_are_what_the_layer_computes_with(tmp_path: Path) -> None:
    source = host_copy(trained("bfloat16")[1])
    layer, state = built("bfloat16", seed=3)
    load_(state, source)
    assert_casts_follow(layer, state)
    layer, state = built("bfloat16", seed=4)
    values = {f"part.{name}": t.contiguous() for name, t in {**source.weights, **source.buffers}.items()}
    save_file(values, tmp_path / "weights.safetensors")
    read_weights(str(tmp_path / "weights.safetensors"), [state])
    assert_casts_follow(layer, state)
    assert torch.equal(state.weights["linear.weight"], source.weights["linear.weight"])


def test_with_autocast_all_that_is_kept_has_32_bits() -> None:
    layer, state = trained("bfloat16-autocast", 1)
    assert {p.dtype for p in layer.module.parameters()} == {torch.float32}
    assert state.weights["linear.weight"] is layer.module.get_parameter("linear.weight")


@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-autocast"])
def test_a_gpu_that_does_not_compute_in_16_bits_is_refused(precision: str) -> None:
    with pytest.raises(
        JobError, match=r"Tesla T4 has compute capability 7\.5, .* from 8\.0 on: set job\.precision"
    ):
        check_gpu(precision, "Tesla T4", (7, 5))
    check_gpu("float32", "Tesla T4", (7, 5))
    check_gpu(precision, "A100", (8, 0))


class Careless(nn.Module):
    """Normalises with a constant of 32 bits before a matrix."""

    def __init__(self, matrix: type[nn.Module]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor
        self.inner = nn.Linear(6, 6, bias=False) if matrix is nn.Linear else nn.Conv1d(2, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - self.mean)


@pytest.mark.parametrize("matrix", [nn.Linear, nn.Conv1d])
def test_an_input_of_32_bits_at_a_matrix_of_16_is_an_error_not_an_old_cast(matrix: type[nn.Module]) -> None:
    builder = LayerBuilder("careless", lambda: Careless(matrix))
    definition = ModelDefinition(layers=(builder,), loss=lambda x, y: x.mean())
    layers = build_layers(definition, [0], seed=0, precision="bfloat16", device=CPU, optimizer=ADAMW)
    with pytest.raises(JobError, match=r"layer careless .* an input of float32 meets a matrix of bfloat16"):
        layers[0][0].forward((torch.randn(4, 2, 6),), 1, keep=True)


def test_a_frequent_token_gets_the_sum_of_all_its_rows() -> None:
    builder = LayerBuilder("embed", lambda: nn.Embedding(4, 2))
    definition = ModelDefinition(layers=(builder,), loss=lambda x, y: x.mean())
    layer, _ = build_layers(definition, [0], seed=0, precision="bfloat16", device=CPU, optimizer=ADAMW)[0]
    tokens = torch.zeros(4, 1000, dtype=torch.int64)
    for microbatch in range(2):
        (output,), done = layer.forward((tokens,), microbatch, keep=True)
        layer.backward(done, (torch.ones_like(output),), weights=True)
    assert layer.gradients()["weight"][0].tolist() == [8000.0, 8000.0]


def test_gradients_of_microbatches_are_summed_in_32_bits() -> None:
    builder = LayerBuilder("linear", lambda: nn.Linear(6, 6))
    definition = ModelDefinition(layers=(builder,), loss=lambda x, y: x.mean())
    layer, _ = build_layers(definition, [0], seed=0, precision="bfloat16", device=CPU, optimizer=ADAMW)[0]
    for microbatch, factor in enumerate((256.0, 1.0)):
        (output,), done = layer.forward((torch.ones(8, 6),), microbatch, keep=True)
        layer.backward(done, (torch.full_like(output, factor),), weights=True)
    for name, sums in layer.gradients().items():
        assert (sums == 8 * 257).all(), name  # 16 bits have 2048 and 2064, and nothing between
