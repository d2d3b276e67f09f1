"""Layers fetched from several ranks, some of which are gone before every layer has arrived."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, small_config
from long_operation import compute_long, drawing_meanwhile
from torch import nn

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import Hub, LocalChannel, run_threads
from planner.shards import WHOLE, Piece, Shard
from workers.checkpoint.folder import checkpoints, export, read_layer, read_manifest
from workers.commit.unfinished import Greeting
from workers.config import CheckpointConfig, ElasticConfig, ModelConfig
from workers.elastic import layer_source
from workers.elastic.layer_source import Built, Haul
from workers.launch.ranks import assignment
from workers.protocol.errors import ChannelError, JobError, StateStreamError
from workers.protocol.orders import (
    Assignment,
    CheckpointRef,
    CommitOutcome,
    Generation,
    StatePart,
    StateSource,
)
from workers.rank import Rank
from workers.reproducibility.keyed_in_turns import LARGE_ELEMENTS
from workers.state.layer_state import (
    FixedDiffers,
    LayerState,
    file_of_fixed,
    host_copy,
    load_,
    part_of,
    record_of_fixed,
    without_fixed,
)
from workers.state_stream.stream import StateServer, fetch

SECRET, HOST = b"a secret of the tests", "127.0.0.1"
LAYERS = range(8)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StateServer, StateServer]]:
    """Two other ranks. A fetch does not wait long for a state that they do not offer."""
    monkeypatch.setattr(layer_source, "FETCH_WAIT_S", 0.5)
    with ExitStack() as closing:
        both = [StateServer(SECRET, HOST, busy=lambda: False) for _ in range(2)]
        for server in both:
            closing.callback(server.close)
        yield both[0], both[1]


@dataclass
class Here:
    """A rank that should get all eight layers of a model."""

    rank: Rank
    first: Assignment

    def states(self, seed: int, shard: Shard = WHOLE, *, fixed: bool = True) -> dict[int, LayerState]:
        """The states of the model's layers, or one shard of each, which differ for every `seed`; with `fixed` also in
        parameters that training does not change."""
        assert self.rank._source is not None
        built = self.rank._source.build(LAYERS, 0, shard)
        states = {layer: host_copy(one[1]) for layer, one in built.items()}
        torch.manual_seed(seed)
        for state in states.values():
            for name, weight in state.weights.items():
                if fixed or name not in state.fixed_names:
                    weight.normal_()
            for name, slots in state.slots.items():
                state.updates[name] = seed
                for slot in slots.values():
                    slot.normal_()
        return states

    def told(self, step: int, given: dict[int, StateServer], weights: tuple[int, ...] = ()) -> Assignment:
        """An assignment with the server for each layer; layers in `weights` come without moments."""
        sources = (
            StateSource(
                layer=layer,
                rank=1,
                host=HOST,
                port=server.port,
                part=StatePart.WEIGHTS if layer in weights else StatePart.ALL,
            )
            for layer, server in given.items()
        )
        return replace(self.first, step=step, sources=tuple(sources))

    @property
    def layers(self) -> Built:
        return self.rank._holdings.layers


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    config = small_config(tmp_path, elastic=ElasticConfig(salvage="weights"))
    rank = Rank(config, 0, lambda report: None, secret=SECRET)
    rank.setup()
    yield Here(rank, assignment(job(config), 0))
    rank.close()


def same(one: LayerState, other: LayerState, part: StatePart = StatePart.ALL) -> bool:
    one, other = part_of(one, part), part_of(other, part)
    pairs = [(one.weights[name], other.weights[name]) for name in one.weights]
    pairs += [
        (one.slots[name][slot], other.slots[name][slot]) for name in one.slots for slot in one.slots[name]
    ]
    return all(a.cpu().equal(b.cpu()) for a, b in pairs) and one.updates == other.updates


def test_what_came_is_kept_and_goes_on_with_other_moments(
    here: Here, servers: tuple[StateServer, StateServer]
) -> None:
    whole, dying = servers
    states = here.states(1)
    whole.offer(3, [states[layer] for layer in range(4)])
    dying.offer(3, [states[layer] for layer in range(4, 7)], StatePart.WEIGHTS)
    givers = {layer: whole if layer < 4 else dying for layer in LAYERS}
    with pytest.raises(StateStreamError, match="layer 7 of step 3"):
        here.rank.follow(here.told(3, givers))
    position = here.rank.position()
    # The weights of layer 7 did not arrive, so the rank requested no moments, but it has all other layers'
    # weights.
    assert (position.step, position.holds, position.weights) == (3, (), tuple(map(Piece, range(7))))

    dying.offer(3, [states[7]], StatePart.WEIGHTS)
    with pytest.raises(StateStreamError):
        here.rank.follow(here.told(3, givers))
    position = here.rank.position()
    assert position.step == 3
    assert {*position.weights} >= set(map(Piece, (4, 5, 6, 7)))
    assert {*position.weights} | {*position.holds} == set(map(Piece, LAYERS))
    assert not {*position.weights} & {*position.holds}

    here.rank.finish_commit(CommitOutcome(step=3, reported=3))
    dying.close()
    server = here.rank._holdings._server
    assert server is not None
    lost = (4, 5, 6, 7)
    given = {layer: server if layer in lost else whole for layer in LAYERS}
    damaged = replace(here.told(3, given, lost), moments=CheckpointRef(path="/nowhere", step=2))
    damage = here.rank.follow(damaged)
    assert damage is not None
    assert damage.problem == "is missing"
    assert here.rank.follow(here.told(3, given, lost)) is None
    fresh = here.rank._source
    assert fresh is not None
    beginning = fresh.build(LAYERS, 0)
    for layer, (_, state) in here.layers.items():
        assert same(state, states[layer], StatePart.WEIGHTS)
        assert same(state, beginning[layer][1] if layer in lost else states[layer], StatePart.MOMENTS)
    # Until the rank has trained with these layers only their weights count: all may yet get other moments.
    position = here.rank.position()
    assert (position.holds, position.weights) == (tuple(map(Piece, range(4))), tuple(map(Piece, lost)))


def test_weights_fill_in_beside_layers_that_are_here_without_a_module(
    here: Here, servers: tuple[StateServer, StateServer]
) -> None:
    """As copies in host memory are."""
    states, source = here.states(1), here.rank._source
    assert source is not None
    servers[0].offer(3, [states[layer] for layer in LAYERS if layer not in (2, 5)])
    servers[1].offer(3, [states[5]], StatePart.WEIGHTS)
    given = {layer: servers[layer == 5] for layer in LAYERS}
    haul = Haul()
    source.fetch_all([*LAYERS], here.told(3, given, (5,)), haul, {Piece(2): (None, states[2])})
    beginning = source.build([5], 0)[5][1]
    for layer, (_, state) in haul.whole.items():
        assert same(state, states[layer], StatePart.WEIGHTS)
        assert same(state, beginning if layer == 5 else states[layer], StatePart.MOMENTS)
    assert {*haul.whole} == {*LAYERS}


@pytest.fixture
def partly_fixed(tmp_path: Path) -> Iterator[Here]:
    """A rank of a job that fixes whole layers, parts of one and all biases."""
    model = ModelConfig(
        factory="small_models:model",
        arguments={"trait": "plain"},
        fixed=("l0.*", "l1.up.*", "l4.*", "*.bias"),
    )
    config = small_config(tmp_path, model=model)
    rank = Rank(config, 0, lambda report: None, secret=SECRET)
    rank.setup()
    yield Here(rank, assignment(job(config), 0))
    rank.close()


@pytest.mark.parametrize("others", [False, True], ids=["as built", "others than built"])
def test_fixed_parameters_travel_only_where_a_rank_builds_others(
    others: bool,
    partly_fixed: Here,
    servers: tuple[StateServer, StateServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[LayerState] = []

    def noted(*arguments: Any, **options: Any) -> LayerState:
        fetched.append(fetch(*arguments, **options))
        return fetched[-1]

    monkeypatch.setattr(layer_source, "fetch", noted)
    states = partly_fixed.states(1, fixed=others)
    servers[0].offer(3, states.values())
    assert partly_fixed.rank.follow(partly_fixed.told(3, dict.fromkeys(LAYERS, servers[0]))) is None
    for layer, (_, state) in partly_fixed.layers.items():
        assert same(state, states[layer])
        assert state.fixed.keys() == states[layer].fixed_names
    # What is written and sent from here on names the values that it has.
    for layer, (_, state) in partly_fixed.layers.items():
        if state.fixed_names:
            assert record_of_fixed(state).sha256 == hashlib.sha256(file_of_fixed(states[layer])).hexdigest()
            load_(host_copy(states[layer]), without_fixed(state))
    with_fixed = [state.layer for state in fetched if state.fixed]
    assert sorted(with_fixed) == ([*LAYERS] if others else [])
    assert sorted(state.layer for state in fetched if state.leaves_out) == [*LAYERS]


def test_snapshots_are_completed_by_the_builder_and_not_by_another_one(
    partly_fixed: Here, servers: tuple[StateServer, StateServer]
) -> None:
    source = partly_fixed.rank._source
    assert source is not None
    for other in (False, True):
        step, states = 3 + other, partly_fixed.states(1, fixed=other)
        servers[other].keep(step, [without_fixed(state) for state in states.values()])
        told = partly_fixed.told(step, dict.fromkeys(LAYERS, servers[other]))
        found = source.fetch(told.sources, step)
        if other:
            with pytest.raises(FixedDiffers, match=r"layer 0 \(l0\): its fixed parameters are [\d,]+ bytes"):
                source.completed(found[Piece(0)])
            with pytest.raises(StateStreamError, match="is here without its fixed parameters"):
                partly_fixed.rank.follow(told)
        else:
            assert all(same(source.completed(found[Piece(layer)]), states[layer]) for layer in LAYERS)
            assert partly_fixed.rank.follow(told) is None
            assert all(same(state, states[layer]) for layer, (_, state) in partly_fixed.layers.items())


def test_a_joiner_takes_fixed_parameters_from_their_owner_where_the_files_are_gone(
    tmp_path: Path, servers: tuple[StateServer, StateServer]
) -> None:
    """And a rank that holds the layer completes a snapshot of it without them."""
    first = small_config(tmp_path / "first")
    run_threads(job(first, stop_at=1))
    file = tmp_path / "w.safetensors"
    export(first.job.folder, str(file))
    fields = {**first.model.model_dump(), "weights": str(file), "fixed": ("l0.*", "l4.*")}
    config = small_config(tmp_path / "second", model=ModelConfig(**fields))
    rank = Rank(config, 0, lambda report: None, secret=SECRET)
    rank.setup()
    here = Here(rank, assignment(job(config), 0))
    states = here.states(1, fixed=False)
    servers[0].offer(3, states.values())
    file.unlink()
    assert rank.follow(here.told(3, dict.fromkeys(LAYERS, servers[0]))) is None
    for layer, (_, state) in here.layers.items():
        assert same(state, states[layer])
    source = rank._source
    assert source is not None
    left_out = without_fixed(states[0])
    with pytest.raises(JobError, match="cannot be read"):
        source.completed(left_out)
    assert same(source.completed(left_out, here.layers[0][1]), states[0])
    rank.close()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("whole", [True, False])
def test_shards_without_moments_get_those_of_the_checkpoint_and_no_others_do(
    tmp_path: Path, servers: tuple[StateServer, StateServer], precision: str, whole: bool
) -> None:
    """The rank puts whole layers together, or takes the place of the lost one."""
    config = small_config(
        tmp_path,
        replicas=2,
        precision=precision,
        elastic=ElasticConfig(salvage="weights"),
        checkpoint=CheckpointConfig(every_steps=2),
    )
    run_threads(job(changed(config, steps=2)))
    (saved,) = checkpoints(config.job.folder)
    manifest = read_manifest(saved)
    rank = Rank(config, 0, lambda report: None, secret=SECRET)
    rank.setup()
    work = job(config)
    plan = replace(work.plan, shard="optimizer", pipelines=1 if whole else 2)
    place = plan.world_size - 1
    here = Here(rank, replace(assignment(job(config), 0), plan=plan, place=place))
    first, second = (here.states(seed, Shard(seed - 7, 2)) for seed in (7, 8))
    living, dying = servers
    dying.offer(3, second.values(), StatePart.WEIGHTS)
    pieces = [Piece(layer, Shard(number, 2)) for layer in LAYERS for number in range(2)]

    def told(second_port: int, part: StatePart) -> Assignment:
        sources = [
            StateSource(
                layer=piece.layer,
                shard=piece.shard,
                rank=1,
                host=HOST,
                port=second_port if piece.shard.number else living.port,
                part=part if piece.shard.number else StatePart.ALL,
            )
            for piece in pieces
            if whole or piece.shard.number
        ]
        return replace(here.first, step=3, sources=tuple(sources), moments=saved)

    with pytest.raises(StateStreamError, match="not offered"):
        rank.follow(told(dying.port, StatePart.ALL))
    position = rank.position()
    assert {*position.weights} == {piece for piece in pieces if piece.shard.number}
    assert position.holds == ()
    rank.finish_commit(CommitOutcome(step=3, reported=3))
    dying.close()
    living.offer(3, first.values())
    assert rank._holdings._server is not None
    assert rank.follow(told(rank._holdings._server.port, StatePart.WEIGHTS)) is None
    assert {*here.layers} == {*LAYERS}
    for layer, (_, state) in here.layers.items():
        old, lost = read_layer(saved, manifest, layer), second[layer].updates.keys()
        newest = {**first[layer].weights, **second[layer].weights}
        assert all(weight.cpu().equal(newest[name]) for name, weight in state.weights.items())
        for name, slots in state.slots.items():
            expected = old if name in lost else first[layer]
            assert state.updates[name] == expected.updates[name]
            assert all(slot.cpu().equal(expected.slots[name][kind]) for kind, slot in slots.items())
        assert state.updates.keys() == (first[layer].updates.keys() if whole else set()) | lost
    assert any(state.updates for state in second.values())
    # What has the checkpoint's moments counts as weights only, until the rank has trained with it.
    after = rank.position()
    assert after.weights == position.weights
    assert {*after.holds} == {piece for piece in pieces if whole and not piece.shard.number}
    rank.close()


def test_what_came_of_an_earlier_step_is_no_part_of_a_later_one(
    here: Here, servers: tuple[StateServer, StateServer]
) -> None:
    early, late = here.states(3), here.states(9)
    for step, states, kept in ((3, early, (2, 3)), (9, late, (3, 5))):
        for server in servers:
            server.withdraw()
        servers[0].offer(step, [states[layer] for layer in kept], StatePart.WEIGHTS)
        with pytest.raises(StateStreamError):
            here.rank.follow(here.told(step, dict.fromkeys(LAYERS, servers[0])))
        position = here.rank.position()
        assert (position.step, position.holds, position.weights, position.vector_sha256) == (
            step,
            (),
            tuple(map(Piece, kept)),
            None,
        )
    assert same(here.rank._holdings._salvaged[Piece(3)], late[3], StatePart.WEIGHTS)
    assert not same(early[3], late[3], StatePart.WEIGHTS)


def test_who_was_told_that_a_generation_is_over_joins_it_no_more(here: Here) -> None:
    """News of its end may overtake the call to join it, and then nothing else would wake the waiting rank."""
    here.rank.leave(4)
    generation = Generation(
        number=4, epoch=1, members=(0, 1), store_host="127.0.0.1", store_port=1, timeout_s=60.0
    )
    with pytest.raises(ChannelError, match="generation 4 was over"):
        here.rank.join(generation)


def test_word_of_an_earlier_generation_that_comes_late_ends_no_newer_one(here: Here) -> None:
    channel = LocalChannel(Hub(1), 0)
    generation = Generation(
        number=5, epoch=1, members=(0,), store_host="127.0.0.1", store_port=1, timeout_s=60.0
    )
    here.rank.join(generation, channel)
    here.rank.leave(4)
    assert channel.all_gather(b"here") == [b"here"]
    here.rank.leave(5)
    with pytest.raises(ChannelError, match="the channel is closed"):
        channel.all_gather(b"here")


def test_who_has_joined_when_the_word_comes_keeps_no_channel_open(here: Here) -> None:
    channel = LocalChannel(Hub(1), 0)
    generation = Generation(
        number=5, epoch=1, members=(0,), store_host="127.0.0.1", store_port=1, timeout_s=60.0
    )
    here.rank.leave(5)
    with pytest.raises(ChannelError, match="generation 5 was over"):
        here.rank.join(generation, channel)
    with pytest.raises(ChannelError, match="the channel is closed"):
        channel.all_gather(b"here")


def test_layers_that_share_parameters_are_not_given_moments_of_different_steps(tmp_path: Path) -> None:
    rank = Rank(
        small_config(tmp_path, "tied", elastic=ElasticConfig(salvage="weights")), 0, lambda report: None
    )
    with pytest.raises(JobError, match=r'elastic.salvage = "weights".*shared parameters would drift apart'):
        rank.setup()


def test_training_takes_its_turn_of_random_draws_while_a_copy_is_built(
    here: Here, servers: tuple[StateServer, StateServer]
) -> None:
    source = here.rank._source
    assert source is not None
    layers = list(source._definition.layers)

    def build() -> nn.Module:
        compute_long(torch.zeros(LARGE_ELEMENTS))
        return layers[2].build()

    states = here.states(1)
    servers[0].offer(3, [states[2]])
    source._definition = replace(
        source._definition, layers=(*layers[:2], replace(layers[2], build=build), *layers[3:])
    )
    with drawing_meanwhile():
        owner = Greeting(host=HOST, port=servers[0].port, left=None)
        _, state = source.fetch_base(3, Piece(2), owner, threading.Event())
    assert same(state, states[2])
