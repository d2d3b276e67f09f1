"""Layers of each architecture beside the model of transformers: the same logits and gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import (
    CONFIGS,
    fields_of,
    inputs_of,
    logits_of,
    saved_model,
    small_model,
    whole_model,
)
from torch import Tensor, nn

from workers.build import build_module
from workers.layers.deferred.cover import cover
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.models.huggingface.architecture import Model
from workers.models.huggingface.definition import CLASSES, architecture_of, definition_of, model_of
from workers.models.huggingface.source import Source
from workers.protocol.errors import JobError
from workers.protocol.section import Units

each_case = pytest.mark.parametrize("case", CONFIGS)


HALVED = [case for case in CONFIGS if (known := CLASSES.get(CONFIGS[case][0])) and known.halves]


def built_from(case: str, folder: Path, units: Units = "blocks") -> list[nn.Module]:
    """The layers of a case, with the weights of `folder`."""
    model = small_model(case)
    definition = definition_of(model, Source(folder, model), units)
    return [build_module(definition, n, seed=0).train() for n in range(len(definition.layers))]


def chained(modules: list[nn.Module], inputs: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    """The logits of one graph through the modules, with gradients of the sum of `weights` times the logits."""
    tensors = inputs
    for each in modules:
        returned = each(*tensors)
        tensors = returned if isinstance(returned, tuple) else (returned,)
    tensors[0].backward(weights)
    return tensors[0].detach()


def trained(modules: list[nn.Module], inputs: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    """Variant of `chained` layer by layer, as a rank runs them."""
    layers = [
        Layer(n, str(n), each, precision="float32", device=torch.device("cpu"), workspace=Workspace())
        for n, each in enumerate(modules)
    ]
    tensors, passes = inputs, []
    for layer in layers:
        tensors, done = layer.forward(tensors, 0, keep=True)
        passes.append(done)
    grads = (weights,)
    for layer, done in zip(reversed(layers), reversed(passes), strict=True):
        grads = layer.backward(done, grads, weights=True)
    return tensors[0].detach()


def gradients_of(model: Model, modules: list[nn.Module], units: Units) -> dict[str, Tensor]:
    """The gradient of each parameter of the layers, by its name in transformers; those of tied ones are one sum."""
    layers = architecture_of(model).layers_of(model, units)
    names = {
        (layer.name, name): layer.source_key(name)
        for layer, module in zip(layers, modules, strict=True)
        for name, _ in module.named_parameters()
    }
    for first, *others in definition_of(model, None).ties:
        for use in others:
            names[use.layer, use.parameter] = names[first.layer, first.parameter]
    sums: dict[str, Tensor] = {}
    for layer, module in zip(layers, modules, strict=True):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            key = names[layer.name, name]
            sums[key] = sums[key] + parameter.grad if key in sums else parameter.grad
    return sums


@pytest.mark.parametrize(
    "run", [pytest.param(chained, marks=pytest.mark.soak), trained], ids=["modules", "layers"]
)
@pytest.mark.parametrize(
    ("case", "padded", "units"),
    [
        (case, padded, units)
        for case in CONFIGS
        for padded in (False, True)
        for units in ("blocks", "halves")
        if not padded or "num_channels" not in CONFIGS[case][1]
        if units == "blocks" or case in HALVED
    ],
)
def test_logits_and_gradients_are_those_of_transformers(
    case: str, padded: bool, units: Units, run: Callable[..., Tensor], tmp_path: Path
) -> None:
    model = small_model(case)
    whole = saved_model(case, tmp_path)
    modules = built_from(case, tmp_path, units)
    inputs = inputs_of(model, padded=padded)
    logits = logits_of(model, whole, inputs)
    weights = torch.randn_like(logits)
    logits.backward(weights)
    ours = run(modules, tuple(inputs.values()), weights)
    torch.testing.assert_close(ours, logits.detach(), rtol=0.0, atol=0.0)
    theirs = {name: parameter.grad for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(gradients_of(model, modules, units), theirs, rtol=0.0, atol=0.0)


def test_blocks_without_halves_are_refused_as_such() -> None:
    assert len(HALVED) == 11
    for case in CONFIGS.keys() - HALVED:
        with pytest.raises(JobError, match=r'model\.units = "halves": between the parts of a block of'):
            definition_of(small_model(case), None, "halves")


@each_case
def test_initial_values_are_drawn_as_transformers_draws_them(case: str) -> None:
    """Of the same distributions, by layer: nothing is left unset, and what transformers sets to a constant is that."""
    model = small_model(case)
    whole = whole_model(model).state_dict()
    torch.manual_seed(5)
    for layer, builder in zip(
        architecture_of(model).layers_of(model), definition_of(model, None).layers, strict=True
    ):
        for name, tensor in builder.build().state_dict().items():
            theirs = whole[layer.source_key(name)].float()
            if theirs.numel() > 1 and theirs.std() > 0:
                assert 0.5 < float(tensor.std() / theirs.std()) < 2, (builder.name, name)
            else:
                assert torch.equal(tensor.float(), theirs), (builder.name, name)


@pytest.mark.each_choice
@pytest.mark.parametrize("options", [{"max_shard_size": "5KB"}, {}], ids=["shards", "one file"])
@each_case
def test_every_tensor_of_a_saved_model_lands_in_its_layer(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = saved_model(case, tmp_path, **options)
    assert ("max_shard_size" in options) == (tmp_path / "model.safetensors.index.json").exists()
    model = model_of(fields_of(tmp_path), small_model(case).name)
    theirs = whole.state_dict()
    seen: set[str] = set()
    for layer, module in zip(
        architecture_of(model).layers_of(model), built_from(case, tmp_path), strict=True
    ):
        for name, tensor in module.state_dict().items():
            seen.add(layer.source_key(name))
            assert torch.equal(tensor, theirs[layer.source_key(name)]), (layer.name, name)
    assert seen == theirs.keys()


@pytest.mark.parametrize("case", ["bert, sequences", "gpt2", "llama", "vit"])
def test_a_base_model_s_weights_are_taken_and_the_head_is_drawn(case: str, tmp_path: Path) -> None:
    model = small_model(case)
    whole = whole_model(model)
    base = getattr(whole, whole.base_model_prefix)
    base.save_pretrained(tmp_path)
    theirs = {f"{whole.base_model_prefix}.{key}": tensor for key, tensor in base.state_dict().items()}
    source = Source(tmp_path, model)
    lacking = set()
    for layer in architecture_of(model).layers_of(model):
        torch.manual_seed(7)
        (builder,) = (each for each in definition_of(model, source).layers if each.name == layer.name)
        for name, tensor in builder.build().state_dict().items():
            key = layer.source_key(name)
            if key in theirs:
                assert torch.equal(tensor, theirs[key]), key
            else:
                assert torch.isfinite(tensor).all()
                lacking.add(key)
    assert lacking == whole.state_dict().keys() - source.keys()
    assert lacking


@pytest.mark.parametrize(
    ("case", "uncovered"),
    [
        ("llama", set()),
        ("gpt2", set()),
        ("bert, sequences", set()),
        ("vit", {("embed", "position_embeddings")}),
        ("convnext_v2", set()),
        ("resnet", set()),
    ],
)
def test_gradients_of_all_matrices_in_modules_are_deferred(
    case: str, uncovered: set[tuple[str, str]]
) -> None:
    """Not those of a bare matrix; a parameter along one dimension, such as a class token, is no matrix."""
    definition = definition_of(small_model(case), None)
    found = {
        (each.name, name) for each in definition.layers for name in cover(each.build(), Workspace()).uncovered
    }
    assert found == uncovered


def test_what_is_no_model_here_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        JobError,
        match=r"\['T5Model'\].*is not one of .*LlamaForCausalLM.*, nor another class .*ForMaskedLM.*model\.factory",
    ):
        model_of({}, "T5Model")
    with pytest.raises(JobError, match=r"config\.json does not fit LlamaConfig"):
        model_of({"vocab_size": "many"}, "LlamaForCausalLM")
