"""With deferred gradients `nn.MultiheadAttention` has the stock bits, in one backward or in two parts."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.layers.absent import is_absent
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.protocol.errors import JobError
from workers.reproducibility import rng
from workers.reproducibility.canonical import canonical
from workers.state.precision import autocast

CPU = torch.device("cpu")
HEADS, ROWS, LENGTH, SOURCES = 2, 3, 7, 5


class Attends(nn.Module):
    """A layer around one attention. `use` combines its two inputs, [N, L, E] and [N, S, E]."""

    def __init__(self, use: Callable[..., tuple[Tensor, Tensor | None]], width: int, **fields: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, HEADS, **fields)
        self.use = use

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        if not self.attention.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        output, weights = self.use(self.attention, x, memory)
        output = x + output
        return (output,) if weights is None else (output, weights)


def to_itself(attention: nn.Module, x: Tensor, memory: Tensor, **call: Any) -> Any:
    return attention(x, x, x, **call)


def to_memory(attention: nn.Module, x: Tensor, memory: Tensor, **call: Any) -> Any:
    return attention(x, memory, memory, **call)


def to_marked_places(attention: nn.Module, x: Tensor, memory: Tensor, **call: Any) -> Any:
    """Attention with keys that differ from the values, although all come from the same tensors."""
    mean = memory.mean(dim=-1, keepdim=True)
    return attention(x + x.sin(), memory + mean, memory, **call)


USES = {"itself": to_itself, "memory": to_memory, "marked places": to_marked_places}


def bits(
    layer: Layer, inputs: tuple[Tensor, ...], key: int, *, order: str, keep: bool = True
) -> list[Tensor]:
    """Outputs, input gradients and weight gradients of two microbatches that pass through the layer."""
    found = []
    passes = []
    for number in range(2):
        outputs, done = layer.forward(inputs, key + number, keep=keep)
        passes.append(done)
        found += [o.detach() for o in outputs]
    for done in passes:
        if not keep:
            layer.recompute(done)
    for outputs, done in zip((found[: len(found) // 2], found[len(found) // 2 :]), passes, strict=True):
        grads = layer.backward(done, tuple(torch.cos(o) for o in outputs), weights=order == "B")
        found += [torch.zeros_like(grad) if is_absent(grad) else grad for grad in grads]
    if order == "IW":
        for done in passes:
            layer.weight_grad(done)
    return found + [p.grad for p in layer.module.parameters() if p.grad is not None]


def stock_bits(module: nn.Module, inputs: tuple[Tensor, ...], key: int, precision: str) -> list[Tensor]:
    found, graphs = [], []
    for number in range(2):
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with rng.keyed(key + number), autocast(precision, CPU):
            outputs = module(*leaves)
        graphs.append((leaves, outputs))
        found += [canonical(o.detach()) for o in outputs]
    for leaves, outputs in graphs:
        torch.autograd.backward(outputs, [canonical(torch.cos(canonical(o.detach()))) for o in outputs])
        found += [
            torch.zeros_like(t) if t.grad is None else canonical(t.grad) for t in leaves if t.requires_grad
        ]
    return found + [p.grad for p in module.parameters() if p.grad is not None]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the last bit, the sign of a zero included."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return ours.contiguous().view(torch.uint8).equal(theirs.contiguous().view(torch.uint8))


def assert_stock(
    use: Callable[..., Any],
    *,
    width: int = 24,
    precision: str = "float32",
    memory_grad: bool = True,
    **fields: Any,
) -> None:
    torch.manual_seed(5)
    module = Attends(use, width, **fields).train()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    stock = copy.deepcopy(module.to(dtype))
    x = torch.randn(ROWS, LENGTH, width).to(dtype).requires_grad_()
    memory = torch.randn(ROWS, SOURCES, width).to(dtype).requires_grad_(memory_grad)
    expected = stock_bits(stock, (x, memory), 11, precision)
    for order, keep in (("B", True), ("IW", True), ("IW", False)):
        workspace = Workspace()
        layer = Layer(0, "l", copy.deepcopy(module), precision=precision, device=CPU, workspace=workspace)
        assert layer.uncovered == ()
        got = bits(layer, (x, memory), 11, order=order, keep=keep)
        assert len(got) == len(expected)
        for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert same(ours, theirs), (order, keep, number)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", USES)
def test_bits_of_stock(name: str, batch_first: bool, precision: str) -> None:
    for need_weights, dropout, bias, width in product((False, True), (0.0, 0.3), (True, False), (24, 6)):
        assert_stock(
            lambda a, x, m, n=need_weights: USES[name](a, x, m, need_weights=n),
            width=width,
            precision=precision,
            batch_first=batch_first,
            dropout=dropout,
            bias=bias,
        )


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.zeros(ROWS, LENGTH, dtype=torch.bool).index_fill(1, torch.tensor([LENGTH - 1]), True)
MASKS = {
    "causal": {"attn_mask": CAUSAL},
    "causal hint": {"attn_mask": CAUSAL, "is_causal": True},
    "added": {"attn_mask": torch.linspace(-2, 1, LENGTH**2).view(LENGTH, LENGTH)},
    "per head": {"attn_mask": torch.linspace(-1, 1, 6 * LENGTH**2).view(6, LENGTH, LENGTH)},
    "padding": {"key_padding_mask": PADDING},
    "padding and causal hint": {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "is_causal": True},
    "weights per head": {"average_attn_weights": False},
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16-autocast"])
@pytest.mark.parametrize("name", MASKS)
def test_bits_of_stock_with_masks(name: str, precision: str) -> None:
    for need_weights, dropout in product((False, True), (0.0, 0.3)):
        assert_stock(
            lambda a, x, m, n=need_weights: a(x, x, x, need_weights=n, **MASKS[name]),
            precision=precision,
            batch_first=True,
            dropout=dropout,
        )


def test_bits_of_stock_without_a_batch() -> None:
    def only_the_first(attention: nn.Module, x: Tensor, memory: Tensor) -> tuple[Tensor, None]:
        padding = torch.tensor([False, False, False, True, False])
        row = attention(x[0], memory[0], memory[0], need_weights=False, key_padding_mask=padding)[0]
        return row.expand_as(x), None

    assert_stock(only_the_first, batch_first=True)


def test_bits_of_stock_where_only_the_weights_are_used() -> None:
    def weights_only(attention: nn.Module, x: Tensor, memory: Tensor) -> tuple[Tensor, None]:
        weights = attention(x, memory, memory)[1]
        return x * weights.sum(dim=-1, keepdim=True) * weights.square().mean(), None

    assert_stock(weights_only, batch_first=True)


@pytest.mark.parametrize("bias", [True, False])
def test_bits_of_stock_where_no_input_asks_for_a_gradient(bias: bool) -> None:
    def of_memory(attention: nn.Module, x: Tensor, memory: Tensor) -> tuple[Tensor, None]:
        keys = memory.detach()
        return attention(x.detach(), keys, keys, need_weights=False)[0], None

    assert_stock(of_memory, batch_first=True, bias=bias, memory_grad=False)


@pytest.mark.parametrize("sizes", [(64, 33, 2), (48, 1, 1), (10, 16, 5)])
def test_bits_of_stock_at_other_sizes(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    width, length, rows = sizes
    monkeypatch.setattr(f"{__name__}.LENGTH", length)
    monkeypatch.setattr(f"{__name__}.ROWS", rows)
    for use, precision in product(USES.values(), ("float32", "bfloat16-autocast")):
        assert_stock(
            lambda a, x, m, u=use: u(a, x, m, need_weights=False),
            width=width,
            batch_first=True,
            precision=precision,
        )


def test_a_frozen_matrix_gets_no_gradient() -> None:
    module = Attends(to_memory, 24, batch_first=True).train()
    module.attention.in_proj_weight.requires_grad_(False)
    layer = Layer(0, "l", module, precision="float32", device=CPU, workspace=Workspace())
    x, memory = torch.randn(3, 7, 24, requires_grad=True), torch.randn(3, 5, 24)
    outputs, done = layer.forward((x, memory), 1, keep=True)
    (grad,) = layer.backward(done, outputs, weights=False)
    assert grad.shape == x.shape
    layer.weight_grad(done)
    assert module.attention.in_proj_weight.grad is None
    assert module.attention.out_proj.weight.grad is not None


def test_two_uses_are_summed_alike_in_one_backward_and_in_two_parts() -> None:
    def twice(attention: nn.Module, x: Tensor, memory: Tensor) -> tuple[Tensor, None]:
        first = attention(x, x, x, need_weights=False)[0]
        return attention(first, memory, memory, need_weights=False)[0], None

    module = Attends(twice, 24, batch_first=True).train()
    inputs = torch.randn(3, 7, 24, requires_grad=True), torch.randn(3, 5, 24, requires_grad=True)
    whole, split = (
        bits(
            Layer(0, "l", copy.deepcopy(module), precision="float32", device=CPU, workspace=Workspace()),
            inputs,
            3,
            order=order,
        )
        for order in ("B", "IW")
    )
    assert all(same(a, b) for a, b in zip(whole, split, strict=True))


OTHERS = {
    "other widths": ({"kdim": 6, "vdim": 6}, 3),
    "extra keys": ({"add_bias_kv": True}, 1),
    "a key of zeros": ({"add_zero_attn": True}, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_configurations_take_the_second_walk_with_the_same_bits(name: str) -> None:
    fields, hidden = OTHERS[name]

    def narrow(attention: nn.MultiheadAttention, x: Tensor, memory: Tensor) -> tuple[Tensor, None]:
        memory = memory[..., : attention.kdim]
        return attention(x, memory, memory, need_weights=False)[0], None

    module = Attends(narrow, 24, batch_first=True, **fields).train()
    inputs = torch.randn(3, 7, 24, requires_grad=True), torch.randn(3, 5, 24, requires_grad=True)
    expected = stock_bits(copy.deepcopy(module), inputs, 3, "float32")
    layer = Layer(0, "l", module, precision="float32", device=CPU, workspace=Workspace())
    assert "attention.out_proj.weight" in layer.uncovered
    assert len([n for n in layer.uncovered if "proj" in n]) == hidden + 1
    got = bits(layer, inputs, 3, order="IW")
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


def test_evaluation_is_stock() -> None:
    module = Attends(to_itself, 24, batch_first=True, dropout=0.5).train()
    x, memory = torch.randn(3, 7, 24), torch.randn(3, 5, 24)
    with torch.no_grad():
        expected = copy.deepcopy(module).eval()(x, memory)
    layer = Layer(0, "l", module, precision="float32", device=CPU, workspace=Workspace())
    assert all(same(a, b) for a, b in zip(layer.evaluate((x, memory)), expected, strict=True))


WRONG = {
    "attn_mask is (7, 5), must be (7, 7) or (6, 7, 7)": {"attn_mask": torch.zeros(7, 5)},
    "key_padding_mask is (7,), must be (3, 7)": {"key_padding_mask": torch.zeros(7)},
    "a mask of torch.int64: must be boolean": {"attn_mask": torch.zeros(7, 7, dtype=torch.int64)},
    "give the mask too": {"is_causal": True},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_mask_is_refused(message: str) -> None:
    def wrong(attention: nn.Module, x: Tensor, memory: Tensor) -> Any:
        return attention(x, x, x, **WRONG[message])

    module = Attends(wrong, 24, batch_first=True).train()
    layer = Layer(0, "l", module, precision="float32", device=CPU, workspace=Workspace())
    with pytest.raises(JobError, match=r"^the forward pass of layer l raised ValueError: ") as caught:
        layer.forward((torch.randn(3, 7, 24), torch.randn(3, 5, 24)), 1, keep=True)
    assert message in str(caught.value)
