"""What a rank built ahead serves every attempt to form the next generation, with the bits of layers built for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from jobs import job, small_config
from test_freezing_training import METHODS
from torch import nn

from benchmarks.parts.rank_threads import run_threads
from planner.shards import WHOLE, Piece, Shard
from workers.checkpoint.corruption import corrupt_newest_checkpoint
from workers.checkpoint.folder import checkpoints, read_layer, read_manifest
from workers.config import CheckpointConfig, ElasticConfig, FreezeConfig, WorkerConfig
from workers.elastic import layer_source
from workers.launch.ranks import assignment
from workers.models.definition import LayerBuilder
from workers.protocol.errors import StateStreamError
from workers.protocol.orders import Assignment, CopyAhead, StateSource
from workers.rank import Rank
from workers.state.layer_state import LayerState, host_copy
from workers.state_stream.stream import StateServer

SECRET, HOST = b"a secret of the tests", "127.0.0.1"
LAYERS = range(8)


class Here:
    """A rank that is to get all eight layers of a model, each of which it has built ahead."""

    def __init__(self, config: WorkerConfig, shard: Shard = WHOLE) -> None:
        self.rank = Rank(config, 0, lambda report: None, secret=SECRET)
        self.rank.setup()
        self.first = assignment(job(config), 0)
        self.builds = Counter[int]()
        assert self.rank._source is not None
        self.source = self.rank._source
        definition = self.source._definition
        layers = tuple(
            LayerBuilder(one.name, partial(self._build, number, one.build))
            for number, one in enumerate(definition.layers)
        )
        self.source._definition = replace(definition, layers=layers)
        self.coming = self.rank._coming.modules
        self.wanted = frozenset(Piece(layer, shard) for layer in LAYERS)

    def _build(self, number: int, build: Callable[[], nn.Module]) -> nn.Module:
        self.builds[number] += 1
        return build()

    def build_ahead(self) -> None:
        self.builds.clear()
        self.coming.ready(self.wanted)
        while not self.coming.done:
            time.sleep(0.001)
        assert self.builds == dict.fromkeys(LAYERS, 1)

    def states(self) -> dict[int, LayerState]:
        """States of the model's layers with values of their own."""
        built = self.source.build(LAYERS, 0)
        states = {layer: host_copy(one[1]) for layer, one in built.items()}
        torch.manual_seed(1)
        for state in states.values():
            for weight in state.weights.values():
                weight.normal_()
            for name, slots in state.slots.items():
                state.updates[name] = 3
                for slot in slots.values():
                    slot.normal_()
        return states

    def told(self, port: int) -> Assignment:
        sources = tuple(StateSource(layer=layer, rank=1, host=HOST, port=port) for layer in LAYERS)
        return replace(self.first, step=3, sources=sources)

    @property
    def modules(self) -> dict[int, nn.Module]:
        return {layer: one.module for layer, (one, _) in self.rank._holdings.layers.items()}


@contextmanager
def ranked(config: WorkerConfig) -> Iterator[Here]:
    here = Here(config)
    try:
        yield here
    finally:
        here.rank.close()


def values(state: LayerState) -> dict[str, torch.Tensor]:
    slots = {f"{name}/{slot}": one for name, of in state.slots.items() for slot, one in of.items()}
    freezing = {f"freezing/{name}": one for name, one in state.freezing.items()}
    return {**state.weights, **state.buffers, **slots, **freezing}


def assert_same(one: LayerState, other: LayerState) -> None:
    mine, its = values(one), values(other)
    assert mine.keys() == its.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor.cpu(), its[name].cpu()), name
    assert one.updates == other.updates


def has_all(here: Here, states: dict[int, LayerState]) -> None:
    """It trains with these states, and its modules compute with their weights."""
    layers = here.rank._holdings.layers
    assert {*layers} == {*LAYERS}
    for number, (layer, state) in layers.items():
        assert_same(state, states[number])
        for name, parameter in layer.module.named_parameters():
            assert torch.equal(parameter.cpu(), states[number].weights[name].cpu()), name


@pytest.mark.parametrize("salvage", ["none", "weights"])
def test_a_fetch_that_fails_costs_no_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, salvage: str
) -> None:
    """Layers that came with the first attempt are kept, and what was built for the others waits for the second one."""
    monkeypatch.setattr(layer_source, "FETCH_WAIT_S", 0.5)
    config = small_config(tmp_path, elastic=ElasticConfig(salvage=salvage))  # pyright: ignore[reportArgumentType]
    server = StateServer(SECRET, HOST, busy=lambda: False)
    with ranked(config) as here:
        states = here.states()
        here.build_ahead()
        server.offer(3, [states[layer] for layer in range(5)])
        with pytest.raises(StateStreamError, match="of step 3"):
            here.rank.follow(here.told(server.port))
        # Where weights come before all moments, no layer is complete yet.
        complete = set(range(5)) if salvage == "none" else set[int]()
        assert {piece.layer for piece in here.rank.position().holds} == complete
        assert {*here.source._taken} == {*LAYERS} - complete
        server.offer(3, states.values())
        assert here.rank.follow(here.told(server.port)) is None
        assert here.builds == dict.fromkeys(LAYERS, 1), "no layer was built again"
        assert len({id(module) for module in here.modules.values()}) == len(LAYERS)
        has_all(here, states)
        assert not here.source._ahead
        assert not here.source._taken, "nothing of it outlives the attempts"
    server.close()


@pytest.mark.parametrize("method", ["none", "apf"])
def test_a_damaged_checkpoint_costs_no_build_and_leaves_no_value(tmp_path: Path, method: str) -> None:
    freeze = METHODS.get(method, FreezeConfig())
    config = small_config(
        tmp_path, "batchnorm", steps=4, freeze=freeze, checkpoint=CheckpointConfig(every_steps=2)
    )
    run_threads(job(config))
    newest, older = checkpoints(config.job.folder)
    assert corrupt_newest_checkpoint(config.job.folder)
    with ranked(config) as here:
        here.build_ahead()
        damage = here.rank.follow(replace(here.first, start=newest, step=newest.step))
        assert damage is not None
        assert here.rank.follow(replace(here.first, start=older, step=older.step)) is None
        assert here.builds == dict.fromkeys(LAYERS, 1), "no layer was built again"
        manifest = read_manifest(older)
        has_all(here, {layer: read_layer(older, manifest, layer) for layer in LAYERS})


def test_builds_end_with_the_attempts_that_they_were_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another shard, and where the rank has got no place, they are of no use."""
    monkeypatch.setattr(layer_source, "FETCH_WAIT_S", 0.1)
    server = StateServer(SECRET, HOST, busy=lambda: False)
    with ranked(small_config(tmp_path)) as here:
        here.build_ahead()
        for _ in range(2):
            with pytest.raises(StateStreamError):
                here.rank.follow(here.told(server.port))
            assert {*here.source._taken} == {*LAYERS}
        assert here.builds == dict.fromkeys(LAYERS, 1)
        freeze = here.source._freeze
        here.source.begin(freeze, WHOLE, wanted=range(2, 8))
        assert {*here.source._ahead} == {*range(2, 8)}, "another plan needs no others"
        here.source.begin(freeze, WHOLE)
        here.source.begin(freeze, Shard(0, 2))
        assert not here.source._ahead
        here.source.begin(freeze, WHOLE, here.coming.taken())
        assert not here.source._ahead
        here.build_ahead()
        with pytest.raises(StateStreamError):
            here.rank.follow(here.told(server.port))
        here.rank.copy_ahead(CopyAhead(epoch=1, change=1, generation=1, sources=(), patience_s=60.0))
        assert not here.source._ahead | here.source._taken
    server.close()


def test_a_plan_for_a_generation_that_is_over_has_nothing_built(tmp_path: Path) -> None:
    """Nor has one that a newer plan has overtaken."""
    with ranked(small_config(tmp_path)) as here:
        rank, mailbox = here.rank, here.rank._mailbox
        assert rank.follow(here.first) is None
        plans = [replace(here.first.plan, version=here.first.plan.version + more) for more in (1, 2)]
        older, newer = plans
        rank.leave(4)
        rank.prepare_plan(older, here.first.program, 4, building=here.wanted)
        assert mailbox.next_plan() is None
        assert not here.coming.wanted
        rank.prepare_plan(older, here.first.program, 5, building=here.wanted)
        assert here.coming.wanted
        rank.prepare_plan(newer, here.first.program, 5)
        assert not here.coming.wanted, "a plan that needs none voids what was built for the one before"
        rank.prepare_plan(older, here.first.program, 5, building=here.wanted)
        held = mailbox.next_plan()
        assert held is not None
        assert held.plan is newer
        mailbox.taken_up(held)
        rank.prepare_plan(older, here.first.program, 5, building=here.wanted)
        assert mailbox.next_plan() is None
        assert not here.coming.wanted
