"""What cannot train as PyTorch would train it is refused by name before anything starts, with the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.outline import outline
from workers.process.torch_modes import check_modes_kept
from workers.protocol.errors import JobError


@pytest.fixture(autouse=True)
def gradients_on() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


def of(*builders: Callable[[], nn.Module]) -> ModelDefinition:
    layers = (LayerBuilder(f"l{number}", builder) for number, builder in enumerate(builders))
    return ModelDefinition(tuple(layers), functional.cross_entropy)


def with_parameter(parameter: Callable[[], nn.Parameter]) -> nn.Module:
    module = nn.Linear(2, 2)
    module.extra = parameter()
    return module


def switched_off() -> nn.Module:
    torch.set_grad_enabled(False)
    return nn.Linear(2, 2)


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


@pytest.mark.parametrize(
    ("builder", "told"),
    [
        (
            lambda: nn.Embedding(4, 2, sparse=True),
            "Embedding of layer 'l0' has sparse = True: .*sparse=False",
        ),
        (lambda: nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True)), "0 of layer 'l0' has sparse = True"),
        (lambda: nn.LazyLinear(4), "parameter weight of layer 'l0' has no shape .*sizes"),
        (
            lambda: with_parameter(lambda: nn.Parameter(torch.zeros(2, dtype=torch.complex64))),
            "parameter extra of layer 'l0' is complex: .*view_as_complex",
        ),
        (hooked, "parameter weight of layer 'l0' has a hook that runs when .*register_hook"),
        (switched_off, "the builder of layer 'l0': its code switches gradients off.*no_grad"),
    ],
)
def test_a_layer_that_cannot_train_is_refused_by_name(builder: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(JobError, match=told):
        outline(of(builder))


def test_one_module_in_two_layers_is_refused_with_the_tie_to_name() -> None:
    shared = nn.Linear(2, 2)
    tie = "ties=((ParameterRef('l0', 'weight'), ParameterRef('l2', '0.weight')),)"
    with pytest.raises(JobError, match=re.escape(tie)):
        outline(of(lambda: shared, partial(nn.Linear, 2, 2), lambda: nn.Sequential(shared)))


def test_layers_that_are_alike_share_nothing() -> None:
    assert len(outline(of(*(partial(nn.Linear, 2, 2) for _ in range(50))))) == 50


def test_code_that_leaves_gradients_off_is_named_and_they_are_on_again() -> None:
    torch.set_grad_enabled(False)
    with pytest.raises(JobError, match=r"^model.factory = 'net:build': its code switches gradients off"):
        check_modes_kept("model.factory = 'net:build'")
    assert torch.is_grad_enabled()


def test_code_that_leaves_another_type_for_new_tensors_is_named_and_it_is_set_back() -> None:
    torch.set_default_dtype(torch.float64)
    with pytest.raises(
        JobError, match=r"^the builder of layer 'l0': its code has tensors made in torch.float64"
    ):
        check_modes_kept("the builder of layer 'l0'")
    assert torch.get_default_dtype() == torch.float32
