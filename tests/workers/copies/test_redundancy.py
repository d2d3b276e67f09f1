"""What owners send to standbys: gradients, buffers and statistics, unchanged, and absent where absent."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import DEVICE, job, small_config
from rank_group import with_standbys
from torch import Tensor

from benchmarks.parts.rank_threads import LocalChannel, run_threads
from planner.shards import Piece
from workers.commit.commit import CommitDecision
from workers.config import FreezeConfig
from workers.copies import fetch_in_rounds
from workers.copies.redundancy import Packing
from workers.copies.standby import Base, Standbys
from workers.elastic import standby_watch
from workers.elastic.followed import Followed
from workers.elastic.modules_ahead import ModulesAhead
from workers.elastic.standby_watch import StandbyWatch
from workers.freezing.plans import FreezePlans, FreezeSettings
from workers.launch.ranks import assignment
from workers.layers.layer import Layer
from workers.protocol.errors import StateStreamError
from workers.protocol.orders import StateSource
from workers.protocol.reports import StandbyReport, WarningReport
from workers.rank import Rank
from workers.state.layer_state import LayerState
from workers.state_stream.following import Followers, Parcels, States, Subscription
from workers.state_stream.stream import StateServer
from workers.step.engine import Engine, Window
from workers.transport.channel import MessageStream

DECISION = CommitDecision(
    step=1, loss=1.0, grad_norm=1.0, scale=0.5, lr=0.01, skipped=False, requests=frozenset(), busy_s=0.0
)


@pytest.fixture(params=["float32", "bfloat16"])
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Rank:
    freeze = FreezeConfig(method="apf", warm_up=0, check_every=1)
    config = small_config(tmp_path, "batchnorm", freeze=freeze, precision=request.param)
    made = Rank(config, 0, lambda report: None)
    made.setup()
    made.follow(assignment(job(config), 0))
    return made


def pieces(*layers: int) -> list[Piece]:
    return [Piece(layer) for layer in layers]


def base(rank: Rank, layer: int) -> tuple[Layer, LayerState]:
    assert rank._source is not None
    return rank._source.build([layer], 0)[layer]


def settings(rank: Rank) -> FreezeSettings:
    return FreezeSettings(rank._config.freeze, FreezePlans())


def drawn(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}


def test_a_parcel_brings_all_of_a_step(rank: Rank) -> None:
    _, state = base(rank, 3)
    gradients = drawn(state.weights)
    del gradients["norm.bias"]
    buffers = {**drawn(state.buffers), "norm.num_batches_tracked": torch.tensor(41, device=DEVICE)}
    energies = [0.1 * number for number in range(len(state.freezing["energy"]))]
    packing = Packing(state)
    raw = packing.pack(gradients, buffers, energies)
    assert raw.dtype == torch.uint8
    assert packing.pack({}, buffers, energies).shape == raw.shape
    parcel = Packing(base(rank, 3)[1]).unpack(raw)
    assert parcel.gradients.keys() == gradients.keys()
    assert all(parcel.gradients[name].equal(gradients[name]) for name in gradients)
    assert all(parcel.buffers[name].equal(buffers[name]) for name in buffers)
    assert parcel.energies is not None
    assert parcel.energies.tolist() == energies
    gradients["norm.weight"].zero_()
    assert not parcel.gradients["norm.weight"].equal(gradients["norm.weight"])


def test_the_memory_of_the_gradients_is_the_parcel(rank: Rank) -> None:
    layer, state = base(rank, 3)
    packing = Packing(state)
    layer.summed.make_room(packing.bytes)
    energies = [0.1 * number for number in range(len(state.freezing["energy"]))]
    for step, absent in enumerate(("norm.bias", "norm.weight", "")):
        for name, gradient in drawn(state.weights).items():
            layer.module.get_parameter(name).grad = None if name == absent else gradient
        gradients = layer.gradients()
        said = energies if step == 0 else []
        raw = packing.pack_in_place(gradients, state.buffers, said)
        assert raw.data_ptr() == gradients.buffers[0].data_ptr()
        assert raw.equal(packing.pack(gradients, state.buffers, said))
        layer.summed.drop()


def test_what_followers_get_is_no_memory_in_which_the_next_step_forms(rank: Rank) -> None:
    layer, state = base(rank, 3)
    followers = Followers()
    follower = followers.open(Subscription(layers=(3,), generation=0))
    follower.begin(States(step=0, states=()))
    assert isinstance(follower.next(0.0), States)
    packing = Packing(state)
    layer.summed.make_room(packing.bytes)
    layer.module.get_parameter("norm.bias").grad = torch.ones_like(state.weights["norm.bias"])
    sent = packing.pack_in_place(layer.gradients(), state.buffers, ())
    Followed(followers, {3: (layer, state)}, set()).send(1, {3: sent}, {})
    expected = sent.clone()
    sent.zero_()
    coming = follower.next(0.0)
    assert isinstance(coming, Parcels)
    assert coming.of_layers[3].equal(expected.cpu())


def test_gradients_without_room_are_copied_into_a_parcel(rank: Rank) -> None:
    layer, state = base(rank, 3)
    packing = Packing(state)
    for gradients in (layer.summed.zeros(), layer.gradients()):
        raw = packing.pack_in_place(gradients, state.buffers, ())
        assert raw.equal(packing.pack({}, state.buffers, ()))
        assert raw.data_ptr() not in [buffer.data_ptr() for buffer in gradients.buffers]


def parcel_of(rank: Rank, layer: int) -> Tensor:
    _, state = base(rank, layer)
    return Packing(state).pack(drawn(state.weights), state.buffers, state.freezing["energy"].tolist())


def test_updates_wait_for_a_base_and_are_then_made_up_for(rank: Rank) -> None:
    come = threading.Event()
    here = Standbys(
        pieces(0, 3),
        {Piece(0): base(rank, 0)},
        freeze=settings(rank),
        optimizer=rank._equipment.optimizer,
        step=0,
    )

    def bring(piece: Piece, stopped: threading.Event) -> Base:
        assert come.wait(10)
        return base(rank, piece.layer)

    here.bring(bring)
    parcels = {Piece(layer): parcel_of(rank, layer) for layer in (0, 3)}
    here.apply(1, parcels, DECISION)
    assert here.up_to_date <= {Piece(0)}
    assert not here.current
    come.set()
    here.catch_up(10)
    assert here.current
    here.rest()
    at_once = Standbys(
        pieces(0, 3),
        {Piece(i): base(rank, i) for i in (0, 3)},
        freeze=settings(rank),
        optimizer=rank._equipment.optimizer,
        step=0,
    )
    at_once.rest()
    at_once.apply(1, parcels, DECISION)
    for layer, (_, state) in here.held().items():
        same = at_once.held()[layer][1]
        assert state.updates == same.updates
        assert set(state.updates.values()) == {1}
        assert all(weight.equal(same.weights[name]) for name, weight in state.weights.items())
        assert all(value.equal(same.freezing[key]) for key, value in state.freezing.items())


def test_a_copy_that_cannot_be_updated_counts_for_nothing_and_hurts_nobody(rank: Rank) -> None:
    here = Standbys(
        pieces(3),
        {Piece(3): base(rank, 3)},
        freeze=settings(rank),
        optimizer=rank._equipment.optimizer,
        step=0,
    )
    assert here.current
    for step in range(1, 10):
        here.apply(step, {Piece(3): torch.zeros(1, dtype=torch.uint8)}, DECISION)
    here.rest()
    assert here.failure is not None
    assert "layers [3]" in here.failure
    assert here.held() == {}
    assert not here.current


def test_a_base_that_does_not_come_at_first_is_asked_for_again(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_in_rounds, "ASK_AGAIN_S", (0.0, 0.0))
    here = Standbys(pieces(0, 3), {}, freeze=settings(rank), optimizer=rank._equipment.optimizer, step=0)
    asked: list[int] = []

    def bring(piece: Piece, stopped: threading.Event) -> Base:
        asked.append(piece.layer)
        if piece.layer == 0 and asked.count(0) < 3:
            raise OSError("its owner is busy")
        return base(rank, piece.layer)

    here.bring(bring)
    here.catch_up(10)
    assert here.current
    assert here.failure is None
    assert asked == [0, 3, 0, 0]
    here.rest()


def test_updates_of_a_copy_whose_base_cannot_come_are_not_kept(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_in_rounds, "ASK_AGAIN_S", (0.0,))
    here = Standbys(pieces(0, 3, 5), {}, freeze=settings(rank), optimizer=rank._equipment.optimizer, step=0)
    asked = threading.Event()

    def bring(piece: Piece, stopped: threading.Event) -> Base:
        if piece.layer == 0:
            return base(rank, piece.layer)
        assert asked.wait(10)
        raise OSError("its owner is not to be reached")

    here.bring(bring)
    parcels = {Piece(layer): parcel_of(rank, layer) for layer in (0, 3, 5)}
    here.apply(1, parcels, DECISION)
    asked.set()
    here.catch_up(10)
    while not here.bases_done:
        time.sleep(0.001)
    here.apply(2, parcels, DECISION)
    here.rest()
    assert here.failure is not None
    assert "layers [3, 5] stay without a copy" in here.failure
    assert here.backlog_bytes == 0
    assert here.held().keys() == {Piece(0)}


@pytest.mark.parametrize("kept", [(0, 3), ()])
@pytest.mark.parametrize("fails", [False, True])
def test_copies_are_told_of_at_once_and_builds_when_they_are_there(
    rank: Rank, kept: tuple[int, ...], fails: bool
) -> None:
    bases = {Piece(layer): base(rank, layer) for layer in kept}
    here = Standbys([*bases], bases, freeze=settings(rank), optimizer=rank._equipment.optimizer, step=0)
    go_on = threading.Event()

    def build(piece: Piece) -> int:
        assert go_on.wait(10)
        if fails:
            raise MemoryError("no room")
        return piece.layer

    coming = ModulesAhead(build, lambda why: None)
    coming.ready({Piece(5)})
    watch = StandbyWatch(here, rank=7, place=1, coming=coming)
    told = [report for step in (1, 2) for report in watch.news(step)]
    go_on.set()
    while not coming.done:
        time.sleep(0.001)
    told += [report for step in (3, 4) for report in watch.news(step)]
    reports = [report for report in told if isinstance(report, StandbyReport)]
    of_copies = [(1, kept, False)] if kept else []
    assert [(one.step, one.layers, one.built) for one in reports] == [*of_copies, (3, (), True)]
    assert told == reports
    # Where both are there, one report says so.
    both = StandbyWatch(here, rank=7, place=1, coming=coming)
    (one,) = [report for step in (5, 6) for report in both.news(step)]
    assert isinstance(one, StandbyReport)
    assert (one.layers, one.built) == (kept, True)
    here.rest()


def test_training_waits_for_copies_that_fall_behind_for_a_bounded_time(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels = {Piece(layer): parcel_of(rank, layer) for layer in (0, 3)}
    bytes_per_commit = sum(parcel.nbytes for parcel in parcels.values())
    monkeypatch.setattr(standby_watch, "MOST_BEHIND_BYTES", 2 * bytes_per_commit)
    monkeypatch.setattr(standby_watch, "MOST_STOP_S", 0.05)
    come = threading.Event()
    here = Standbys(pieces(0, 3), {}, freeze=settings(rank), optimizer=rank._equipment.optimizer, step=0)

    def bring(piece: Piece, stopped: threading.Event) -> Base:
        assert come.wait(10)
        return base(rank, piece.layer)

    here.bring(bring)
    watch = StandbyWatch(here, rank=7, place=1)
    said = []
    for step in range(1, 6):
        here.apply(step, parcels, DECISION)
        while here.backlog_bytes < step * bytes_per_commit:
            time.sleep(0.001)
        said.append(watch.let_come(step + 1))
    # It warns at the second commit, then only once the backlog has doubled.
    assert [report is not None for report in said] == [False, True, False, True, False]
    assert isinstance(said[1], WarningReport)
    (waited_s,) = re.findall(r"at place 1: step 3 waited ([\d.]+) s for them", said[1].text)
    assert float(waited_s) >= 0.05
    assert said[1].text.endswith("layers [0, 3] are still to come")
    assert watch.news(6) == []
    come.set()
    here.catch_up(10)
    (told,) = watch.news(6)
    assert isinstance(told, StandbyReport)
    assert (told.step, told.rank, told.layers) == (6, 1, (0, 3))
    assert watch.news(7) == []
    here.rest()


def test_who_waits_for_layers_of_others_can_leave(tmp_path: Path) -> None:
    config, secret = small_config(tmp_path), b"a secret of the tests"
    server = StateServer(secret, "127.0.0.1", busy=lambda: False)
    rank = Rank(config, 0, lambda report: None, secret=secret)
    over = threading.Event()

    def leave() -> None:
        while not over.wait(0.1):
            rank.leave()

    leaving = threading.Thread(target=leave)
    try:
        rank.setup()
        first = assignment(job(config), 0)
        sources = [StateSource(layer=i, rank=1, host="127.0.0.1", port=server.port) for i in range(8)]
        leaving.start()
        with pytest.raises(StateStreamError, match="this end was closed"):
            rank.follow(replace(first, step=3, sources=tuple(sources)))
    finally:
        over.set()
        leaving.join()
        rank.close()
        server.close()


def test_who_asks_others_for_kept_activations_can_leave(tmp_path: Path) -> None:
    rank = Rank(small_config(tmp_path), 0, lambda report: None, secret=b"a secret of the tests")
    try:
        rank.setup()
        kept = rank._equipment.kept
        kept.ask([("127.0.0.1", 1)])
        assert kept._elsewhere is not None
        rank.leave()
        assert kept._elsewhere._stopped.is_set()
    finally:
        rank.close()


def test_a_copy_that_was_given_up_is_not_asked_for_again(rank: Rank) -> None:
    here = Standbys(
        pieces(1, 2),
        {Piece(1): base(rank, 1)},
        freeze=settings(rank),
        optimizer=rank._equipment.optimizer,
        step=0,
        given_up=pieces(2),
    )
    assert (here.lacking, here.given_up, here.bases_done) == ((), (Piece(2),), True)
    here.bring(lambda piece, stopped: pytest.fail(f"{piece} was asked for"))
    here.rest()
    assert here.held().keys() == {Piece(1)}


@pytest.mark.parametrize(
    ("schedule", "early"), [("1f1b", {0: [3, 2, 1, 0]}), ("zb-h1", {0: [3, 2, 1, 0], 1: [7, 6, 5, 4]})]
)
def test_gradients_leave_while_the_window_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, early: dict[int, list[int]]
) -> None:
    in_window = threading.local()
    left: dict[tuple[int, bool], list[int]] = {}
    run, send = Engine.run, LocalChannel.send

    def spied_run(self: Engine, *args: Any, **kwargs: Any) -> Window:
        in_window.now = True
        try:
            return run(self, *args, **kwargs)
        finally:
            in_window.now = False

    def spied_send(self: LocalChannel, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        if named := re.fullmatch(r"standby of layer (\d+)", stream.name):
            left.setdefault((self.rank, in_window.now), []).append(int(named[1]))
        send(self, stream, tensors)

    monkeypatch.setattr(Engine, "run", spied_run)
    monkeypatch.setattr(LocalChannel, "send", spied_send)
    two = job(small_config(tmp_path, steps=3), ranks=2, schedule=schedule)
    expected = run_threads(two).state_sha256
    assert not left
    assert run_threads(replace(two, plan=with_standbys(two))).state_sha256 == expected
    owned = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    for rank, layers in owned.items():
        # Not in the first step, whose receivers do not know yet what comes.
        late = 1 if rank in early else 3
        assert left.get((rank, True), []) == early.get(rank, []) * 2
        assert left.get((rank, False), []) == layers * late
