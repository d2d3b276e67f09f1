"""Modules with deferred gradients have the bits of stock autograd, a Linear for every memory layout of its input."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from workers.layer_check.check import LayerCheck
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.state.precision import autocast

CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "in one piece": ((4, 9, 16), lambda x: x),
    "transposed": ((4, 9, 16), lambda x: x.transpose(0, 1)),
    "one sequence, transposed": ((1, 9, 16), lambda x: x.transpose(0, 1)),
    "every other": ((8, 9, 16), lambda x: x[::2]),
    "a window": ((4, 9, 16), lambda x: x[:, :5]),
    "parts of rows": ((4, 9, 32), lambda x: x[..., :16]),
    "four dimensions": ((2, 4, 9, 16), lambda x: x.transpose(1, 2)),
    "a matrix, transposed": ((16, 9), lambda x: x.t()),
    "a vector": ((16,), lambda x: x),
}


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Conv1d(4, 4, 1),
        lambda: Conv1D(4, 4),
        lambda: nn.Embedding(4, 4),
        lambda: nn.MultiheadAttention(4, 1),
        lambda: nn.TransformerEncoderLayer(4, 1, 8),
    ],
)
def test_a_layer_that_is_given_away_is_freed_at_once(make: Callable[[], nn.Module]) -> None:
    """The garbage collector skips what a rank is built of, so a layer in a reference cycle would stay."""
    gc.disable()
    try:
        layer = Layer(0, "l", make(), precision="float32", device=CPU, workspace=Workspace())
        parameters = [weakref.ref(parameter) for parameter in layer.module.parameters()]
        del layer
        assert [parameter() for parameter in parameters] == [None] * len(parameters)
    finally:
        gc.enable()


def assert_equal_gradients(module: nn.Module, stock: nn.Module) -> None:
    for ours, theirs in zip(module.parameters(), stock.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.equal(theirs.grad)


class Viewed(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24, bias=bias)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.view(x))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_of_stock(name: str, bias: bool, precision: str) -> None:
    shape, view = LAYOUTS[name]
    torch.manual_seed(3)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    module = Viewed(view, bias).to(dtype)
    stock = copy.deepcopy(module)
    x = torch.randn(shape).to(dtype).requires_grad_()
    layer = Layer(0, "l", module, precision=precision, device=CPU, workspace=Workspace())
    (output,), done = layer.forward((x,), 1, keep=True)
    with autocast(precision, CPU):
        expected = stock(x)
    assert output.equal(expected)
    grad = torch.randn_like(output)
    (input_grad,) = layer.backward(done, (grad,), weights=False)
    layer.weight_grad(done)
    expected.backward(grad)
    assert x.grad is not None
    assert input_grad.equal(x.grad)
    assert_equal_gradients(module, stock)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
@pytest.mark.parametrize("shape", [(4, 9, 16), (2, 3, 4, 16), (5, 16), (16,)], ids=str)
def test_bits_of_stock_where_the_matrix_lies_transposed(shape: tuple[int, ...], precision: str) -> None:
    torch.manual_seed(3)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    module = nn.Sequential(Conv1D(24, 16), nn.GELU(), Conv1D(8, 24)).to(dtype)
    stock = copy.deepcopy(module)
    x = torch.randn(shape).to(dtype).requires_grad_()
    layer = Layer(0, "l", module, precision=precision, device=CPU, workspace=Workspace())
    assert layer.uncovered == ()
    (output,), done = layer.forward((x,), 1, keep=True)
    with autocast(precision, CPU):
        expected = stock(x)
    assert output.equal(expected)
    grad = torch.randn_like(output)
    (input_grad,) = layer.backward(done, (grad,), weights=False)
    assert all(ours.grad is None for ours in module.parameters() if ours.dim() == 2)
    layer.weight_grad(done)
    expected.backward(grad)
    assert x.grad is not None
    assert input_grad.equal(x.grad)
    assert_equal_gradients(module, stock)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("at_once", [True, False])
def test_both_uses_of_a_module_count(at_once: bool) -> None:
    torch.manual_seed(5)
    module = Twice()
    stock = copy.deepcopy(module)
    layer = Layer(0, "l", module, precision="float32", device=CPU, workspace=Workspace())
    for _ in range(2):
        x = torch.randn(4, 16)
        (output,), done = layer.forward((x,), 1, keep=True)
        grad = torch.randn_like(output)
        layer.backward(done, (grad,), weights=at_once)
        if not at_once:
            layer.weight_grad(done)
        stock(x).backward(grad)
    for ours, theirs in zip(module.parameters(), stock.parameters(), strict=True):
        # Only the order of the sums may differ from autograd's.
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


class Backwards(TorchDispatchMode):
    """Counts the kernels that form gradients of convolutions' matrices or biases."""

    def __init__(self) -> None:
        super().__init__()
        self.formed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.formed += any(args[-1][1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("frozen", [(), ("0.weight",), ("0.bias",), ("0.weight", "0.bias")])
def test_a_convolution_forms_the_gradients_of_matrix_and_bias_at_once(
    frozen: tuple[str, ...], split: bool, precision: str
) -> None:
    """A CPU's kernel forms both whichever is asked for, so a second call would take the whole time again."""
    torch.manual_seed(3)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    module = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 2)).to(dtype)
    stock = copy.deepcopy(module)
    x = torch.randn(2, 8, 9, 9).to(dtype, memory_format=torch.channels_last).requires_grad_()
    layer = Layer(0, "l", module, precision=precision, device=CPU, workspace=Workspace())
    (output,), done = layer.forward((x,), 1, keep=True, frozen=frozenset(frozen))
    with autocast(precision, CPU):
        expected = stock(x)
    assert output.equal(expected)
    assert output.stride() == expected.stride()
    grad = torch.randn_like(output)
    for name in frozen:
        stock.get_parameter(name).requires_grad_(False)
    (theirs,) = torch.autograd.grad(expected, x, grad, retain_graph=True)
    expected.backward(grad)
    with Backwards() as kernels:
        (ours,) = layer.backward(done, (grad,), weights=not split)
        if split:
            layer.weight_grad(done)
    assert kernels.formed == (1 if len(frozen) == 2 else 2)
    assert ours.equal(theirs)
    for name, parameter in module.named_parameters():
        other = stock.get_parameter(name).grad
        if name in frozen:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert other is not None
            assert parameter.grad.to(other.dtype).equal(other), name


class BehindAMatrix(nn.Module):
    """A convolution of what depends on a matrix that nothing defers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(9, 9))
        self.convolution = nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x @ self.matrix)


@pytest.mark.parametrize("split", [False, True])
def test_a_further_walk_for_other_matrices_leaves_a_bias_alone(split: bool) -> None:
    torch.manual_seed(3)
    module = BehindAMatrix()
    stock = copy.deepcopy(module)
    x = torch.randn(2, 2, 9, 9).requires_grad_()
    layer = Layer(1, "l", module, precision="float32", device=CPU, workspace=Workspace())
    LayerCheck(pytest.fail, "float32").compare(layer, (x,), 4, 0)
    assert not layer.whole
    (output,), done = layer.forward((x,), 1, keep=True)
    grad = torch.randn_like(output)
    (ours,) = layer.backward(done, (grad,), weights=not split)
    if split:
        layer.weight_grad(done)
    stock(x).backward(grad)
    assert x.grad is not None
    assert ours.equal(x.grad)
    assert_equal_gradients(module, stock)


class Gone(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


def test_a_bias_that_no_gradient_reaches_has_none() -> None:
    module = nn.Conv2d(2, 2, 3, padding=1)
    layer = Layer(1, "l", nn.Sequential(module), precision="float32", device=CPU, workspace=Workspace())
    layer.module.register_forward_hook(lambda part, given, output: given[0] + Gone.apply(output))
    (output,), done = layer.forward((torch.randn(1, 2, 4, 4).requires_grad_(),), 1, keep=True)
    layer.backward(done, (torch.ones_like(output),), weights=True)
    assert module.weight.grad is None
    assert module.bias is not None
    assert module.bias.grad is None
