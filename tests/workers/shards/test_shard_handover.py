"""A shard goes from a copy to a layer that computes, and back: with its bits, and with no more memory than it needs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import small_config
from pace import patient
from test_layer_shards import ADAMW, CPU, Odd, assert_same, updated

from planner.plan import Plan
from planner.shards import WHOLE, Piece, Shard
from workers.build import build_layers
from workers.config import FreezeConfig
from workers.copies.standby import Base, Standbys
from workers.devices.device import CpuDevice
from workers.elastic.layer_source import LayerSource, base_of
from workers.elastic.modules_ahead import ModulesAhead
from workers.elastic.switch import Switched, take_up
from workers.fault_injection.points import FaultPoints
from workers.freezing.plans import FreezePlans, FreezeSettings
from workers.layers.layer import Layer
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.state.layer_state import LayerState, host_copy

SIZES = (40, 7, 300, 5, 64)
FREEZE = FreezeSettings(FreezeConfig(), FreezePlans())
DEFINITION = ModelDefinition(
    layers=tuple(LayerBuilder(f"odd{number}", lambda: Odd(SIZES)) for number in range(3)),
    loss=lambda x, y: x.mean(),
)
NOW = Plan(
    epoch=1,
    version=1,
    reason="",
    layers=((0, 2), (2, 3)),
    stage_ranks=(0, 1),
    schedule="gpipe",
    chunks=1,
    microbatches=2,
    replicas=2,
    shard="optimizer",
)
THEN = replace(NOW, layers=((0, 1), (1, 3)))
"""Layer 1 goes from place 0 to place 1, and from 2 to 3."""
PIECE = Piece(1, Shard(0, 2))

precisions = pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "bfloat16-autocast"])


def built(layers: Iterable[int], precision: str, seed: int = 1) -> dict[int, tuple[Layer, LayerState]]:
    return build_layers(
        DEFINITION,
        layers,
        seed=seed,
        precision=precision,
        device=CPU,
        optimizer=ADAMW,
        shard=PIECE.shard,
    )


def standbys(*bases: Base) -> Standbys:
    pieces = {Piece(state.layer, state.shard): (layer, state) for layer, state in bases}
    kept = Standbys([*pieces], pieces, freeze=FREEZE, optimizer=ADAMW, step=3)
    kept.rest()
    return kept


def switched(
    plan: Plan,
    place: int,
    layers: dict[int, tuple[Layer, LayerState]],
    copies: Standbys,
    modules: dict[Piece, Layer] | None = None,
) -> Switched:
    return take_up(plan, place, layers, copies, modules or {}, freeze=FREEZE, optimizer=ADAMW, step=3)


@precisions
def test_a_copy_becomes_the_state_of_a_module_without_a_second_one(precision: str) -> None:
    own, (layer, state) = built([2], precision), built([1], precision)[1]
    updated(layer, state, ADAMW, 3)
    with torch.no_grad():
        state.buffers["seen"].add_(1)
        state.weights["fixed"].add_(1)
    expected, copy = host_copy(state), base_of((layer, state))
    slots = {name: slot.data_ptr() for name, slots in copy[1].slots.items() for slot in slots.values()}
    # Its weights are others before it takes over.
    module = built([1], precision, seed=2)[1][0]
    has = switched(THEN, 1, own, standbys(copy), {PIECE: module})
    assert (has.taken, has.given, sorted(has.layers)) == ((1,), (), [1, 2])
    assert has.layers[2][0] is own[2][0]
    taken, live = has.layers[1]
    assert taken is module
    assert_same(live, expected)
    assert {n: t.data_ptr() for n, slots in live.slots.items() for t in slots.values()} == slots
    for name, parameter in module.module.named_parameters():
        if name not in state.elsewhere:
            assert torch.equal(parameter, expected.weights[name].to(parameter.dtype)), name
    assert torch.equal(module.module.get_buffer("seen"), expected.buffers["seen"])
    # It trains on as the layer would have.
    assert_same(updated(module, live, ADAMW, 2), updated(layer, state, ADAMW, 2))
    for name in live.updates:
        assert torch.equal(module.module.get_parameter(name), layer.module.get_parameter(name)), name


@precisions
@pytest.mark.parametrize("kept", [True, False])
def test_who_gives_a_shard_up_keeps_its_state_at_most(precision: str, kept: bool) -> None:
    layers = built([0, 1], precision)
    layer, state = layers[1]
    updated(layer, state, ADAMW, 3)
    expected = host_copy(state)
    memory = [weakref.ref(buffer.untyped_storage()) for buffer in layer.shared.buffers]  # pyright: ignore[reportOptionalMemberAccess]
    module = weakref.ref(layer.module)
    plan = replace(THEN, standbys=((), (), (0,), (), (), ())) if kept else THEN
    has = switched(plan, 0, layers, standbys())
    assert (has.taken, has.given, sorted(has.layers)) == ((), (1,), [0])
    assert has.standbys.pieces == ((PIECE,) if kept else ())
    del layers, layer, state
    gc.collect()
    assert module() is None
    assert [ref() for ref in memory] == [None] * len(memory)
    if kept:
        has.standbys.rest()
        without, copy = has.standbys.held()[PIECE]
        assert without is None
        assert_same(copy, expected)
        sizes = [t.nbytes for f in copy.flats for t in (f.weights, *f.slots.values())]
        held = [t.untyped_storage().nbytes() for f in copy.flats for t in (f.weights, *f.slots.values())]
        assert held == sizes
        assert all(flat.cast is None for flat in copy.flats)


def test_modules_are_built_beside_training_and_only_while_they_are_wanted() -> None:
    began, go_on, asked, told = threading.Event(), threading.Event(), list[Piece](), list[str]()

    def build(piece: Piece) -> Layer:
        asked.append(piece)
        began.set()
        assert go_on.wait(10)
        if piece.layer == 2:
            raise MemoryError("no room")
        return built([piece.layer], "float32")[piece.layer][0]

    ahead = ModulesAhead(build, told.append)
    other = Piece(0, PIECE.shard)
    assert ahead.ready(())
    assert not ahead.wanted
    assert ahead.done
    assert not ahead.ready({PIECE, other})
    assert began.wait(10)
    # While one is built, another plan takes the place of the first.
    assert not ahead.ready({PIECE})
    assert not ahead.done
    go_on.set()
    while not ahead.ready({PIECE}):
        pass
    assert asked == [other, PIECE]
    assert ahead.done
    assert [*ahead.taken()] == [PIECE]
    assert not ahead.wanted
    assert ahead.taken() == {}
    lost = {Piece(2, PIECE.shard)}
    while not told:
        assert not ahead.ready(lost)
    assert told == ["layer 2 (shard 0 of 2) cannot be taken over: no room"]
    assert not ahead.ready(lost)
    assert ahead.done, "nobody waits for it any longer"
    assert len(asked) == 3, "it is not tried again"
    for number, let_go in enumerate((lambda: ahead.ready(()), ahead.taken, ahead.stop), start=4):
        let_go()
        while len(told) < number - 2:
            assert not ahead.ready(lost)
        assert len(asked) == number, "memory may have become free meanwhile"


def test_a_module_that_is_wanted_no_more_and_cannot_be_built_keeps_no_other_from_it() -> None:
    began, go_on, told = threading.Event(), threading.Event(), list[str]()

    def build(piece: Piece) -> int:
        if piece == PIECE:
            return piece.layer
        began.set()
        assert go_on.wait(10)
        raise MemoryError("no room")

    ahead = ModulesAhead(build, told.append)
    assert not ahead.ready({Piece(0, PIECE.shard)})
    assert began.wait(10)
    assert not ahead.ready({PIECE})  # asked once, as for the next generation
    go_on.set()
    deadline = time.monotonic() + patient(10)
    while not ahead.done and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (ahead.taken(), told) == ({PIECE: PIECE.layer}, [])


def test_layers_that_were_built_ahead_are_taken_once_by_a_rank_of_their_shard(tmp_path: Path) -> None:
    faults = FaultPoints(lambda report: None)
    source = LayerSource(small_config(tmp_path), DEFINITION, CpuDevice(), ADAMW, b"", faults)
    other = Piece(0, Shard(1, 2))
    made = {piece: source.build_ahead(piece) for piece in (PIECE, other)}
    source.begin(FREEZE, PIECE.shard, made)
    assert source.build([1], 3, beside_training=True)[1] is not made[PIECE]
    assert source.build([1], 3, WHOLE)[1] is not made[PIECE]
    built = source.build([0, 1], 3)
    assert built[1] is made[PIECE]
    assert built[0] is not made[other]
    assert {state.shard for _, state in built.values()} == {PIECE.shard}
    assert source.build([1], 3)[1] is not made[PIECE]
    source.begin(FREEZE, PIECE.shard, made)
    source.end()
    assert source.build([1], 3)[1] is not made[PIECE]
