"""Copies in host memory: the owner's bits at every phase of a refresh, and what happens where memory is short."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import DEVICE, job
from rank_group import RankGroup, drilled, quiet_sha256, state_sha256, with_standbys
from test_migration import ENDLESS, follow, moving
from test_redundancy import DECISION, base, drawn, settings
from test_redundancy import rank as rank
from test_standby import configured
from torch import Tensor

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.shards import Piece
from planner.simulation.standby_memory import log_bytes
from workers.config import ElasticConfig, WorkerConfig
from workers.copies import fetch_in_rounds, host_copies, updates
from workers.copies.host_copies import HostCopy, HostForm
from workers.copies.redundancy import Packing
from workers.copies.standby import Base, Standbys
from workers.copies.updates import Update, Updates
from workers.elastic.layer_source import base_of
from workers.elastic.standby_watch import StandbyWatch
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.processes import Died
from workers.process.host_memory import LEAST_FREE_BYTES
from workers.process.pinned_memory import SideStream
from workers.protocol.errors import JobError
from workers.protocol.reports import StandbyReport, StepReport, SwitchReport, WarningReport
from workers.rank import Rank
from workers.state.layer_state import LayerState, bytes_of

COMMITS = 4
EVERY = 3


def on_host(rank: Rank, layer: int) -> Base:
    assert rank._source is not None
    return base_of(rank._source.build([layer], 0, on_host=True)[layer], on_host=True)


def commit(rank: Rank, layer: int, step: int) -> Update:
    """A commit with gradients of its own; the second one is skipped."""
    _, state = base(rank, layer)
    gradients = drawn(state.weights)
    if step == 3:
        gradients.popitem()
    energies = [0.1 * step * number for number in range(len(state.updates))]
    parcel = Packing(state).pack(gradients, drawn(state.buffers), energies).cpu()
    return Update(step, parcel, replace(DECISION, step=step, scale=1 / step, skipped=step == 2))


def owner_after(rank: Rank, layer: int, commits: list[Update]) -> LayerState:
    """The layer of the rank that owns it."""
    _, state = base(rank, layer)
    following = Updates(state, settings(rank), rank._equipment.optimizer, 0)
    for each in commits:
        following.apply(each)
    return state


def tensors(state: LayerState) -> dict[str, Tensor]:
    slots = {f"{name}.{slot}": t for name, of_one in state.slots.items() for slot, t in of_one.items()}
    casts = {f"cast {number}": flat.cast for number, flat in enumerate(state.flats) if flat.cast is not None}
    return {**state.weights, **{f"buffer {k}": t for k, t in state.buffers.items()}, **slots, **casts} | {
        f"statistic {key}": t for key, t in state.freezing.items()
    }


def assert_same(one: LayerState, other: LayerState) -> None:
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    assert [key for key, t in mine.items() if not torch.equal(t.cpu(), theirs[key].cpu())] == []
    assert one.updates == other.updates


def host_copy_of(rank: Rank, layer: int, check_room: Callable[[int, str], None] | None = None) -> HostCopy:
    return HostCopy(
        on_host(rank, layer)[1],
        0,
        device=DEVICE,
        stream=SideStream(DEVICE),
        freeze=settings(rank),
        optimizer=rank._equipment.optimizer,
        check_room=check_room or (lambda needed_bytes, what: None),
    )


def stops_at(phase: int) -> Callable[[], bool]:
    """Answers yes when it is asked for the `phase`-th time, from 0."""
    left = iter([False] * phase)
    return lambda: next(left, True)


def phases_of(copy: HostCopy) -> int:
    """How often a refresh of another copy like `copy` asks whether to stop."""
    asked: list[int] = []
    twin = deepcopy_of(copy)
    assert twin.refresh(lambda: bool(asked.append(1)))
    return len(asked)


def deepcopy_of(copy: HostCopy) -> HostCopy:
    twin = HostCopy(
        copy._base,
        copy._step,
        device=DEVICE,
        stream=copy._stream,
        freeze=copy.freeze,
        optimizer=copy._optimizer,
        check_room=copy._check_room,
    )
    for each in copy._log:
        twin.apply(each)
    return twin


@pytest.mark.parametrize("method", ["apf", "none", "timelyfreeze"])
def test_base_and_log_have_the_owners_bits_at_every_phase_of_a_refresh(
    rank: Rank, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing looks at whole layers, they are refreshed part by part: here parameters are in several parts."""
    freeze = rank._config.freeze.model_copy(update={"method": method})
    rank._config = rank._config.model_copy(update={"freeze": freeze})
    assert rank._source is not None
    rank._source.begin(settings(rank))
    monkeypatch.setattr(updates, "PART", 64)
    assert max(flat.layout.size for flat in base(rank, 3)[1].flats) > 2 * 64
    commits = [commit(rank, 3, step) for step in range(1, COMMITS + 1)]
    copy = host_copy_of(rank, 3)
    for each in commits[:-1]:
        copy.apply(each)
    phases = phases_of(copy)
    assert phases == COMMITS if method == "apf" else phases > 2 * COMMITS
    for phase in range(phases):
        assert not copy.refresh(stops_at(phase))
        assert copy.commits == COMMITS - 1
        _, live = base(rank, 3)
        copy.load_into(live)
        assert_same(live, owner_after(rank, 3, commits[:-1]))
    first = copy.newest()
    assert copy.commits == 0
    _, live = base(rank, 3)
    copy.load_into(live)
    assert_same(live, owner_after(rank, 3, commits[:-1]))
    copy.apply(commits[-1])
    _, live = base(rank, 3)
    copy.load_into(live)
    owner = owner_after(rank, 3, commits)
    assert_same(live, owner)
    # What is served meanwhile stays as it is.
    assert all(
        weight.cpu().equal(live.weights[name].cpu()) is False for name, weight in first.weights.items()
    )
    served = copy.newest()
    assert all(tensor.device.type == "cpu" for tensor in tensors(served).values())
    assert all(weight.equal(owner.weights[name].detach().cpu()) for name, weight in served.weights.items())


def test_a_refresh_that_fails_leaves_base_and_log(rank: Rank) -> None:
    copy = host_copy_of(rank, 3)
    good = commit(rank, 3, 1)
    copy.apply(good)
    copy.apply(replace(good, step=2, parcel=good.parcel[:1]))
    with pytest.raises(RuntimeError):
        copy.refresh()
    copy._log.pop()
    _, live = base(rank, 3)
    copy.load_into(live)
    assert_same(live, owner_after(rank, 3, [good]))


def test_the_newest_state_is_made_only_where_the_host_has_room(rank: Rank) -> None:
    host = Host(rank, free_bytes=LEAST_FREE_BYTES)
    copy, good = host_copy_of(rank, 3, host.form.check_room), commit(rank, 3, 1)
    # Without commits it is there.
    assert copy.newest() is copy._base
    copy.apply(good)
    base_bytes = bytes_of(copy._base)
    with pytest.raises(MemoryError) as refused:
        copy.newest()
    assert str(refused.value).startswith(
        f"another base of layer 3 takes {base_bytes:,} bytes, and the host has"
    )
    assert (copy.commits, copy.refused) == (1, 1)
    _, live = base(rank, 3)
    copy.load_into(live)
    assert_same(live, owner_after(rank, 3, [good]))
    host.free_bytes = LEAST_FREE_BYTES + base_bytes
    made = copy.newest()
    assert (copy.commits, copy.refused) == (0, 0)
    assert all(weight.equal(live.weights[name].detach().cpu()) for name, weight in made.weights.items())


class Host:
    """Host memory of which tests say how much is left."""

    def __init__(self, rank: Rank, free_bytes: int = 2**40) -> None:
        self.free_bytes = free_bytes
        source = rank._source
        assert source is not None
        self.form = HostForm(
            device=DEVICE, every=EVERY, build=source.build_copy, free_bytes=lambda: self.free_bytes
        )


@pytest.mark.parametrize("asked_for", [True, False])
def test_copies_made_at_once_ask_for_room_one_by_one(rank: Rank, asked_for: bool) -> None:
    """For others, and in its turn: there is room for one more base, and the second comes as the first has asked."""
    host = Host(rank)

    def asks(needed_bytes: int, what: str) -> None:
        host.form.check_room(needed_bytes, what)
        other.start()
        other.join(0.2)

    first, second = host_copy_of(rank, 3, asks), host_copy_of(rank, 3, host.form.check_room)
    for copy in (first, second):
        copy.apply(commit(rank, 3, 1))

    def make() -> None:
        if not asked_for:
            assert host.form.keep_short(EVERY, {Piece(3): second}, lambda: False) == {}
            return
        with suppress(MemoryError):
            second.newest()

    other = threading.Thread(target=make)
    left_bytes = LEAST_FREE_BYTES + first.next_bytes
    host.form.free_bytes = lambda: left_bytes + (first.base_bytes if first.commits and second.commits else 0)
    first.newest()
    other.join()
    assert (first.commits, second.commits) == (0, 1)
    assert second.refused == asked_for


def test_who_asks_for_a_copy_while_it_is_made_needs_no_other_room(rank: Rank) -> None:
    host, got = Host(rank), list[LayerState]()

    def asks(needed_bytes: int, what: str) -> None:
        host.form.check_room(needed_bytes, what)
        host.free_bytes = LEAST_FREE_BYTES
        other.start()
        other.join(0.2)

    copy = host_copy_of(rank, 3, asks)
    copy.apply(commit(rank, 3, 1))
    other = threading.Thread(target=lambda: got.append(copy.newest()))
    made = copy.newest()
    other.join()
    assert [state is made for state in got] == [True]
    assert (copy.commits, copy.refused) == (0, 0)


def test_a_rank_gives_up_a_copy_that_has_found_no_room_twice_and_says_so(rank: Rank, tmp_path: Path) -> None:
    host, told = Host(rank, free_bytes=LEAST_FREE_BYTES), list[Any]()
    copy = host_copy_of(rank, 3, host.form.check_room)
    copy.apply(commit(rank, 3, 1))
    rank._report, rank._commit.step = told.append, 1
    rank._holdings.layers, rank._holdings._on_host = {}, {Piece(3): copy}
    for end in ("tried once more", "given up"):
        assert rank.position().holds == (Piece(3),)
        with pytest.raises(JobError, match=r"rank 0 could not write to .*: another base of layer 3 takes"):
            rank.save(str(tmp_path), 1, [3])
        assert told[-1].text.startswith(
            "the copy of layer 3 in host memory cannot be brought up to date: another"
        )
        # Another rank asks in the same try.
        with pytest.raises(MemoryError):
            rank._holdings.newest(copy)
        assert [warned.text.endswith(f"it is {end}") for warned in told[-2:]] == [True, True]
    assert rank.position().holds == ()


class Noted(deque[Any]):
    """A log that notes the first look into it."""

    def __init__(self, log: Iterable[Any]) -> None:
        super().__init__(log)
        self.seen = threading.Event()

    def __len__(self) -> int:
        self.seen.set()
        return super().__len__()


def test_a_request_of_an_earlier_try_that_still_waits_counts_there(rank: Rank) -> None:
    copy = host_copy_of(rank, 3, Host(rank, free_bytes=LEAST_FREE_BYTES).form.check_room)
    copy.apply(commit(rank, 3, 1))

    def refused() -> None:
        with pytest.raises(MemoryError):
            copy.newest()

    refused()
    with host_copies._making:
        copy._log = log = Noted(copy._log)
        late = threading.Thread(target=refused)
        late.start()
        assert log.seen.wait(10)
        copy.begin_try()
    late.join()
    assert copy.refused == 1
    refused()
    assert copy.refused == 2


def test_a_refresh_that_waits_for_its_turn_can_be_stopped(rank: Rank) -> None:
    host = Host(rank, free_bytes=2**40)
    copy = host_copy_of(rank, 3, host.form.check_room)
    copy.apply(commit(rank, 3, 1))
    with host_copies._making:
        assert host.form._refresh(copy, lambda: True) is None
    assert (copy.commits, copy._step) == (1, 0)
    assert host.form._refresh(copy, lambda: False) is None
    assert copy.commits == 0


def copies(rank: Rank, host: Host, layers: list[int]) -> Standbys:
    return Standbys(
        [Piece(layer) for layer in layers],
        {Piece(layer): on_host(rank, layer) for layer in layers},
        freeze=settings(rank),
        optimizer=rank._equipment.optimizer,
        step=0,
        host=host.form,
    )


def train(here: Standbys, commits: Mapping[int, list[Update]], steps: range) -> None:
    """Apply the commits of these steps, each once the one before is done."""
    for step in steps:
        parcels = {Piece(layer): of_layer[step - 1].parcel for layer, of_layer in commits.items()}
        here.apply(step, parcels, next(iter(commits.values()))[step - 1].decision)
        finish(here)


def finish(here: Standbys) -> None:
    """Wait until everything told to its thread is done."""
    done: list[int] = []
    here._tasks.put(lambda: done.append(1))
    while not done:
        time.sleep(0.001)


def commits_of(rank: Rank, layers: list[int], steps: int = 9) -> dict[int, list[Update]]:
    return {layer: [commit(rank, layer, step) for step in range(1, steps + 1)] for layer in layers}


def logs(here: Standbys) -> list[int]:
    return [copy.kept.commits for copy in here._copies.values() if isinstance(copy.kept, HostCopy)]


def test_copies_are_refreshed_in_turn_and_take_nothing_of_the_device(rank: Rank) -> None:
    host, layers = Host(rank), [1, 3, 5]
    commits = commits_of(rank, layers)
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    here = copies(rank, host, layers)
    seen: list[list[int]] = []
    for step in range(1, 10):
        train(here, commits, range(step, step + 1))
        seen.append(logs(here))
    # What the planner says: before the refresh of a step, each log is longer by one, and one of them full.
    assert max(sum(each) + 1 for each in seen) + EVERY - 1 == log_bytes([1] * len(layers), EVERY)
    assert all(max(each) < EVERY for each in seen)
    # One in each step.
    assert {sum(each) for each in seen[2:]} == {0 + 1 + 2}
    assert (here.states(), here.live, here.up_to_date) == ([], frozenset(), frozenset(here.pieces))
    if DEVICE.type == "cuda":
        assert torch.cuda.memory_allocated() <= before
    here.rest()
    assert here.held() == {}
    for piece, copy in here.held_on_host().items():
        _, live = base(rank, piece.layer)
        copy.load_into(live)
        assert_same(live, owner_after(rank, piece.layer, commits[piece.layer]))


def test_a_copy_that_is_to_own_its_layer_comes_to_the_device_while_training_goes_on(rank: Rank) -> None:
    host, layers = Host(rank), [1, 3]
    commits = commits_of(rank, layers)
    here = copies(rank, host, layers)
    train(here, commits, range(1, 3))
    here.raise_to_device([Piece(3)])
    for step in range(3, 9):
        train(here, commits, range(step, step + 1))
    while here.live != {Piece(3)}:
        time.sleep(0.001)
    train(here, commits, range(9, 10))
    here.rest()
    assert (here.held().keys(), here.held_on_host().keys()) == ({Piece(3)}, {Piece(1)})
    layer, state = here.held()[Piece(3)]
    assert layer is not None
    assert_same(state, owner_after(rank, 3, commits[3]))


@pytest.mark.parametrize("there", [True, False])
def test_a_copy_that_is_not_to_own_its_layer_after_all_leaves_the_device(rank: Rank, there: bool) -> None:
    """It is on the device already, or about to come there."""
    host, go_on = Host(rank), threading.Event()
    build = host.form.build

    def held_up(piece: Piece, step: int) -> Base:
        assert go_on.wait(10)
        return build(piece, step)

    host.form = replace(host.form, build=held_up)
    commits = commits_of(rank, [1, 3])
    here = copies(rank, host, [1, 3])
    train(here, commits, range(1, 3))
    here.raise_to_device([Piece(3)])
    if there:
        go_on.set()
        while here.live != {Piece(3)}:
            time.sleep(0.001)
        train(here, commits, range(3, 4))
    here.raise_to_device([])
    here.raise_to_device([])
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "standby-raising":
            thread.join(10)
    train(here, commits, range(4 if there else 3, 6))
    assert (here.live, here.states(), here.failure) == (frozenset(), [], None)
    # Once more: it is wanted again.
    here.raise_to_device([Piece(3)])
    while here.live != {Piece(3)}:
        time.sleep(0.001)
    train(here, commits, range(6, 8))
    here.rest()
    assert (here.held().keys(), here.held_on_host().keys()) == ({Piece(3)}, {Piece(1)})
    assert_same(here.held()[Piece(3)][1], owner_after(rank, 3, commits[3][:7]))


def test_a_layer_that_was_owned_goes_to_host_memory_while_training_goes_on(rank: Rank) -> None:
    commits = commits_of(rank, [3])
    here = Standbys(
        [Piece(3)],
        {Piece(3): base(rank, 3)},
        freeze=settings(rank),
        optimizer=rank._equipment.optimizer,
        step=0,
        host=Host(rank).form,
    )
    assert here.live == {Piece(3)}
    train(here, commits, range(1, 10))
    here.rest()
    (copy,) = here.held_on_host().values()
    _, live = base(rank, 3)
    copy.load_into(live)
    assert_same(live, owner_after(rank, 3, commits[3]))


def test_a_layer_that_is_to_be_owned_again_stays_on_the_device(rank: Rank) -> None:
    """A plan that gives it back may be ready before the first commit of the plan that took it."""
    commits = commits_of(rank, [1, 3])
    here = Standbys(
        [Piece(1), Piece(3)],
        {Piece(1): base(rank, 1), Piece(3): base(rank, 3)},
        freeze=settings(rank),
        optimizer=rank._equipment.optimizer,
        step=0,
        host=Host(rank).form,
    )
    here.raise_to_device([Piece(3)])
    train(here, commits, range(1, 4))
    assert here.live == {Piece(3)}
    here.rest()
    assert (here.held().keys(), here.held_on_host().keys()) == ({Piece(3)}, {Piece(1)})
    assert_same(here.held()[Piece(3)][1], owner_after(rank, 3, commits[3][:3]))


def test_short_memory_shortens_the_logs_first(rank: Rank) -> None:
    layers = [1, 2, 3, 4, 5, 6]
    host, commits = Host(rank), commits_of(rank, layers)
    here = copies(rank, host, layers)
    watch = StandbyWatch(here, rank=7, place=2)
    kept = [copy.kept for copy in here._copies.values() if isinstance(copy.kept, HostCopy)]
    bases_bytes = sum(copy.base_bytes for copy in kept)
    next_bytes = sum(of_layer[0].parcel.nbytes for of_layer in commits.values())
    # Room for three commits of all layers, the next one, and another base; and no copy's turn comes.
    base_bytes = max(copy.base_bytes for copy in kept)
    room_bytes = LEAST_FREE_BYTES + bases_bytes + 4 * next_bytes + base_bytes
    host.form = replace(
        host.form,
        every=100,
        free_bytes=lambda: room_bytes - sum(copy.base_bytes + copy.log_bytes for copy in kept),
    )
    here.host = host.form
    most: list[int] = []
    for step in range(1, 10):
        train(here, commits, range(step, step + 1))
        most.append(sum(copy.log_bytes for copy in kept))
    assert (here.given_up, here.failure) == ((), None)
    assert most[:3] == [next_bytes, 2 * next_bytes, 3 * next_bytes]
    assert max(most[3:]) <= 3 * next_bytes
    assert [type(report) for report in watch.news(9)] == [StandbyReport]
    here.rest()
    for piece, copy in here.held_on_host().items():
        _, live = base(rank, piece.layer)
        copy.load_into(live)
        assert_same(live, owner_after(rank, piece.layer, commits[piece.layer]))


def test_copies_that_find_no_memory_are_given_up_and_the_log_says_so(rank: Rank) -> None:
    host, layers = Host(rank), [1, 3]
    commits = commits_of(rank, layers)
    here = copies(rank, host, layers)
    watch = StandbyWatch(here, rank=7, place=2)
    train(here, commits, range(1, 3))
    (told,) = watch.news(2)
    assert isinstance(told, StandbyReport)
    assert (told.layers, told.given_up) == ((1, 3), False)
    parcel_bytes = commits[1][0].parcel.nbytes
    copied_bytes = bytes_of(on_host(rank, 1)[1])
    # Once the larger copy is gone, there is room for the other.
    host.free_bytes = LEAST_FREE_BYTES + parcel_bytes - copied_bytes // 2
    train(here, commits, range(3, 4))
    (lost,) = here.given_up
    news = watch.news(3)
    warned = next(report for report in news if isinstance(report, WarningReport))
    assert f"no memory for the copies kept here of layers [{lost}]" in warned.text
    assert f"the host has {host.free_bytes:,} left" in warned.text
    assert "elastic.refresh_every" in warned.text
    report = next(report for report in news if isinstance(report, StandbyReport))
    assert (report.layers, report.given_up, report.rank, report.step) == ((lost.layer,), True, 2, 3)
    assert watch.news(4) == []
    host.free_bytes = 2**40
    train(here, commits, range(4, 8))
    here.rest()
    (piece,) = here.held_on_host()
    assert {piece, lost} == {Piece(1), Piece(3)}
    _, live = base(rank, piece.layer)
    here.held_on_host()[piece].load_into(live)
    assert_same(live, owner_after(rank, piece.layer, commits[piece.layer][:7]))


def test_a_host_with_too_little_memory_for_a_base_refuses_it_in_words(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_in_rounds, "ASK_AGAIN_S", (0.0,))
    host = Host(rank, free_bytes=LEAST_FREE_BYTES - 1)
    here = Standbys(
        [Piece(3)], {}, freeze=settings(rank), optimizer=rank._equipment.optimizer, step=0, host=host.form
    )
    asked: list[Piece] = []

    def bring(piece: Piece, stopped: object) -> Base:
        asked.append(piece)
        return on_host(rank, piece.layer)

    here.bring(bring)
    while not here.bases_done:
        time.sleep(0.001)
    train(here, commits_of(rank, [3]), range(1, 3))
    here.rest()
    assert asked == []
    assert here.failure is not None
    assert f"the host has {LEAST_FREE_BYTES - 1:,} left, of which {LEAST_FREE_BYTES:,} are" in here.failure
    assert (here.held_on_host(), here.held(), here.given_up) == ({}, {}, (Piece(3),))


def kept_on_host(config: WorkerConfig) -> WorkerConfig:
    elastic = ElasticConfig(allow_faults=True, copies_in="host", refresh_every=EVERY)
    return config.model_copy(update={"elastic": elastic})


@pytest.mark.parametrize(
    ("case", "step", "phase", "members"),
    [
        # From one refresh to the next and past it; rank 2 takes over what it copied, or a newcomer fetches it there.
        ("batchnorm", 4, FaultPhase.FORWARD, (0, 2)),
        ("timelyfreeze+apf", 5, FaultPhase.BEFORE_COMMIT, (0, 3, 2)),
        ("dropout", 6, FaultPhase.IN_COMMIT, (0, 2)),
        ("changed", 7, FaultPhase.AFTER_COMMIT, (0, 3, 2)),
    ],
)
def test_a_copy_in_host_memory_takes_over_with_the_same_bits(
    tmp_path: Path, case: str, step: int, phase: FaultPhase, members: tuple[int, ...]
) -> None:
    config, about = configured(tmp_path, case)
    config = kept_on_host(drilled(config))
    expected = run_threads(job(config, **about)).state_sha256
    three = job(config, ranks=3, schedule="zb-h1", **about)
    with RankGroup(config, 4) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=step, phase=phase))
        ended = group.train(three, range(3), plan=with_standbys(three))
        assert isinstance(ended[1], Died)
        assert (1, "kill", step, str(phase)) in group.fired
        reached, positions, sources = group.finish_commit()
        assert reached in ((step,) if phase is FaultPhase.AFTER_COMMIT else (step - 1, step))
        assert {piece.layer for p in positions.values() for piece in p.holds} == set(range(8))
        following = job(config, ranks=len(members), schedule="1f1b", **about)
        ended = group.train(following, members, plan=with_standbys(following), step=reached, sources=sources)
        assert state_sha256(ended) == expected
        assert sorted(group.steps()) == list(range(1, config.job.steps + 1))


def test_layers_move_and_what_their_owner_keeps_of_them_takes_over_again(tmp_path: Path) -> None:
    config, about = configured(tmp_path, "timelyfreeze+apf")
    config = changed(kept_on_host(drilled(config)), steps=ENDLESS)
    three = job(config, ranks=3, schedule="zb-h1", counts=(3, 3, 2), **about)
    copying, taking = moving(three, (1, 5, 2), with_standbys(three))
    assert taking.standbys[1] == taking.standbys[2] == (0,)
    with RankGroup(config, 3) as group:

        def move_and_kill() -> None:
            group.wait_for(lambda reports: any(isinstance(r, StepReport) for r in reports))
            follow(group, three, range(3), copying)
            up_to_date = group.protected(3)
            follow(group, three, range(3), taking)
            up_to_date()
            reached = max(group.steps())
            group.wait_for(lambda reports: max(group.steps()) > reached + 2 * EVERY)
            group.tell(1, "die")

        group.train(three, range(3), plan=with_standbys(three), meanwhile=move_and_kill)
        taken = {(switch.rank, switch.taken) for switch in group.of(SwitchReport) if switch.taken}
        assert taken == {(1, (1, 2))}
        step, positions, sources = group.finish_commit()
        assert {piece.layer for p in positions.values() for piece in p.holds} == set(range(8))
        two = job(config, ranks=2, schedule="1f1b", **about)
        ended = group.train(two, (0, 2), step=step, sources=sources, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config, **about), ended)
        assert group.of(WarningReport) == []


def test_ranks_whose_hosts_have_too_little_memory_train_on_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, about = configured(tmp_path, "batchnorm")
    config = kept_on_host(config)
    expected = run_threads(job(config, **about)).state_sha256
    two = job(config, ranks=2, schedule="1f1b", **about)
    two = replace(two, plan=with_standbys(two), secret=b"a secret of the tests")
    monkeypatch.setattr("workers.rank.free_host_bytes", lambda: LEAST_FREE_BYTES - 1)
    ended = run_threads(two)
    assert ended.state_sha256 == expected
    warned = [report for report in ended.reports if isinstance(report, WarningReport)]
    assert {report.rank for report in warned} == {0, 1}
    for report in warned:
        assert "no memory for the copies kept here of layers [" in report.text
        assert f"the host has {LEAST_FREE_BYTES - 1:,} left" in report.text
    assert [report for report in ended.reports if isinstance(report, StandbyReport)] == []
