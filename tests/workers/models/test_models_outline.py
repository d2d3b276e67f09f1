"""Layer sizes without the layers."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from workers.config import ModelConfig
from workers.models.definition import LayerBuilder, ModelDefinition, ParameterRef
from workers.models.loss import mean_cross_entropy
from workers.models.outline import LayerOutline, outline
from workers.models.registry import build_definition
from workers.protocol.errors import JobError


def definition(*builders: LayerBuilder, ties: tuple[tuple[ParameterRef, ...], ...] = ()) -> ModelDefinition:
    return ModelDefinition(layers=builders, loss=mean_cross_entropy, ties=ties)


@pytest.mark.parametrize("family", ["gpt", "llama", "vit"])
def test_agrees_with_the_built_layers_and_draws_nothing(family: str) -> None:
    config = ModelConfig(**{"family": family, "layers": 2, "width": 32})
    model = build_definition(config, 256)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    outlines = outline(model)
    assert torch.equal(torch.get_rng_state(), before)
    for layer, builder in zip(outlines, model.layers, strict=True):
        module = builder.build()
        count = sum(p.numel() for p in module.parameters())
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        assert layer == LayerOutline(
            name=builder.name, parameters=count, parameter_bytes=4 * count, shapes=shapes
        )


def test_a_model_larger_than_memory_has_an_outline() -> None:
    config = ModelConfig(family="gpt", layers=96, width=12288, heads=96, context=2048)
    total = sum(layer.parameters for layer in outline(build_definition(config, 50257)))
    assert total == 175_221_817_344


def test_tied_parameters_train_all_or_none() -> None:
    def fixed() -> nn.Module:
        return nn.Linear(3, 2).requires_grad_(False)

    tie = (ParameterRef("a", "weight"), ParameterRef("b", "weight"))
    assert outline(definition(LayerBuilder("a", fixed), LayerBuilder("b", fixed), ties=(tie,)))
    free = partial(nn.Linear, 3, 2)
    with pytest.raises(
        JobError, match=r"b\.weight is tied and has requires_grad = False, which a\.weight has not"
    ):
        outline(definition(LayerBuilder("a", free), LayerBuilder("b", fixed), ties=(tie,)))


def test_bytes_follow_the_type() -> None:
    layer = LayerBuilder("half", partial(nn.Linear, 4, 8, bias=False, dtype=torch.bfloat16))
    (half,) = outline(definition(layer))
    assert half == LayerOutline(name="half", parameters=32, parameter_bytes=64, shapes={"weight": (8, 4)})


class ReadsItsValues(nn.Linear):
    """Cannot be built on the meta device, where a tensor has no values."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.largest = self.weight.max().item()


def test_a_layer_that_cannot_be_built_on_meta_is_built_on_the_cpu() -> None:
    before = torch.get_rng_state()
    assert outline(definition(LayerBuilder("a", ReadsItsValues)))[0].parameters == 8
    assert torch.equal(torch.get_rng_state(), before)


def test_a_normal_draw_on_a_real_tensor_still_happens() -> None:
    drawn = []

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            real = torch.zeros(8, device="cpu")
            nn.init.normal_(real)
            drawn.append(real.clone())

    outline(definition(LayerBuilder("a", Draws)))
    assert drawn[0].abs().min() > 0


def test_a_parameter_used_twice_counts_once_in_its_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

    layers = (LayerBuilder("a", Twice), LayerBuilder("b", partial(nn.Linear, 4, 4, bias=False)))
    tie = (ParameterRef("a", "first.weight"), ParameterRef("b", "weight"))
    model = definition(*layers, ties=(tie,))
    assert [layer.parameters for layer in outline(model)] == [16, 16]
    by_second_name = (ParameterRef("a", "second.weight"), ParameterRef("b", "weight"))
    with pytest.raises(JobError, match=r"a\.second\.weight is tied, but .* give the first"):
        outline(definition(*layers, ties=(by_second_name,)))


def fails() -> nn.Module:
    raise RuntimeError("no such weights")


def returns_a_number() -> nn.Module:
    return 3  # type: ignore[return-value]


def test_errors_name_the_layer() -> None:
    with pytest.raises(
        JobError,
        match=r"layer 'a' could not be built: its builder raised RuntimeError: no such weights, at ",
    ):
        outline(definition(LayerBuilder("a", fails)))
    with pytest.raises(JobError, match=r"builder of layer 'a' returned a int: it must return a torch.nn"):
        outline(definition(LayerBuilder("a", returns_a_number)))


def test_ties_are_checked() -> None:
    layers = (LayerBuilder("a", partial(nn.Linear, 4, 8)), LayerBuilder("b", partial(nn.Linear, 8, 4)))
    missing = (ParameterRef("a", "weight"), ParameterRef("b", "gain"))
    with pytest.raises(JobError, match=r"b.gain is tied, but layer 'b' has no parameter 'gain'"):
        outline(definition(*layers, ties=(missing,)))
    unequal = (ParameterRef("a", "weight"), ParameterRef("b", "weight"))
    with pytest.raises(JobError, match=r"a.weight of shape \[8, 4\] and b.weight of shape \[4, 8\] are tied"):
        outline(definition(*layers, ties=(unequal,)))


def test_the_families_need_no_compiler_import() -> None:
    code = """
import sys
from workers.config import ModelConfig
from workers.models.outline import outline
from workers.models.registry import build_definition
for family in ("gpt", "llama", "vit"):
    outline(build_definition(ModelConfig(family=family, layers=1), 256))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_builders_that_load_tensors_make_no_noise(recwarn: pytest.WarningsRecorder) -> None:
    weights = nn.Linear(3, 2).state_dict()

    def loads() -> nn.Module:
        module = nn.Linear(3, 2)
        module.load_state_dict(weights)
        return module

    assert [layer.parameters for layer in outline(definition(LayerBuilder("a", loads)))] == [8]
    assert [str(warning.message) for warning in recwarn] == []
