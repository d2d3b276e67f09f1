"""A frozen parameter has no gradient, and every other bit of the microbatch is as with nothing frozen."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import Attention, Normalized, RawMatrix, Residual, Transposed, Twice, Vectors, model
from test_engine_bits import REAL
from torch import Tensor, nn

from workers.build import build_layers
from workers.config import DataConfig, ModelConfig, OptimizerConfig
from workers.data.dataset import Batch, Dataset
from workers.data.registry import open_dataset
from workers.freezing.mask import Mask
from workers.gradients.sink import GradientSink
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.layers.loss import Loss
from workers.models.definition import ModelDefinition
from workers.models.registry import build_definition
from workers.protocol.errors import JobError
from workers.state.optim import make_optimizer
from workers.step.stage import Stage

CPU = torch.device("cpu")
TRAITS = (
    "plain",
    "dropout",
    "twice",
    "two-outputs",
    "transposed",
    "batchnorm",
    "raw-matrix",
    "attention",
    "tied",
)


def small(trait: str) -> tuple[ModelDefinition, Dataset]:
    return model(trait), Vectors()


def real(name: str, folder: Path) -> tuple[ModelDefinition, Dataset]:
    source = DataConfig(source="digits" if name == "vit" else "python-docs")
    config = ModelConfig(**{**REAL[name].model_dump(), "layers": 2})
    data = open_dataset(source, config, str(folder))
    return build_definition(config, data.vocabulary), data.dataset


Masks = Callable[[int, int], Mask]
"""Layer, global microbatch -> what it skips."""


class Masked:
    """Freezing by masks alone."""

    prefix = 0
    frozen_mode = "train"

    def __init__(self, masks: Masks) -> None:
        self.mask = masks


class Pipeline:
    """A model cut into two stages, which runs single microbatches."""

    def __init__(self, definition: ModelDefinition, precision: str, recompute: bool, masks: Masks) -> None:
        optimizer = make_optimizer(OptimizerConfig(), 1)
        count = len(definition.layers)
        built = build_layers(
            definition, range(count), seed=3, precision=precision, device=CPU, optimizer=optimizer
        )
        layers = [layer for layer, _ in built.values()]
        dropped = frozenset(range(count) if recompute else ())
        loss = Loss(layers[-1], definition.loss, precision=precision, device=CPU)
        self.layers, freezing = layers, Masked(masks)
        self._sink = GradientSink({layer.index: layer.summed for layer in layers})
        self._stages = [
            Stage(layers[: count // 2], None, dropped, 3, self._sink, freezing=freezing),
            Stage(layers[count // 2 :], loss, dropped, 3, self._sink, freezing=freezing),
        ]
        self._recompute = recompute

    def run(self, microbatch: int, batch: Batch, *, split: bool) -> dict[str, Tensor | None]:
        """The microbatch's loss, the gradient at the cut and each parameter's gradient; None if absent."""
        first, second = self._stages
        middle = first.forward(microbatch, 0, batch.inputs, None)
        assert all(tensor.requires_grad == tensor.is_floating_point() for tensor in middle)
        loss, *_ = second.forward(microbatch, 0, middle, batch.targets)
        if self._recompute:
            second.recompute(microbatch)
            first.recompute(microbatch)
        grads = second.backward(microbatch, (), weights=not split)
        assert len(grads) == len(middle)
        assert first.backward(microbatch, grads, weights=not split) == ()
        if split:
            second.weight_grad(microbatch)
            first.weight_grad(microbatch)
        result: dict[str, Tensor | None] = {"loss": loss}
        result |= {f"cut {i}": grad.clone() for i, grad in enumerate(grads)}
        for layer in self.layers:
            for name, parameter in layer.module.named_parameters():
                result[f"{layer.name}.{name}"] = None if parameter.grad is None else parameter.grad.clone()
            for name, buffer in layer.module.named_buffers():
                result[f"buffer {layer.name}.{name}"] = buffer.clone()
            assert all(p.requires_grad for p in layer.module.parameters())
        for stage in self._stages:
            stage.drop()
        self._sink.drop()
        return result


def assert_only_the_frozen_are_absent(
    definition: ModelDefinition, dataset: Dataset, precision: str, *, recompute: bool, split: bool
) -> None:
    chosen: dict[int, frozenset[str]] = {}

    def masks(layer: int, microbatch: int) -> Mask:
        return Mask(chosen.get(layer, frozenset()), 0.0, 0.0, 0)

    draws = random.Random(7)
    names = [
        sorted(dict(layer.module.named_parameters()))
        for layer in Pipeline(definition, precision, recompute, masks).layers
    ]
    choices: list[Callable[[str], bool]] = [
        lambda name: True,
        lambda name: not name.endswith("bias"),
        lambda name: name.endswith("bias"),
        *[lambda name: draws.random() < 0.5] * 4,
    ]
    whole = Pipeline(definition, precision, recompute, masks)
    masked = Pipeline(definition, precision, recompute, masks)
    for microbatch, choice in enumerate(choices):
        batch = dataset.train([2 * microbatch, 2 * microbatch + 1])
        chosen.clear()
        expected = whole.run(microbatch, batch, split=split)
        chosen.update(
            {layer: frozenset(name for name in own if choice(name)) for layer, own in enumerate(names)}
        )
        frozen = {f"{masked.layers[layer].name}.{name}" for layer, own in chosen.items() for name in own}
        got = masked.run(microbatch, batch, split=split)
        for key, tensor in expected.items():
            formed = got[key]
            assert (formed is None) == (tensor is None or key in frozen), key
            assert tensor is None or formed is None or torch.equal(tensor, formed), key


@pytest.mark.each_choice
@pytest.mark.parametrize("trait", TRAITS)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_small_models(trait: str, recompute: bool, split: bool) -> None:
    assert_only_the_frozen_are_absent(*small(trait), "float32", recompute=recompute, split=split)


@pytest.mark.each_choice
@pytest.mark.parametrize("name", sorted(REAL))
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_real_models(tmp_path: Path, name: str, precision: str, recompute: bool, split: bool) -> None:
    definition, dataset = real(name, tmp_path)
    assert_only_the_frozen_are_absent(definition, dataset, precision, recompute=recompute, split=split)


class Stacked(nn.Module):
    """A bare matrix after a stack whose strides affect torch's product, unless the matrix has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(24, 24))
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x.reshape(-1, 6, 4, 24).transpose(1, 2).flatten(0, 1).transpose(0, 1) @ self.matrix
        ) * self.scale


class Latents(nn.Module):
    """Modules that see only a bare matrix, so that no path leads from their outputs to the layer's input; and
    a second bare matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(24, 24))
        self.latents = nn.Parameter(torch.randn(5, 24))
        self.keys = nn.Linear(24, 24, bias=False)
        self.values = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.mix + torch.softmax(x @ self.keys(self.latents).t(), dim=-1) @ self.values(
            self.latents
        )


def single(module: nn.Module) -> Layer:
    return Layer(0, "one", module, precision="float32", device=CPU, workspace=Workspace())


@pytest.mark.parametrize(
    "kind", [Residual, Twice, Transposed, Normalized, RawMatrix, Attention, Stacked, Latents]
)
@pytest.mark.parametrize("carries", [False, True])
def test_each_parameter_frozen_alone(kind: type[nn.Module], carries: bool) -> None:
    torch.manual_seed(1)
    layer = single(kind())
    parameters = dict(layer.module.named_parameters())
    x = torch.randn(48, 24).requires_grad_(carries)

    def run(frozen: frozenset[str], split: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        outputs, done = layer.forward((x,), 5, keep=True, frozen=frozen)
        grads = tuple(torch.linspace(-1, 1, o.numel()).reshape(o.shape) for o in outputs)
        inputs = layer.backward(done, grads, weights=not split)
        if split:
            layer.weight_grad(done)
        formed = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None
        return [*outputs, *inputs], formed

    for split in (False, True):
        tensors, formed = run(frozenset(), split)
        assert formed.keys() == parameters.keys()
        for names in [{name} for name in parameters] + [set(parameters) - {name} for name in parameters]:
            other_tensors, other = run(frozenset(names), split)
            assert other.keys() == parameters.keys() - names
            assert all(torch.equal(formed[name], grad) for name, grad in other.items()), names
            assert [t.requires_grad for t in other_tensors] == [t.requires_grad for t in tensors]
            assert all(map(torch.equal, tensors, other_tensors)), names


def test_nothing_of_a_frozen_matrix_is_held_between_the_input_gradient_and_the_weight_gradient() -> None:
    layer = single(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)))
    x = torch.randn(4, 24, requires_grad=True)
    _, done = layer.forward((x,), 0, keep=True, frozen=frozenset({"0.weight"}))
    layer.backward(done, (torch.ones(4, 24),), weights=False)
    held = [use.accumulator.parameter for uses in done.queue._uses.values() for use in uses]
    assert len(held) == 1
    assert held[0] is layer.module.get_parameter("2.weight")
    assert done.outputs is None


def test_a_raw_matrix_that_is_frozen_keeps_no_graph_for_a_second_walk() -> None:
    layer = single(RawMatrix())
    assert layer.uncovered == ("matrix",)
    _, done = layer.forward((torch.randn(4, 24),), 0, keep=True, frozen=frozenset({"matrix"}))
    layer.backward(done, (torch.ones(4, 24),), weights=False)
    assert done.outputs is None
    assert done.root_grads == ()
    layer.weight_grad(done)
    assert layer.module.get_parameter("matrix").grad is None
    assert layer.module.get_parameter("after.weight").grad is not None


def test_what_the_model_itself_holds_fixed_stays_fixed() -> None:
    module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    module[0].weight.requires_grad_(False)
    layer = single(module)
    for frozen in (frozenset[str](), frozenset({"0.bias", "1.weight"})):
        _, done = layer.forward((torch.randn(4, 24),), 0, keep=True, frozen=frozen)
        layer.backward(done, (torch.ones(4, 24),), weights=True)
        assert [p.requires_grad for p in module.parameters()] == [False, True, True, True]
        assert module[0].weight.grad is None


def test_a_forward_pass_that_fails_leaves_no_parameter_fixed() -> None:
    module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    layer = single(module)
    with pytest.raises(JobError, match="RuntimeError: mat1 and mat2 shapes"):
        layer.forward((torch.randn(4, 23),), 0, keep=True, frozen=frozenset({"0.weight", "1.bias"}))
    assert all(parameter.requires_grad for parameter in module.parameters())
