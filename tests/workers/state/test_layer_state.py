"""What a layer's state holds, how it is copied and loaded, and its digest."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from workers.config import OptimizerConfig
from workers.protocol.errors import JobError
from workers.state.layer_state import LayerState, digest, host_copy, load_, state_digest
from workers.state.optim import make_optimizer

ADAMW = make_optimizer(OptimizerConfig(), 10)


class Layer(nn.Module):
    """A layer with parameters, a shared one, a scalar, buffers of two dtypes and a non-persistent buffer."""

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(3, width, dtype=dtype)
        self.again = self.linear
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("cache", torch.ones(9), persistent=False)


def trained(seed: int) -> LayerState:
    """The state of a layer after two updates with random gradients."""
    torch.manual_seed(seed)
    state = LayerState.of(3, "block", Layer(), ADAMW)
    for step in range(2):
        ADAMW.update_(
            state, {name: torch.randn(t.shape) for name, t in state.weights.items()}, 1.0, ADAMW.lr(step)
        )
    state.buffers["norm.running_mean"].normal_()
    state.buffers["norm.num_batches_tracked"].add_(7)
    return state


def test_it_holds_parameters_once_and_persistent_buffers_only() -> None:
    module = Layer()
    state = LayerState.of(3, "block", module, ADAMW)
    assert list(state.weights) == ["gain", "linear.weight", "linear.bias", "norm.weight", "norm.bias"]
    assert list(state.buffers) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert state.slots.keys() == state.weights.keys() == state.updates.keys()
    for name, slots in state.slots.items():
        assert list(slots) == ["exp_avg", "exp_avg_sq"]
        for tensor in slots.values():
            assert tensor.shape == state.weights[name].shape
            assert not tensor.any()
            assert not tensor.requires_grad
    assert set(state.updates.values()) == {0}
    assert state.weights["linear.weight"] is module.linear.weight
    assert state.buffers["norm.running_mean"] is module.norm.running_mean


def test_what_the_model_holds_fixed_has_no_optimizer_state() -> None:
    module = Layer()
    module.linear.requires_grad_(False)
    state = LayerState.of(3, "block", module, ADAMW)
    assert list(state.slots) == list(state.updates) == ["gain", "norm.weight", "norm.bias"]
    assert "linear.weight" in state.weights
    load_(state, host_copy(state))
    with pytest.raises(JobError, match=r"optimizer state exp_avg of linear\.weight"):
        load_(state, trained(0))


def test_host_copy_shares_nothing() -> None:
    state = trained(0)
    copy = host_copy(state)
    before = digest(copy)
    assert before == digest(state)
    assert not any(tensor.requires_grad for tensor in copy.weights.values())
    ADAMW.update_(state, {"gain": torch.tensor(1.0)}, 1.0, ADAMW.lr(2))
    state.buffers["norm.running_var"].zero_()
    assert digest(copy) == before != digest(state)
    assert (state.updates["gain"], copy.updates["gain"]) == (3, 2)
    assert not torch.equal(state.slots["gain"]["exp_avg"], copy.slots["gain"]["exp_avg"])


def test_host_copy_is_contiguous_whatever_the_source() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(5, 3).t())
    state = LayerState.of(0, "transposed", module, ADAMW)
    copy = host_copy(state)
    assert copy.weights["weight"].is_contiguous()
    assert torch.equal(copy.weights["weight"], state.weights["weight"])
    assert digest(copy) == digest(state)


def test_load_writes_into_the_module_in_place() -> None:
    source = trained(1)
    module = Layer()
    state = LayerState.of(3, "block", module, ADAMW)
    addresses = [tensor.data_ptr() for tensor in (*state.weights.values(), *state.buffers.values())]
    load_(state, host_copy(source))
    assert digest(state) == digest(source)
    assert digest(LayerState.of(3, "block", module, ADAMW)) == digest(source)
    assert [t.data_ptr() for t in (*state.weights.values(), *state.buffers.values())] == addresses
    assert state.updates == source.updates
    for name, slots in source.slots.items():
        for slot, tensor in slots.items():
            assert torch.equal(state.slots[name][slot], tensor)
    # Training goes on with the same bits, so the state contains everything that the update needs.
    for each in (state, source):
        ADAMW.update_(each, {name: torch.ones(t.shape) for name, t in each.weights.items()}, 0.5, ADAMW.lr(2))
    assert digest(state) == digest(source)


def test_load_keeps_every_bit_of_odd_values() -> None:
    module = nn.Module()
    pattern = torch.tensor([0x7FC00001, 0x7F800001, -(2**31), 1, 0x7F800000], dtype=torch.int32)
    module.weight = nn.Parameter(pattern.view(torch.float32))
    source = LayerState.of(0, "odd", module, ADAMW)
    other = nn.Module()
    other.weight = nn.Parameter(torch.zeros(5))
    state = LayerState.of(0, "odd", other, ADAMW)
    load_(state, host_copy(source))
    assert torch.equal(other.weight.detach().view(torch.int32), pattern)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Layer(width=5), ["layer 3 (block)", "linear.weight", "float32[4, 3]", "float32[5, 3]"]),
        (
            Layer(dtype=torch.bfloat16),
            ["layer 3 (block)", "linear.weight", "float32[4, 3]", "bfloat16[4, 3]"],
        ),
        (nn.Linear(3, 4), ["layer 3 (block)", "weight gain is missing"]),
    ],
    ids=["shape", "dtype", "names"],
)
def test_load_names_what_does_not_fit_and_changes_nothing(other: nn.Module, words: list[str]) -> None:
    state = trained(2)
    before = digest(state)
    with pytest.raises(JobError) as error:
        load_(state, LayerState.of(3, "block", other, ADAMW))
    for word in words:
        assert word in str(error.value)
    assert digest(state) == before


def test_load_refuses_another_layer_another_optimizer_and_extra_tensors() -> None:
    state = trained(2)
    with pytest.raises(JobError, match=r"layer 3 \(block\) cannot take the state of layer 3 \(head\)"):
        load_(state, LayerState.of(3, "head", Layer(), ADAMW))
    sgd = make_optimizer(OptimizerConfig(name="sgd"), 10)
    with pytest.raises(JobError, match=r"optimizer state exp_avg of gain is missing.*\[optimizer\]"):
        load_(state, LayerState.of(3, "block", Layer(), sgd))
    larger = Layer()
    larger.bonus = nn.Parameter(torch.zeros(1))
    with pytest.raises(JobError, match="the state to load has weight bonus, which the layer has not"):
        load_(state, LayerState.of(3, "block", larger, ADAMW))


def test_digest_is_the_documented_sha256() -> None:
    module = nn.Module()
    module.b = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    module.a = nn.Parameter(torch.tensor(5.0, dtype=torch.bfloat16))
    module.register_buffer("c", torch.tensor([6], dtype=torch.int64))
    expected = hashlib.sha256(
        b'["a", "bfloat16", []]'
        + bytes.fromhex("a040")
        + b'["b", "float32", [2, 2]]'
        + torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes()
        + b'["c", "int64", [1]]'
        + (6).to_bytes(8, "little")
    ).hexdigest()
    state = LayerState.of(0, "layer", module, ADAMW)
    assert digest(state) == expected
    assert state_digest([expected, "00" * 32]) == hashlib.sha256((expected + "00" * 32).encode()).hexdigest()


def test_digest_sees_names_dtypes_shapes_and_every_bit_but_no_optimizer_state() -> None:
    def of(**tensors: torch.Tensor) -> str:
        return digest(LayerState(0, "layer", tensors, {}, {}, {}))

    zeros = torch.zeros(2, 3)
    variants = [
        of(a=zeros),
        of(b=zeros),
        of(a=zeros.reshape(3, 2)),
        of(a=zeros.reshape(6)),
        of(a=zeros.to(torch.int32)),
        of(a=-zeros),
        of(a=torch.zeros(0)),
        of(),
    ]
    assert len(set(variants)) == len(variants)
    assert of(a=zeros, b=zeros + 1) == of(b=zeros + 1, a=zeros)
    state = trained(4)
    before = digest(state)
    state.slots["gain"]["exp_avg"].add_(1)
    state.updates["gain"] += 1
    assert digest(state) == before
    assert state_digest(["a" * 64, "b" * 64]) != state_digest(["b" * 64, "a" * 64])
