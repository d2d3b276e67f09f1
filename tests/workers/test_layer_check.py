"""The comparison of a layer with plain autograd: what it leaves behind, and which layers it takes for one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from odd_models import GradientPenalty, Odd, UsedDirectlyToo, WeightHook
from small_models import WIDTH, Normalized, Residual
from torch import Tensor, nn

from workers.absent import absent_like, is_absent
from workers.deferred.queue import Workspace
from workers.layer import Layer
from workers.layer_check import LayerCheck, kind_of
from workers.profiling.counted_memory import LiveStorages

CPU = torch.device("cpu")


def layer_of(make: Callable[[], nn.Module], index: int = 1) -> Layer:
    torch.manual_seed(index)
    return Layer(index, f"l{index}", make(), precision="float32", device=CPU, workspace=Workspace())


def inputs() -> tuple[Tensor]:
    return (torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_(),)


def test_a_check_leaves_gradients_buffers_and_draws_as_they_were() -> None:
    checked, untouched = layer_of(Normalized), layer_of(Normalized)
    for layer in (checked, untouched):
        outputs, done = layer.forward(inputs(), 3, keep=True)
        layer.backward(done, (torch.ones_like(outputs[0]),), weights=True)
    LayerCheck(print, "float32")(checked, inputs(), 4)
    assert checked.checked
    for layer in (checked, untouched):
        outputs, done = layer.forward(inputs(), 5, keep=True)
        layer.backward(done, (torch.ones_like(outputs[0]),), weights=True)
    for one, other in zip(
        checked.module.state_dict().values(), untouched.module.state_dict().values(), strict=True
    ):
        assert one.equal(other)
    for name, parameter in checked.module.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.equal(untouched.trained[name].grad), name


def test_a_check_keeps_no_memory() -> None:
    layer, given = layer_of(partial(Residual, 0.1)), inputs()
    with LiveStorages() as live:
        live.add(layer.module.parameters())
        before = live.live_bytes
        LayerCheck(print, "float32")(layer, given, 4)
        assert live.live_bytes <= before + sum(
            p.nbytes for p in layer.module.parameters()
        )  # scratch of products


def test_layers_of_one_kind_are_compared_once() -> None:
    check, told = LayerCheck(print, "float32"), list[str]()
    check.tell = told.append
    layers = [layer_of(GradientPenalty, index) for index in range(1, 4)]
    for layer in layers:
        check(layer, inputs(), 4)
    assert len(check._kinds) == 1
    assert {layer.whole for layer in layers} == {"it takes gradients in its forward pass"}
    (text,) = told
    assert text.startswith(
        "layer l1, with those of its kind, trains by plain autograd: it takes gradients in"
    )
    report = check.taken(7)
    assert report is not None
    assert (report.rank, report.layers) == (7, ("l1", "l2", "l3"))
    assert check.taken(7) is None


def test_what_tells_two_layers_apart_makes_two_kinds() -> None:
    def scaled(factor: float) -> nn.Module:
        module = Odd()
        module.register_forward_hook(lambda module, given, output: output * factor)
        return module

    def with_attribute(value: object) -> nn.Module:
        module = Odd()
        module.option = value  # type: ignore[assignment]
        return module

    alike = [
        (Odd, Odd),
        (lambda: scaled(2.0), lambda: scaled(2.0)),
        (lambda: with_attribute([1, {"a": 2}]),) * 2,
    ]
    apart = [
        (Odd, WeightHook),
        (lambda: scaled(2.0), lambda: scaled(3.0)),
        (lambda: with_attribute(1), lambda: with_attribute(2)),
        (lambda: with_attribute(torch.ones(2)), lambda: with_attribute(torch.ones(2))),
        (lambda: with_attribute(torch.Generator()), lambda: with_attribute(torch.Generator())),
        (lambda: with_attribute((nn.Linear(2, 2),)), lambda: with_attribute((nn.Linear(2, 2),))),
    ]
    for same, pairs in ((True, alike), (False, apart)):
        for one, other in pairs:
            assert (kind_of(layer_of(one), inputs()) == kind_of(layer_of(other), inputs())) is same
    layer = layer_of(Odd)
    assert kind_of(layer, inputs()) != kind_of(layer, (inputs()[0].detach(),))


def test_a_frozen_matrix_of_a_layer_left_to_autograd_gets_no_gradient() -> None:
    layer = layer_of(UsedDirectlyToo)
    LayerCheck(print, "float32")(layer, inputs(), 4)
    assert layer.whole
    for frozen in ("linear.weight", "linear.bias"):
        outputs, done = layer.forward(inputs(), 5, keep=True, frozen=frozenset({frozen}))
        layer.backward(done, (torch.ones_like(outputs[0]),), weights=True)
        assert {name for name, p in layer.trained.items() if p.grad is None} == {frozen}
        layer.drop_gradients()


def test_a_layer_that_no_gradient_reaches_is_told_of() -> None:
    class Cut(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    told: list[str] = []
    LayerCheck(told.append, "float32")(layer_of(Cut), inputs(), 4)
    assert told == [
        "no gradient reaches layer l1, though it has 2 parameters to train: they stay as they are",
    ]


def test_an_absent_gradient_is_told_from_all_that_is_computed() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        like = torch.zeros(2, 3, dtype=dtype)
        absent = absent_like(like)
        assert (absent.shape, absent.dtype, absent.is_contiguous()) == (like.shape, dtype, True)
        assert is_absent(absent)
        assert is_absent(absent.clone())
        for computed in (like, -like, like / 0, torch.full_like(like, float("nan"))):
            assert not is_absent(computed)
    assert not is_absent(torch.zeros(0))
