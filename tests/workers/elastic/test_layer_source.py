"""Layers fetched from several ranks, some of which are gone before every layer has arrived."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from jobs import job, small_config
from long_operation import compute_long, drawing_meanwhile
from torch import nn

from planner.shards import Piece
from workers.config import ElasticConfig
from workers.elastic import layer_source
from workers.elastic.layer_source import Built
from workers.launch.ranks import assignment
from workers.protocol import Assignment, CheckpointRef, Generation, JobError, Part, Settlement, Source
from workers.rank import Rank
from workers.reproducibility.keyed_in_turns import LARGE_ELEMENTS
from workers.state.layer_state import LayerState, host_copy, part_of
from workers.state_stream.frames import StateStreamError
from workers.state_stream.stream import StateServer
from workers.transport.channel import ChannelError
from workers.transport.local import Hub, LocalChannel
from workers.unfinished import Greeting

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

    def states(self, seed: int) -> dict[int, LayerState]:
        """The states of the model's layers, which differ for every `seed`."""
        assert self.rank._source is not None
        states = {layer: host_copy(one[1]) for layer, one in self.rank._source.build(LAYERS, 0).items()}
        torch.manual_seed(seed)
        for state in states.values():
            for weight in state.weights.values():
                weight.normal_()
            for name, slots in state.slots.items():
                state.updates[name] = seed
                for slot in slots.values():
                    slot.normal_()
        return states

    def told(self, step: int, given: dict[int, StateServer], weights: tuple[int, ...] = ()) -> Assignment:
        """An assignment with the server for each layer; layers in `weights` come without moments."""
        sources = (
            Source(
                layer=layer,
                rank=1,
                host=HOST,
                port=server.port,
                part=Part.WEIGHTS if layer in weights else Part.ALL,
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


def same(one: LayerState, other: LayerState, part: Part = Part.ALL) -> bool:
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
    dying.offer(3, [states[layer] for layer in range(4, 7)], Part.WEIGHTS)
    givers = {layer: whole if layer < 4 else dying for layer in LAYERS}
    with pytest.raises(StateStreamError, match="layer 7 of step 3"):
        here.rank.follow(here.told(3, givers))
    position = here.rank.position()
    # The weights of layer 7 did not arrive, so the rank requested no moments, but it has all other layers'
    # weights.
    assert (position.step, position.holds, position.weights) == (3, (), tuple(range(7)))

    dying.offer(3, [states[7]], Part.WEIGHTS)
    with pytest.raises(StateStreamError):
        here.rank.follow(here.told(3, givers))
    position = here.rank.position()
    assert position.step == 3
    assert {*position.weights} >= {4, 5, 6, 7}
    assert {*position.weights} | {piece.layer for piece in position.holds} == {*LAYERS}
    assert not {*position.weights} & {piece.layer for piece in position.holds}

    here.rank.settle(Settlement(step=3, reported=3))
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
        assert same(state, states[layer], Part.WEIGHTS)
        assert same(state, beginning[layer][1] if layer in lost else states[layer], Part.MOMENTS)
    # Until the rank has trained with these layers only their weights count: all may yet get other moments.
    position = here.rank.position()
    assert (position.holds, position.weights) == (tuple(map(Piece, range(4))), lost)


def test_what_came_of_an_earlier_step_is_no_part_of_a_later_one(
    here: Here, servers: tuple[StateServer, StateServer]
) -> None:
    early, late = here.states(3), here.states(9)
    for step, states, kept in ((3, early, (2, 3)), (9, late, (3, 5))):
        for server in servers:
            server.withdraw()
        servers[0].offer(step, [states[layer] for layer in kept], Part.WEIGHTS)
        with pytest.raises(StateStreamError):
            here.rank.follow(here.told(step, dict.fromkeys(LAYERS, servers[0])))
        position = here.rank.position()
        assert (position.step, position.holds, position.weights, position.vector_sha256) == (
            step,
            (),
            kept,
            None,
        )
    assert same(here.rank._holdings.salvaged[3], late[3], Part.WEIGHTS)
    assert not same(early[3], late[3], Part.WEIGHTS)


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
