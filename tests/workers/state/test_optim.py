"""The optimizers against torch's own, bit for bit, and the rules that torch does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.config import OptimizerConfig
from workers.protocol.errors import JobError
from workers.state.layer_state import LayerState, ParameterRef
from workers.state.optim import make_optimizer
from workers.state.optimizer_config import ParameterGroup

STEPS = 20
NAMES = ("adamw", "adam", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adadelta", "sgd")
NO_DECAY = ("block.embedding.*",)
_RULES: dict[Any, Any] = {
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
}
"""Those with two decays."""


def layer(seed: int) -> nn.Module:
    """A layer with matrices, vectors, a scalar and sizes that leave vector remainders."""
    torch.manual_seed(seed)
    module = nn.Module()
    module.embedding = nn.Embedding(13, 7)
    module.linear = nn.Linear(7, 31)
    module.convolution = nn.Conv2d(3, 5, 3)
    module.gain = nn.Parameter(torch.randn(()))
    module.negative_zero = nn.Parameter(torch.full((3,), -0.0))
    return module


def gradients(module: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    drawn = {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in module.named_parameters()
    }
    drawn["negative_zero"] = torch.full((3,), -0.0)
    # A matrix product leaves it so: the transpose of a contiguous tensor.
    drawn["linear.weight"] = drawn["linear.weight"].t().contiguous().t()
    return drawn


def torch_groups(module: nn.Module, decay: float, no_decay: set[str]) -> list[dict]:
    """Two parameter groups for torch: with decay, and without."""
    named = dict(module.named_parameters())
    plain = {name for name, parameter in named.items() if parameter.ndim < 2} | no_decay
    return [
        {
            "params": [parameter for name, parameter in named.items() if name not in plain],
            "weight_decay": decay,
        },
        {"params": [parameter for name, parameter in named.items() if name in plain], "weight_decay": 0.0},
    ]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (
            OptimizerConfig(lr=3e-2, weight_decay=0.1, no_decay=("block.embedding.*",), warmup_steps=5),
            lambda groups, lr: torch.optim.AdamW(
                groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False
            ),
        ),
        (
            OptimizerConfig(
                name="sgd", lr=3e-2, weight_decay=0.1, no_decay=("block.embedding.*",), warmup_steps=5
            ),
            lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False, fused=False),
        ),
        (
            OptimizerConfig(name="sgd", lr=3e-2, weight_decay=0.0, momentum=0.0),
            lambda groups, lr: torch.optim.SGD(groups, lr=lr, foreach=False, fused=False),
        ),
        (
            OptimizerConfig(name="sgd", lr=3e-2, dampening=0.3, no_decay=NO_DECAY),
            lambda groups, lr: torch.optim.SGD(
                groups, lr=lr, momentum=0.9, dampening=0.3, foreach=False, fused=False
            ),
        ),
        (
            OptimizerConfig(name="sgd", lr=3e-2, nesterov=True, no_decay=NO_DECAY),
            lambda groups, lr: torch.optim.SGD(
                groups, lr=lr, momentum=0.9, nesterov=True, foreach=False, fused=False
            ),
        ),
        (
            OptimizerConfig(amsgrad=True, no_decay=NO_DECAY),
            lambda groups, lr: torch.optim.AdamW(
                groups, lr=lr, betas=(0.9, 0.95), amsgrad=True, foreach=False, fused=False
            ),
        ),
        (
            OptimizerConfig(name="adam", amsgrad=True, no_decay=NO_DECAY),
            lambda groups, lr: torch.optim.Adam(
                groups, lr=lr, betas=(0.9, 0.95), amsgrad=True, foreach=False, fused=False
            ),
        ),
        *(
            (
                OptimizerConfig(name=name, no_decay=NO_DECAY),
                lambda groups, lr, rule=rule: rule(groups, lr=lr, betas=(0.9, 0.95), foreach=False),
            )
            for name, rule in _RULES.items()
        ),
        (
            OptimizerConfig(name="rmsprop", momentum=0.0, no_decay=NO_DECAY),
            lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, foreach=False),
        ),
        (
            OptimizerConfig(name="rmsprop", smoothing=0.9, no_decay=NO_DECAY),
            lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, alpha=0.9, momentum=0.9, foreach=False),
        ),
        (
            OptimizerConfig(name="adagrad", eps=1e-10, no_decay=NO_DECAY),
            lambda groups, lr: torch.optim.Adagrad(groups, lr=lr, foreach=False, fused=False),
        ),
        (
            OptimizerConfig(name="adadelta", smoothing=0.9, eps=1e-6, no_decay=NO_DECAY),
            lambda groups, lr: torch.optim.Adadelta(groups, lr=lr, foreach=False),
        ),
    ],
    ids=lambda given: given.name if isinstance(given, OptimizerConfig) else "",
)
def test_bitwise_equal_to_torch(config: OptimizerConfig, reference, scale: float) -> None:
    ours, theirs = layer(0), layer(0)
    optimizer = make_optimizer(config, STEPS)
    state = LayerState.of(0, "block", ours, optimizer)
    torch_optimizer = reference(torch_groups(theirs, config.weight_decay, {"embedding.weight"}), config.lr)
    parameters = dict(theirs.named_parameters())
    for step in range(STEPS):
        drawn = gradients(ours, step)
        for name, gradient in drawn.items():
            parameters[name].grad = gradient * scale
        for group in torch_optimizer.param_groups:
            group["lr"] = optimizer.lr(step)
        torch_optimizer.step()
        optimizer.update_(state, drawn, scale, optimizer.lr(step))
        for name, parameter in ours.named_parameters():
            assert bits(parameter) == bits(parameters[name]), f"{name} after step {step}"
    for name, slots in state.slots.items():
        assert set(slots) == set(optimizer.slot_names())
        for slot, tensor in slots.items():
            assert bits(tensor) == bits(torch_optimizer.state[parameters[name]][slot])
    assert set(state.updates.values()) == {STEPS}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_left_untouched(name) -> None:
    module = layer(1)
    optimizer = make_optimizer(OptimizerConfig(name=name), STEPS)
    state = LayerState.of(0, "block", module, optimizer)
    drawn = gradients(module, 0)
    before = {name: bits(gradient) for name, gradient in drawn.items()}
    optimizer.update_(state, drawn, 0.5, optimizer.lr(0))
    assert {name: bits(gradient) for name, gradient in drawn.items()} == before


@pytest.mark.parametrize("name", NAMES)
def test_an_absent_gradient_is_no_update_at_all(name) -> None:
    """TimelyFreeze eq. 18: weight, optimizer state and step count of a frozen parameter don't change."""
    frozen, never = layer(2), layer(2)
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.5), STEPS)
    state = LayerState.of(0, "block", frozen, optimizer)
    for step in range(6):
        drawn = gradients(frozen, step)
        if step in (2, 3):
            del drawn["linear.weight"]
            before = {key: bits(tensor) for key, tensor in state.slots["linear.weight"].items()}
            weight = bits(state.weights["linear.weight"])
        optimizer.update_(state, drawn, 1.0, optimizer.lr(step))
        if step in (2, 3):
            assert bits(state.weights["linear.weight"]) == weight
            assert {key: bits(tensor) for key, tensor in state.slots["linear.weight"].items()} == before
    assert state.updates["linear.weight"] == 4
    assert state.updates["linear.bias"] == 6

    # The others are not affected: they have the same bits as with no parameter frozen.
    other = LayerState.of(0, "block", never, optimizer)
    for step in range(6):
        optimizer.update_(other, gradients(never, step), 1.0, optimizer.lr(step))
    for key in state.weights:
        assert (bits(state.weights[key]) == bits(other.weights[key])) == (key != "linear.weight")


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_layout_of_the_gradient(name) -> None:
    torch.manual_seed(3)
    gradient = torch.randn(31, 33)
    results = []
    for drawn in (gradient, gradient.t().contiguous().t(), torch.cat([gradient, gradient])[31:]):
        module = nn.Linear(33, 31, bias=False)
        nn.init.constant_(module.weight, 0.123)
        optimizer = make_optimizer(OptimizerConfig(name=name), STEPS)
        state = LayerState.of(0, "block", module, optimizer)
        for step in range(3):
            optimizer.update_(state, {"weight": drawn}, 0.7, optimizer.lr(step))
        results.append(bits(module.weight))
    assert results[0] == results[1] == results[2]


def test_learning_rate_warms_up_and_ends_at_its_least() -> None:
    optimizer = make_optimizer(OptimizerConfig(lr=0.5, min_lr_fraction=0.2, warmup_steps=4), 15)
    assert [optimizer.lr(step) for step in range(5)] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert optimizer.lr(9) == pytest.approx(0.3, rel=1e-12)  # half-way down
    assert optimizer.lr(14) == pytest.approx(0.1, rel=1e-12)
    assert optimizer.lr(15) == optimizer.lr(14)
    falling = [optimizer.lr(step) for step in range(4, 15)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    ("steps", "warmup", "step", "expected"), [(1, 0, 0, 1.0), (5, 4, 4, 1.0), (3, 10, 2, 0.3), (0, 0, 0, 1.0)]
)
def test_learning_rate_of_jobs_too_short_for_a_cosine(steps, warmup, step, expected) -> None:
    optimizer = make_optimizer(OptimizerConfig(lr=1.0, warmup_steps=warmup), steps)
    assert optimizer.lr(step) == expected


def test_a_fraction_of_one_is_a_constant_rate() -> None:
    optimizer = make_optimizer(OptimizerConfig(lr=0.3, min_lr_fraction=1.0), 7)
    assert {optimizer.lr(step) for step in range(7)} == {0.3}


def test_decay_is_for_matrices_that_no_pattern_takes_out() -> None:
    optimizer = make_optimizer(OptimizerConfig(no_decay=("embed*.weight", "*.scale")), 1)
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert optimizer.weight_decay("block0", "linear.weight", matrix) == 0.1
    assert optimizer.weight_decay("block0", "linear.bias", vector) == 0
    assert optimizer.weight_decay("embedding", "weight", matrix) == 0
    assert optimizer.weight_decay("block0", "attention.scale", matrix) == 0
    assert optimizer.weight_decay("block0", "attention.Scale", matrix) == 0.1


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_never_shows_in_the_update(name: Any) -> None:
    """Two layers updated together or apart give the same bits: no operation sees more than one parameter."""
    config = OptimizerConfig(name=name)
    optimizer = make_optimizer(config, STEPS)
    whole, parts = layer(5), layer(5)
    state = LayerState.of(0, "block", whole, optimizer)
    piecewise = LayerState.of(0, "block", parts, optimizer)
    for step in range(3):
        drawn = gradients(whole, step)
        optimizer.update_(state, drawn, 0.9, optimizer.lr(step))
        for name, gradient in reversed(drawn.items()):
            optimizer.update_(piecewise, {name: gradient}, 0.9, optimizer.lr(step))
    assert {name: bits(t) for name, t in state.weights.items()} == {
        name: bits(t) for name, t in piecewise.weights.items()
    }


def test_groups_have_rates_and_decay_of_their_own() -> None:
    """As torch's groups have, and layers near the input a lower rate where that is asked for."""
    config = OptimizerConfig(
        name="sgd",
        lr=0.1,
        momentum=0.0,
        schedule="constant",
        weight_decay=0.5,
        layer_decay=0.5,
        groups=(
            ParameterGroup(match=("*.bias", "block.gain"), lr_factor=0.25, weight_decay=0.125),
            ParameterGroup(match=("block.*",), lr_factor=2.0),
        ),
    )
    module = layer(7)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer = make_optimizer(config, STEPS, layers=3)
    state = LayerState.of(1, "block", module, optimizer)
    drawn = gradients(module, 0)
    optimizer.update_(state, drawn, 1.0, optimizer.lr(0))
    for name, parameter in module.named_parameters():
        own = name.endswith("bias") or name == "gain"
        decay = 0.125 if own else 0.5 if parameter.ndim > 1 else 0.0
        rate = 0.1 * 0.5 * (0.25 if own else 2.0)
        expected = before[name] - rate * (drawn[name] + decay * before[name])
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)


def test_tied_parameters_have_one_rate() -> None:
    tie = (ParameterRef("embed", "weight"), ParameterRef("head", "weight"))
    apart = OptimizerConfig(groups=(ParameterGroup(match=("embed.*",)),))
    with pytest.raises(JobError, match=r"embed.weight, head.weight, which are tied, in different groups"):
        make_optimizer(apart, 1).check_ties([tie])
    make_optimizer(OptimizerConfig(groups=(ParameterGroup(match=("*.weight",)),)), 1).check_ties([tie])
    with pytest.raises(JobError, match=r"layer_decay = 0.9 gives layers rates of their own"):
        make_optimizer(OptimizerConfig(layer_decay=0.9), 1).check_ties([tie])
    make_optimizer(OptimizerConfig(layer_decay=0.9), 1).check_ties([])
