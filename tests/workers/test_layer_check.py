"""The comparison of a layer with plain autograd: what it leaves behind, and which layers it takes for one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from odd_models import (
    GradientPenalty,
    HandsToItsBackwardPass,
    Odd,
    ReentrantCheckpoint,
    UsedDirectlyToo,
    WeightHook,
)
from odd_states import HoldsThreads
from small_models import WIDTH, Normalized, Residual
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workers.layer_check.check import LayerCheck
from workers.layer_check.kinds import kind_of
from workers.layers.absent import absent_like, is_absent
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.trained_loss import loss_beside, with_loss
from workers.profiling.counted_memory import LiveStorages
from workers.protocol.errors import JobError
from workers.state.hidden import hidden_values

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
    LayerCheck(print, "float32").compare(checked, inputs(), 4, 0)
    assert checked.compared is not None
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
        LayerCheck(print, "float32").compare(layer, given, 4, 0)
        assert live.live_bytes <= before + sum(
            p.nbytes for p in layer.module.parameters()
        )  # scratch of products


def test_layers_of_one_kind_are_compared_once() -> None:
    check, told = LayerCheck(print, "float32"), list[str]()
    check.tell = told.append
    layers = [layer_of(GradientPenalty, index) for index in range(1, 4)]
    for layer in layers:
        check.compare(layer, inputs(), 4, 0)
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


def test_outputs_are_handed_on_before_layers_are_compared_and_training_repeats_them() -> None:
    """Normalized draws and has buffers; its second layer is of the first one's kind, and so not compared itself."""
    check, layers, keys = LayerCheck(print, "float32"), [layer_of(Normalized, i) for i in (1, 2)], (4, 5)
    handed_on: list[Tensor] = []

    def hand_on(tensors: tuple[Tensor, ...]) -> None:
        assert check.names == [], "a layer was compared before the next rank could go on"
        handed_on.extend(tensors)

    assert check.compare_ahead(layers, inputs(), keys, 0, hand_on)
    assert check.names == ["l1", "l2"]
    assert len(check._kinds) == 1
    assert not check.falls_due(layers, 7)
    assert check.falls_due(layers, 8)
    tensors: tuple[Tensor, ...] = inputs()
    for layer, key in zip(layers, keys, strict=True):
        tensors, _ = layer.forward(tensors, key, keep=True)
    (early,), (output,) = handed_on, tensors
    assert early.equal(output)
    assert early.requires_grad
    assert output.requires_grad


def test_tensors_without_values_are_neither_compared_nor_handed_on() -> None:
    check, layer = LayerCheck(print, "float32"), layer_of(Normalized)
    (given,) = inputs()
    assert not check.compare_ahead([layer], (given.to("meta"),), (4,), 0, lambda tensors: pytest.fail("on"))
    assert layer.compared is None


def test_a_layer_is_as_it_was_if_the_next_rank_is_gone() -> None:
    check, layer = LayerCheck(print, "float32"), layer_of(Normalized)
    before = {name: value.clone() for name, value in layer.module.state_dict().items()}

    def hand_on(tensors: tuple[Tensor, ...]) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        check.compare_ahead([layer], inputs(), (4,), 0, hand_on)
    assert layer.compared is None
    assert all(value.equal(before[name]) for name, value in layer.module.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.module.parameters())


def test_an_output_that_shares_memory_with_one_that_carries_a_gradient_is_not_handed_on() -> None:
    """The next passes may show that it carries one: only then is the format of messages known."""

    class AndItsValues(Odd):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.detach()

    check, layer = LayerCheck(print, "float32"), layer_of(AndItsValues)
    assert not check.compare_ahead([layer], inputs(), (4,), 0, lambda tensors: pytest.fail("handed on"))
    assert layer.detached
    assert check.names == ["l1"]
    again = layer_of(AndItsValues, 2)
    assert not check.compare_ahead([again], inputs(), (5,), 0, lambda tensors: pytest.fail("handed on"))
    assert again.detached == layer.detached
    assert len(check._kinds) == 1


def test_a_layer_whose_images_lie_otherwise_in_some_passes_is_refused() -> None:
    """The next layer's kernels, and with them its bits, would depend on which pass was its first on a rank."""

    class Skips(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x[0, 0, 0, 0] > 0 else x.to(memory_format=torch.channels_last)

    layer = layer_of(Skips)
    image = torch.ones(2, 3, 4, 5)
    layer.forward((image,), 1, keep=True)
    with pytest.raises(JobError, match=r"channels lie last in memory in some passes only.*y.contiguous\(\)"):
        layer.forward((-image,), 2, keep=True)


def test_what_tells_two_layers_apart_makes_two_kinds() -> None:
    def scaled(factor: float) -> nn.Module:
        module = Odd()
        module.register_forward_hook(lambda module, given, output: output * factor)
        return module

    def with_attribute(value: object) -> nn.Module:
        module = Odd()
        module.option = value  # type: ignore[assignment]
        return module

    def with_buffer(value: Tensor) -> nn.Module:
        module = Odd()
        module.register_buffer("kept", value)
        return module

    def with_norm(mean: float) -> nn.Module:
        module = Odd()
        module.norm = nn.BatchNorm1d(4)
        module.norm.running_mean.fill_(mean)  # type: ignore[union-attr]
        return module

    def by_function(function: object) -> nn.Module:
        return with_attribute(function)

    def calling(name: str) -> nn.Module:
        module = Odd()
        module.one, module.two = nn.Linear(2, 2), nn.Linear(2, 2)
        module.call = lambda x: getattr(module, name)(x)  # type: ignore[assignment]
        return module

    def shares(shared: bool) -> nn.Module:
        module = Odd()
        module.again = nn.Linear(WIDTH, WIDTH)
        if shared:
            module.again.weight = module.linear.weight
        return module

    alike = [
        (Odd, Odd),
        (lambda: scaled(2.0), lambda: scaled(2.0)),
        (lambda: with_attribute([1, {"a": 2}]),) * 2,
        (lambda: with_buffer(torch.tensor(1)),) * 2,
        # Many numbers, and statistics, tell no branch.
        (lambda: with_buffer(torch.zeros(99)), lambda: with_buffer(torch.ones(99))),
        (lambda: with_norm(0.0), lambda: with_norm(1.0)),
    ]
    apart = [
        (lambda: by_function(partial(torch.mul, other=2)), lambda: by_function(partial(torch.mul, other=3))),
        (lambda: by_function(itemgetter(1)), lambda: by_function(itemgetter(2))),
        (lambda: calling("one"), lambda: calling("two")),
        (lambda: shares(True), lambda: shares(False)),
        (Odd, WeightHook),
        (lambda: scaled(2.0), lambda: scaled(3.0)),
        (lambda: with_attribute(1), lambda: with_attribute(2)),
        (lambda: with_buffer(torch.tensor(1)), lambda: with_buffer(torch.tensor(2))),
        (lambda: with_buffer(torch.zeros(3)), lambda: with_buffer(torch.ones(3))),
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
    LayerCheck(print, "float32").compare(layer, inputs(), 4, 0)
    assert layer.whole
    for frozen in ("linear.weight", "linear.bias"):
        outputs, done = layer.forward(inputs(), 5, keep=True, frozen=frozenset({frozen}))
        layer.backward(done, (torch.ones_like(outputs[0]),), weights=True)
        assert {name for name, p in layer.trained.items() if p.grad is None} == {frozen}
        layer.summed.drop()


def test_a_frozen_matrix_in_a_reentrant_checkpoint_gets_no_gradient() -> None:
    class Inside(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(lambda z: torch.tanh(self.linear(z)), x, use_reentrant=True)

    for kind in (Inside, ReentrantCheckpoint):
        layer = layer_of(kind)
        LayerCheck(print, "float32").compare(layer, inputs(), 4, 0)
        assert layer.whole
        outputs, done = layer.forward(inputs(), 5, keep=True, frozen=frozenset({"linear.weight"}))
        layer.backward(done, (torch.ones_like(outputs[0]),), weights=False)
        layer.weight_grad(done)
        assert {name for name, p in layer.trained.items() if p.grad is None} == {"linear.weight"}


def test_a_microbatch_of_one_sample_shows_what_is_kept_between_passes() -> None:
    one = (inputs()[0][:1].detach().requires_grad_(),)
    with pytest.raises(JobError, match="layer l1 does not train as in a plain loop"):
        LayerCheck(print, "float32").compare(layer_of(HandsToItsBackwardPass), one, 4, 0)


class TransposedBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.randn(WIDTH, 2).t())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.turned.sum()


class ForwardsOfItsFirstPass(Odd):
    """Patches the forward of its module as it is first called."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "stock"):
            self.stock = self.linear.forward
            self.linear.forward = lambda z: 0.5 * self.stock(z)  # type: ignore[method-assign]
        return super().forward(x)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


class GivesNone(Odd):
    """Its matrix gets no gradient, by a function that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) + _NoGradient.apply(self.linear(torch.tanh(x)))


@pytest.mark.parametrize("kind", [TransposedBuffer, ForwardsOfItsFirstPass, GivesNone])
def test_a_layer_that_is_right_passes(kind: type[nn.Module]) -> None:
    LayerCheck(print, "float32").compare(layer_of(kind), inputs(), 4, 0)


def test_what_a_layer_and_the_loss_share_stays_one() -> None:
    weight = nn.Parameter(torch.ones(2))

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

    definition = with_loss(ModelDefinition((LayerBuilder("head", Holds),), Holds()))
    module = definition.layers[0].build()
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert loss_beside(module).weight is module.weight  # type: ignore[union-attr]


def test_a_layer_that_no_gradient_reaches_is_told_of() -> None:
    class Cut(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    told: list[str] = []
    LayerCheck(told.append, "float32").compare(layer_of(Cut), inputs(), 4, 0)
    assert told == [
        "no gradient reaches layer l1, though it has 2 parameters to train: they stay as they are",
    ]


def test_a_layer_whose_output_is_laid_out_otherwise_for_the_next_is_told_of() -> None:
    class Turned(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(len(x), 4, -1).transpose(1, 2)

    told: list[str] = []
    LayerCheck(told.append, "float32").compare(layer_of(Turned), inputs(), 4, 0)
    (text,) = told
    assert text.startswith("layer l1 returns a tensor that is not contiguous")
    told.clear()
    LayerCheck(told.append, "float32").compare(layer_of(Odd), inputs(), 4, 0)
    assert told == []


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


def test_what_changes_by_itself_is_not_looked_into() -> None:
    """The threads of a pool, and its queue, stand elsewhere each time."""
    assert not [name for name in hidden_values(HoldsThreads()) if "pool" in name]
