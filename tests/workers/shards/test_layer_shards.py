"""A layer's state in shards: each is updated, copied and loaded as that part of the whole is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from planner.shards import Shard
from workers.build import build_layers
from workers.config import FreezeConfig, OptimizerConfig
from workers.elastic.holdings import weights_of_siblings
from workers.freezing.freezer import begin_statistics
from workers.layers.layer import Layer
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.protocol.errors import JobError
from workers.protocol.orders import StatePart
from workers.state.layer_state import LayerState, digest, host_copy, load_, part_of, united, whole_of
from workers.state.optim import Optimizer, make_optimizer

CPU = torch.device("cpu")
ADAMW = make_optimizer(OptimizerConfig(weight_decay=0.1), 10)
SGD = make_optimizer(OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.1), 10)


class Odd(nn.Module):
    """Parameters of these sizes, every other one a matrix, beside a fixed one and a buffer."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.own = nn.ParameterList(
            torch.randn(size, 1) if number % 2 else torch.randn(size) for number, size in enumerate(sizes)
        )
        self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("seen", torch.randn(3))


def built(
    sizes: tuple[int, ...],
    shard: Shard,
    optimizer: Optimizer = ADAMW,
    precision: str = "float32",
    name: str = "odd",
) -> tuple[Layer, LayerState]:
    definition = ModelDefinition(layers=(LayerBuilder(name, lambda: Odd(sizes)),), loss=lambda x, y: x.mean())
    return build_layers(
        definition, [0], seed=1, precision=precision, device=CPU, optimizer=optimizer, shard=shard
    )[0]


def updated(
    layer: Layer, state: LayerState, optimizer: Optimizer, steps: int, absent: str = ""
) -> LayerState:
    """The state after updates with gradients that depend on step and parameter alone."""
    for step in range(steps):
        for number, (name, parameter) in enumerate(layer.module.named_parameters()):
            if parameter.requires_grad and (name != absent or step == 0):
                torch.manual_seed(100 * step + number)
                parameter.grad = torch.randn(parameter.shape)
        optimizer.update_(state, layer.gradients(), 0.7, optimizer.lr(step))
        layer.summed.drop()
    return state


def assert_same(one: LayerState, other: LayerState) -> None:
    assert digest(one) == digest(other)
    assert one.updates == other.updates
    for name, slots in other.slots.items():
        assert one.slots[name].keys() == slots.keys()
        assert all(torch.equal(one.slots[name][slot], value) for slot, value in slots.items())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=5).map(tuple),
    st.integers(2, 4),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([ADAMW, SGD]),
)
def test_shards_together_have_the_bits_of_the_whole_layer(
    sizes: tuple[int, ...], of: int, precision: str, optimizer: Optimizer
) -> None:
    whole = updated(*built(sizes, Shard(0, 1), optimizer, precision), optimizer, 3, "own.0")
    shards = [
        updated(*built(sizes, Shard(number, of), optimizer, precision), optimizer, 3, "own.0")
        for number in range(of)
    ]
    assert_same(whole_of(shards), whole)
    assert sum(len(shard.updates) for shard in shards) == len(sizes)


def test_a_shard_has_states_of_its_own_parameters_alone_and_the_module_computes_with_all() -> None:
    layer, state = built((64, 64, 64, 64), Shard(1, 2), precision="bfloat16")
    assert state.shard == Shard(1, 2)
    assert state.updates.keys() == state.slots.keys() == {"own.0", "own.2"}
    assert state.elsewhere == {"own.1", "own.3"}
    assert state.weights.keys() == {"own.0", "own.2", "fixed"}
    assert state.weights["own.0"].dtype == torch.float32
    held = {flat.weights.untyped_storage().nbytes() for flat in state.flats}
    assert held == {4 * 2 * 64}, "the masters of the other shard are gone"
    assert layer.shared is not None
    assert [buffer.numel() for buffer in layer.shared.buffers] == [4 * 64]
    before = layer.module.get_parameter("own.0").clone()
    updated(layer, state, ADAMW, 1)
    assert not torch.equal(layer.module.get_parameter("own.0"), before)
    assert torch.equal(layer.module.get_parameter("own.0"), state.weights["own.0"].to(torch.bfloat16))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_shard_takes_its_part_of_a_whole_layer_and_of_a_shard_that_has_it(precision: str) -> None:
    sizes = (5, 64, 7, 40)
    whole = updated(*built(sizes, Shard(0, 1), precision=precision), ADAMW, 2)
    shards = []
    for number in range(3):
        layer, state = built(sizes, Shard(number, 3), precision=precision)
        load_(state, host_copy(whole))
        _, again = built(sizes, Shard(number, 3), precision=precision)
        load_(again, host_copy(state))
        assert_same(again, state)
        shards.append(state)
        for name in state.updates:
            held = layer.module.get_parameter(name)
            assert torch.equal(held, state.weights[name].to(held.dtype))
    assert_same(whole_of(shards), whole)
    copies = [host_copy(state) for state in shards]
    _, fresh = built(sizes, Shard(0, 1), precision=precision)
    load_(fresh, whole_of(copies))
    assert_same(fresh, whole)


@pytest.mark.parametrize("method", ["timelyfreeze", "apf", "autofreeze"])
def test_statistics_go_with_their_parameters(method: Any) -> None:
    """Between a whole layer and shards, also one without parameters, some of which APF looks at in part."""
    config, sizes = FreezeConfig(method=method, warm_up=1), (1200, 5, 2000, 1)
    whole = built(sizes, Shard(0, 1))[1]
    shards = [built(sizes, Shard(number, 5))[1] for number in range(5)]
    for state in (whole, *shards):
        begin_statistics(config, state)
    for number, statistic in enumerate(whole.freezing.values()):
        numbers = torch.arange(statistic.numel()).reshape(statistic.shape)
        statistic.copy_(numbers % 2 if statistic.dtype == torch.bool else numbers + number)
    for state in shards:
        load_(state, host_copy(whole))
    held = [name for shard in shards for name in shard.updates]
    assert sorted(held) == sorted(whole.updates)
    assert 0 in {len(shard.updates) for shard in shards}
    _, again = built(sizes, Shard(0, 1))
    begin_statistics(config, again)
    load_(again, whole_of([host_copy(shard) for shard in shards]))
    for key, statistic in whole.freezing.items():
        assert torch.equal(again.freezing[key], statistic), key
    energies = dict(zip(sorted(whole.updates), whole.freezing["energy"].tolist(), strict=True))
    for shard in shards:
        assert shard.freezing["energy"].tolist() == [energies[name] for name in sorted(shard.updates)]
    foreign = host_copy(whole)
    foreign.freezing["energy"] = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(JobError, match=r"freezing statistic energy has 3 numbers, but parameters .* have 4"):
        load_(shards[0], foreign)


def test_what_does_not_belong_to_the_layer_is_refused() -> None:
    _, state = built((4, 8, 12), Shard(0, 2))
    before = digest(state)
    _, foreign = built((5, 8, 12), Shard(0, 1))
    with pytest.raises(JobError, match="is float32"):
        load_(state, foreign)
    _, longer = built((4, 8, 12, 3), Shard(0, 1))
    with pytest.raises(JobError, match=r"the state to load has .*own\.3"):
        load_(state, longer)
    _, other = built((4, 8, 12), Shard(1, 2))
    with pytest.raises(JobError, match="is missing in the state to load"):
        load_(state, other)
    _, whole = built((4, 8, 12), Shard(0, 1))
    with pytest.raises(JobError, match="is missing in the state to load"):
        load_(whole, state)
    with pytest.raises(JobError, match=r"is made of .* but here are"):
        whole_of([state, state])
    assert digest(state) == before


def test_gradients_of_other_shards_are_left_alone() -> None:
    layer, state = built((40, 40), Shard(0, 2))
    for parameter in layer.module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    gradients = layer.gradients()
    assert set(gradients) == set(state.updates)
    assert [buffer.numel() for buffer in gradients.buffers] == [40]
    grads: list[Tensor | None] = [p.grad for p in layer.module.parameters() if p.requires_grad]
    assert all(grad is not None and bool((grad == 1).all()) for grad in grads)


@pytest.mark.parametrize("sizes", [(64, 30, 1, 64, 7), (5,)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16-autocast"])
def test_what_a_rank_computes_with_has_the_weights_of_its_siblings_shards(
    sizes: tuple[int, ...], precision: str
) -> None:
    """One that takes a lost shard's place can load it, with moments from elsewhere; a shard may be empty."""
    ranks = [built(sizes, Shard(number, 3), precision=precision) for number in range(3)]
    theirs = [updated(*rank, ADAMW, 2) for rank in ranks]
    layer, state = ranks[1]
    assert layer.shared is not None
    for number in (0, 2):
        cut = layer.shared.cuts[number]
        layer.shared.receive(number, [theirs[number].flats[buffer].weights for buffer, _ in cut.parts])
    found = weights_of_siblings(layer, state)
    assert [each.shard for each in found] == [Shard(0, 3), Shard(2, 3)]
    for each in found:
        there = theirs[each.shard.number]
        assert digest(each) == digest(there)
        assert each.weights.keys() == there.weights.keys()
        fresh = built(sizes, each.shard, precision=precision)[1]
        load_(fresh, united(each, part_of(there, StatePart.MOMENTS)))
        assert_same(fresh, there)


def test_16_bits_are_not_the_weights_that_a_sibling_keeps() -> None:
    assert weights_of_siblings(*built((64, 64), Shard(0, 2), precision="bfloat16")) == []
    assert weights_of_siblings(*built((64, 64), Shard(0, 1))) == []
