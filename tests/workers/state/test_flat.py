"""A layer's parameters lie side by side, and nothing can tell but an update that takes them together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from workers.config import OptimizerConfig
from workers.protocol.errors import JobError
from workers.state.flat import ALIGNED, FlatGradients, GradientBuffers, Layout, side_by_side
from workers.state.layer_state import LayerState, digest, host_copy
from workers.state.optim import PART, make_optimizer

ADAMW = make_optimizer(OptimizerConfig(weight_decay=0.1), 10)


class Odd(nn.Module):
    """Sizes that leave gaps, a scalar, an empty parameter, one that is laid out transposed, and a second dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gain = nn.Parameter(torch.randn(()))
        self.matrix = nn.Parameter(torch.randn(5, 3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.bias = nn.Parameter(torch.randn(7))
        self.transposed = nn.Parameter(torch.randn(9, 4).t())
        self.wide = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)


def drawn(state: LayerState, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(state.weights[name].shape, generator=generator, dtype=state.weights[name].dtype)
        for name in state.updates
    }


def gaps(layout: Layout, buffer: Tensor) -> Tensor:
    """What lies between the parameters."""
    inside = torch.zeros(layout.size, dtype=torch.bool)
    for place in layout.places:
        inside[place.begin : place.stop] = True
    return buffer[~inside]


def test_parameters_of_a_dtype_lie_side_by_side_matrices_first_each_as_a_fresh_allocation_would() -> None:
    module = Odd()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    state = LayerState.of(0, "odd", module, ADAMW)
    singles, doubles = state.flats
    assert [place.name for place in singles.layout.places] == [
        "matrix",
        "empty",
        "transposed",
        "gain",
        "bias",
    ]
    assert [place.name for place in doubles.layout.places] == ["wide"]
    for flat in state.flats:
        for place in flat.layout.places:
            parameter = module.get_parameter(place.name)
            assert parameter.data_ptr() % (2 * ALIGNED) == 0 or not parameter.numel()
            assert parameter.is_contiguous()
            assert torch.equal(flat.weights[place.begin : place.stop].view(place.shape), before[place.name])
            assert state.weights[place.name] is parameter
    assert module.fixed.untyped_storage().data_ptr() != singles.weights.untyped_storage().data_ptr()


def test_a_second_state_of_a_module_finds_its_parameters_where_they_lie() -> None:
    module = Odd()
    first = LayerState.of(0, "odd", module, ADAMW)
    second = LayerState.of(0, "odd", module, ADAMW)
    assert [flat.weights.data_ptr() for flat in first.flats] == [
        flat.weights.data_ptr() for flat in second.flats
    ]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_nothing_ever_lies_between_parameters(name: str) -> None:
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.1), 10)
    state = LayerState.of(0, "odd", Odd(), optimizer)
    for step in range(3):
        optimizer.update_(state, drawn(state, step), 0.7, optimizer.lr(step))
    for flat in state.flats:
        assert not any(gaps(flat.layout, buffer).any() for buffer in (flat.weights, *flat.slots.values()))


def test_an_update_takes_the_same_elements_whatever_the_layout_that_a_parameter_had() -> None:
    one, other = Odd(), Odd()
    other.transposed = nn.Parameter(other.transposed.detach().contiguous())
    states = [LayerState.of(0, "odd", module, ADAMW) for module in (one, other)]
    for state in states:
        ADAMW.update_(state, drawn(state, 5), 1.0, ADAMW.lr(0))
    assert digest(states[0]) == digest(states[1])


def test_an_update_in_parts_has_the_bits_of_one() -> None:
    sizes = (PART - 5, 2 * PART + 3)
    module = nn.ParameterDict({f"p{number}": torch.zeros(size) for number, size in enumerate(sizes)})
    state = LayerState.of(0, "large", module, ADAMW)
    apart = [
        LayerState.of(0, "large", nn.ParameterDict({f"p{number}": torch.zeros(size)}), ADAMW)
        for number, size in enumerate(sizes)
    ]
    for step in range(2):
        gradients = drawn(state, step)
        ADAMW.update_(state, gradients, 0.3, ADAMW.lr(step))
        for number, one in enumerate(apart):
            ADAMW.update_(one, {f"p{number}": gradients[f"p{number}"]}, 0.3, ADAMW.lr(step))
    for number, one in enumerate(apart):
        assert torch.equal(state.weights[f"p{number}"], one.weights[f"p{number}"])


def test_an_update_changes_the_version_of_a_weight_and_of_no_frozen_one() -> None:
    """A cast to 16 bits is kept as long as the version stays."""
    state = LayerState.of(0, "odd", Odd(), ADAMW)
    gradients = drawn(state, 1)
    del gradients["bias"]
    before = {name: weight._version for name, weight in state.weights.items()}
    ADAMW.update_(state, gradients, 1.0, ADAMW.lr(0))
    changed = {name for name, weight in state.weights.items() if weight._version != before[name]}
    assert changed == gradients.keys()


def test_parameters_that_share_memory_are_refused() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(4))
    module.b = nn.Parameter(module.a.data)
    with pytest.raises(
        JobError, match=r"layer odd has parameters a and b that share memory.*one parameter with two names"
    ):
        LayerState.of(0, "odd", module, ADAMW)


def test_a_host_copy_is_side_by_side_too_and_shares_nothing() -> None:
    state = LayerState.of(0, "odd", Odd(), ADAMW)
    ADAMW.update_(state, drawn(state, 2), 1.0, ADAMW.lr(0))
    copy = host_copy(state)
    assert digest(copy) == digest(state)
    for mine, its in zip(state.flats, copy.flats, strict=True):
        assert torch.equal(mine.weights, its.weights)
        assert mine.weights.data_ptr() != its.weights.data_ptr()
    for place in copy.flats[0].layout.places:
        if place.shape and 0 not in place.shape:
            assert copy.weights[place.name].data_ptr() == copy.flats[0].weights[place.begin].data_ptr()
    assert list(copy.weights) == list(state.weights)
    assert {name: set(slots) for name, slots in copy.slots.items()} == {
        name: {"exp_avg", "exp_avg_sq"} for name in state.updates
    }


def test_gradients_are_gathered_with_every_bit_and_absent_ones_leave_zeros() -> None:
    module = Odd()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    buffers = GradientBuffers(trained)
    home = buffers.home(module.matrix)
    module.matrix.grad = home.copy_(torch.full((5, 3), -0.0))
    module.bias.grad = torch.full((7,), -0.0)
    module.wide.grad = torch.ones(3, 3, dtype=torch.float64)
    found = buffers.gathered()
    assert set(found) == {"matrix", "bias", "wide"}
    assert module.matrix.grad is home
    assert module.bias.grad is found["bias"]
    assert torch.signbit(found["bias"]).all()
    assert torch.signbit(found["matrix"]).all()
    module.bias.grad = None
    module.matrix.grad = torch.ones(5, 3)
    again = buffers.gathered()
    assert set(again) == {"matrix", "wide"}
    singles = again.buffers[0]
    (place,) = (place for place in buffers.layouts[0].places if place.name == "bias")
    assert not singles[place.begin : place.stop].any()
    assert torch.equal(home, torch.ones(5, 3))
    assert not gaps(buffers.layouts[0], singles).any()


def test_gradients_that_lie_side_by_side_are_taken_as_they_are() -> None:
    state = LayerState.of(0, "odd", Odd(), ADAMW)
    layouts, weights = [flat.layout for flat in state.flats], [flat.weights for flat in state.flats]
    gradients = drawn(state, 4)
    found = side_by_side(layouts, gradients, weights)
    assert isinstance(found, FlatGradients)
    assert side_by_side(layouts, found, weights) is found
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)
