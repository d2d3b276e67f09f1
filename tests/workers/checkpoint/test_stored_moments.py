"""Moments of frozen layers leave the memory of their owners, and no bit of the job changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job
from rank_group import SECRET, RankGroup, drilled, state_sha256, with_standbys
from saved_checkpoints import Layer, trained
from state_streams import bits
from test_checkpoint_agreement import Ranks
from test_frozen_layers import SHAPES, config_of, kept, run
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.parts.rank_threads import Hub, LocalChannel
from planner.rank_program import place_programs
from workers.checkpoint import moments
from workers.checkpoint.folder import checkpoint_folder, write_layer
from workers.checkpoint.kept_files import KeptFiles
from workers.config import CheckpointConfig, FreezeConfig, OptimizerConfig, WorkerConfig
from workers.copies.host_copies import HostCopy
from workers.copies.snapshots import Snapshots
from workers.copies.standby import LiveCopy
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.freezing.plans import FreezePlans, FreezeSettings
from workers.launch.ranks import LaunchedJob
from workers.process.host_memory import lies_in_memory
from workers.process.pinned_memory import SideStream
from workers.protocol.orders import Assignment, CommitOutcome, Generation, Request, StateSource
from workers.protocol.reports import Outcome, Parted, RankPosition, Report, StepReport
from workers.rank import Rank
from workers.state.layer_state import (
    LayerState,
    bytes_of,
    host_copy,
    load_,
    state_digest,
    with_moments,
)
from workers.state.optim import make_optimizer
from workers.state.stored_moments import MomentsLost, StoredMoments
from workers.state_stream.encoding import PartialState, chunks, header
from workers.step.training import TrainingLoop

SCHEDULE = ((2, 3), (7, 5), (11, 1), (13, 0))
"""Freezing, more of it, less, none."""
AWAY = {
    **dict.fromkeys((1, 2), 0),  # the first checkpoint with a frozen layer is of step 1
    **dict.fromkeys((5, 6), 3),
    **dict.fromkeys((9,), 5),
    **dict.fromkeys((10, 11), 1),
    **dict.fromkeys((12, 13), 0),
}
"""Step -> layers without moments after it, where that does not depend on how fast the writers are."""


def long_config(folder: Path, **changes: Any) -> WorkerConfig:
    return config_of(folder, steps=14, freeze=FreezeConfig(method="prefix", schedule=SCHEDULE), **changes)


class Watch:
    """What layers hold after each step, of all ranks of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away: dict[int, dict[int, set[bool]]] = {}
        """Step -> layer -> whether its owners are without its moments."""
        self.first: dict[int, list[StorageWeakRef]] = {}
        """Layer -> the moments as they were in the first step."""
        taken = TrainingLoop._step

        def step(loop: TrainingLoop) -> None:
            # The write of the checkpoint before has ended, however slow it was.
            if (write := loop._between.checkpointing._writer._write) is not None:
                write.exception()
            taken(loop)
            for layer, (_, state) in loop._setup.layers.items():
                slots = [flat.slots for flat in state.flats]
                if loop.step == 1:
                    self.first.setdefault(layer, []).extend(
                        StorageWeakRef(slot.untyped_storage()) for each in slots for slot in each.values()
                    )
                empty = not any(slots) and not any(state.slots.values())
                assert empty == (state.stored is not None)
                self.away.setdefault(loop.step, {}).setdefault(layer, set()).add(empty)

        monkeypatch.setattr(TrainingLoop, "_step", step)

    def layers_away(self, step: int) -> set[int]:
        return {layer for layer, found in self.away[step].items() if found == {True}}


@pytest.mark.parametrize(
    "shape", ["tied", "bfloat16", "replicas", "shards", pytest.param("plain", marks=pytest.mark.soak)]
)
def test_moments_leave_memory_and_come_back_with_the_same_bits(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = SHAPES.get(shape, {})
    expected = run(long_config(tmp_path / "whole", **fields, checkpoint=CheckpointConfig())).state_sha256
    watch = Watch(monkeypatch)
    ran = run(long_config(tmp_path / "kept", keep=1, **fields))
    assert ran.state_sha256 == expected
    if shape == "shards":
        assert not any(watch.layers_away(step) for step in watch.away)
        return
    tied = {0, 7} if shape == "tied" else set[int]()
    for step, layers in AWAY.items():
        assert watch.layers_away(step) == {*range(layers)} - tied, step
    assert kept(tmp_path / "kept") == {}, "nothing is frozen any more"
    # Those of the first three layers went for good: what came back is new.
    assert all(slot.expired() for layer in {0, 1, 2} - tied for slot in watch.first[layer])


class Group:
    """Ranks in threads of this process, which live through several generations."""

    def __init__(self, work: LaunchedJob, ranks: int) -> None:
        self.work, self.generation = work, 0
        self.reports: list[Report] = []
        self.regroup_after = 0
        self._threads = [ThreadPoolExecutor(1) for _ in range(ranks)]
        self.ranks = [
            Rank(work.config, number, lambda report: self._hear(report), secret=SECRET)
            for number in range(ranks)
        ]
        for number, rank in enumerate(self.ranks):
            self._threads[number].submit(rank.setup).result()

    def _hear(self, report: Report) -> None:
        self.reports.append(report)
        if isinstance(report, StepReport) and report.step == self.regroup_after:
            self.ranks[0].request(Request.REGROUP)

    def train(
        self, members: tuple[int, ...], step: int = 0, sources: tuple[StateSource, ...] = (), **fields: Any
    ) -> list[Outcome | Parted]:
        """Train one generation; only the first may regroup."""
        self.generation += 1
        self.regroup_after = self.regroup_after if self.generation == 1 else 0
        plan, hub = self.work.plan, Hub(len(members), timeout_s=120.0)
        programs = place_programs(plan, (self.work.schedule,))
        generation = Generation(
            number=self.generation, epoch=1, members=members, store_host="", store_port=0, timeout_s=120.0
        )

        def follow(place: int, rank: Rank) -> None:
            assignment = Assignment(
                place=place, plan=plan, program=programs[place], step=step, sources=sources, **fields
            )
            assert rank.follow(assignment) is None

        def train(place: int, rank: Rank) -> Outcome | Parted:
            rank.join(generation, LocalChannel(hub, place))
            return rank.train()

        places = [(place, self._threads[number], self.ranks[number]) for place, number in enumerate(members)]
        for following in [thread.submit(follow, place, rank) for place, thread, rank in places]:
            following.result()
        self.followed()
        training = [thread.submit(train, place, rank) for place, thread, rank in places]
        return [one.result() for one in training]

    def followed(self) -> None:
        """Called once all have taken up their layers."""

    def positions(self, numbers: tuple[int, ...]) -> dict[int, RankPosition]:
        found = {number: self.ranks[number].position() for number in numbers}
        for number, position in found.items():
            self.ranks[number].finish_commit(CommitOutcome(step=position.step, vector=None, reported=0))
        return found

    def states(self, numbers: tuple[int, ...]) -> dict[int, LayerState]:
        """The live states that these ranks own."""
        layers = (self.ranks[number]._holdings.layers for number in numbers)
        return {layer: state for one in layers for layer, (_, state) in one.items()}

    def close(self) -> None:
        for number, rank in enumerate(self.ranks):
            self._threads[number].submit(rank.close).result()
            self._threads[number].shutdown()


@contextmanager
def group(work: LaunchedJob, ranks: int) -> Iterator[Group]:
    made = Group(work, ranks)
    try:
        yield made
    finally:
        made.close()


def sources_of(positions: Mapping[int, RankPosition]) -> tuple[StateSource, ...]:
    return tuple(
        StateSource(layer=piece.layer, shard=piece.shard, rank=number, host=at.host, port=at.port)
        for number, at in positions.items()
        for piece in at.holds
    )


def sha256_of(outcomes: list[Outcome | Parted]) -> str:
    layers = {i: text for one in outcomes if isinstance(one, Outcome) for i, text in one.layer_digests}
    return state_digest([layers[i] for i in sorted(layers)])


def without_moments(states: Mapping[int, LayerState]) -> set[int]:
    return {layer for layer, state in states.items() if state.stored is not None}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of a job that keeps its moments."""
    return run(long_config(tmp_path_factory.mktemp("whole"), checkpoint=CheckpointConfig())).state_sha256


@pytest.mark.parametrize("lost", [False, True])
def test_a_frozen_layer_changes_ranks_without_its_moments(
    lost: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where its owner is lost, a copy of it goes on, which has them."""
    Watch(monkeypatch)
    work = job(long_config(tmp_path, keep=1), ranks=3, schedule="1f1b", counts=(2, 3, 3))
    work = replace(work, plan=with_standbys(work))
    with group(work, 4) as ranks:
        ranks.regroup_after = 5
        ended = ranks.train((0, 1, 2))
        (step,) = {one.step for one in ended}
        assert all(isinstance(one, Parted) for one in ended)
        assert without_moments(ranks.states((0, 1, 2))) == {0, 1, 2}
        left = (1, 2) if lost else (1, 2, 0)  # of several sources the last one counts
        sources = sources_of(ranks.positions(left))
        taken = list[set[int]]()
        monkeypatch.setattr(ranks, "followed", lambda: taken.append(without_moments(ranks.states((3, 1, 2)))))
        ended = ranks.train((3, 1, 2), step, sources)
        assert taken == [{2} if lost else {0, 1, 2}]
        assert sha256_of(ended) == expected


def test_a_snapshot_has_the_moments_once_their_file_may_go(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Watch(monkeypatch)
    work = job(long_config(tmp_path, keep=1), ranks=3, schedule="1f1b", counts=(2, 3, 3))
    others = tuple(((work.plan.owner_of(piece) + 1) % 3,) for piece in work.plan.pieces)
    work = replace(work, plan=replace(work.plan, snapshots=others, snapshot_every=8))
    with group(work, 3) as ranks:
        before = dict[int, set[int]]()
        taken = Snapshots.hold_moments

        def hold(snapshots: Snapshots, prefix: int) -> None:
            for piece, state in snapshots.states(8).items():
                if state.stored is not None:
                    before.setdefault(prefix, set()).add(piece.layer)
            # Copying ends before the layers thaw.
            if snapshots._round is not None and snapshots._round.thread is not None:
                snapshots._round.thread.join()
            taken(snapshots, prefix)

        monkeypatch.setattr(Snapshots, "hold_moments", hold)
        ranks.regroup_after = 12
        ended = ranks.train((0, 1, 2))
        assert all(isinstance(one, Parted) for one in ended)
        assert before[1] == {0, 1, 2, 3, 4}, "the snapshot was light while they were frozen"
        assert before[0] == {0}
        for name in kept(tmp_path):  # they may go at any time
            (tmp_path / "checkpoints" / "kept" / name).unlink()
        positions = ranks.positions((0, 1, 2))
        held = {number: one for number, at in positions.items() for one in at.snapshots if one.step == 8}
        sources = tuple(
            StateSource(
                layer=piece.layer,
                shard=piece.shard,
                rank=number,
                host=positions[number].host,
                port=positions[number].port,
            )
            for number, one in held.items()
            for piece in one.pieces
        )
        ended = ranks.train((2, 0, 1), 8, sources, carried=held[0].carried)
        assert sha256_of(ended) == expected


def stored(output: Path, state: LayerState) -> StoredMoments:
    """The file of `state` in a checkpoint in which it is frozen."""
    _, record = write_layer(checkpoint_folder(str(output), 20, 1), state, KeptFiles())
    path = output / "checkpoints" / "kept" / f"{record.sha256}.safetensors"
    return StoredMoments(path=str(path), bytes=record.bytes, sha256=record.sha256)


def test_a_state_without_moments_is_the_same_state_wherever_it_goes(tmp_path: Path) -> None:
    state, whole = trained(0, 1), bits(trained(0, 1))
    file = stored(tmp_path, state)
    slots_bytes = sum(slot.nbytes for slots in state.slots.values() for slot in slots.values())
    full_bytes = bytes_of(state)
    assert moments.release([state], {1: file}) == 0
    assert moments.release([state], {0: file}) == slots_bytes
    assert bytes_of(state) == full_bytes - slots_bytes
    copy = host_copy(state)
    assert copy.stored is not None
    # On its way to another rank.
    coming = PartialState(header(copy, 20))
    for chunk in chunks(copy, lambda: 100):
        coming.load(chunk)
    assert coming.bytes == bytes_of(state)
    taker = trained(0, 2)
    load_(taker, coming.state)
    assert (taker.stored, taker.updates) == (state.stored, state.updates)
    assert bits(with_moments(taker)) == whole == bits(with_moments(coming.state))
    # A taker that holds none yet, of a state that does.
    load_(taker, trained(0, 1))
    assert bits(taker) == whole
    # Into another checkpoint: the same file while the layer is frozen, else one of its own.
    folder = checkpoint_folder(str(tmp_path), 40, 1)
    _, again = write_layer(folder, copy, KeptFiles())
    assert (again.sha256, again.written_bytes, again.shared) == (file.sha256, 0, True)
    _, thawed = write_layer(folder, copy)
    assert (thawed.sha256, thawed.shared) == (file.sha256, False)
    moments.bring_back([state], 1)
    assert state.stored is not None
    moments.bring_back([state], 0)
    assert bits(state) == whole


@pytest.mark.parametrize("thawed", [False, True])
def test_files_count_while_every_checkpoint_since_names_them(thawed: bool, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, frozen=1)
    ranks.save(2)
    ranks.commit(3)
    assert [rank.shared_moments() for rank in ranks.ranks] == [{}, {}], "its manifest may not be there yet"
    if thawed:  # and frozen again, before the first one is complete for certain
        ranks.frozen = 0
        ranks.save(4)
        ranks.frozen = 1
    ranks.save(5)
    ranks.commit(6)
    (first, second) = (rank.shared_moments() for rank in ranks.ranks)
    assert first == second
    assert [*first] == ([] if thawed else [0])
    assert all(Path(file.path).stat().st_size == file.bytes for file in first.values())
    ranks.commit(7)
    assert [[*rank.shared_moments()] for rank in ranks.ranks] == [[0], [0]]


def test_copies_for_other_ranks_hold_the_moments(tmp_path: Path) -> None:
    """They may be behind their owners, and the file may be gone by then."""
    optimizer = make_optimizer(OptimizerConfig(), 10)
    state = LayerState.of(0, "embedding", Layer(), optimizer)
    whole = bits(host_copy(state))
    assert moments.release([state], {0: stored(tmp_path, host_copy(state))}) > 0
    freeze = FreezeSettings(FreezeConfig(), FreezePlans())
    live = LiveCopy((None, state), freeze, optimizer, 20)
    assert state.stored is not None, "others may be reading it"
    on_host = HostCopy(
        host_copy(state),
        20,
        device=torch.device("cpu"),
        stream=SideStream(torch.device("cpu")),
        freeze=freeze,
        optimizer=optimizer,
        check_room=lambda *_: None,
    )
    assert on_host.base_bytes == bytes_of(live.base[1]) > bytes_of(state)
    assert bits(live.base[1]) == whole == bits(on_host.newest())


def test_an_owner_killed_in_the_commit_that_thaws_costs_no_bit(expected: str, tmp_path: Path) -> None:
    config = drilled(long_config(tmp_path, keep=1))
    work = job(config, ranks=3, schedule="1f1b", counts=(2, 3, 3))
    with RankGroup(config, 4) as ranks:
        ranks.arm(1, Fault(kind=FaultKind.KILL, step=10, phase=FaultPhase.IN_COMMIT))
        ranks.train(work, range(3), plan=with_standbys(work))
        assert (1, "kill", 10, FaultPhase.IN_COMMIT) in ranks.fired
        reached, _, sources = ranks.finish_commit()
        ended = ranks.train(work, (3, 0, 2), plan=with_standbys(work), step=reached, sources=sources)
        assert state_sha256(ended) == expected


@pytest.mark.parametrize("damage", ["altered", "gone"])
def test_moments_stay_where_no_file_is_sure_to_give_them_back(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained(0, 1)
    file = stored(tmp_path, state)
    other = trained(0, 1)
    next(iter(other.slots.values()))["exp_avg"].view(-1)[0] += 1
    checked = trained(0, 1)
    checked.freezing["settled"] = torch.zeros(3, dtype=torch.bool)
    assert moments.release([other, checked], {0: file}) == 0
    monkeypatch.setattr(moments, "lies_in_memory", lambda path: True)
    assert moments.release([state], {0: file}) == 0
    monkeypatch.undo()
    gone = host_copy(state)
    assert moments.release([gone], {0: file}) > 0
    if damage == "gone":
        Path(file.path).unlink()
    else:
        Path(file.path).write_bytes(b"x" * file.bytes)
    assert moments.release([state], {0: file}) == 0
    with pytest.raises(MomentsLost, match="which has the moments of a layer that was frozen"):
        with_moments(gone)
    assert gone.stored is not None


def test_statistics_that_begin_anew_bring_moments_back(tmp_path: Path) -> None:
    state = trained(0, 1)
    state.freezing["energy"] = torch.ones(3)
    assert moments.release([state], {0: stored(tmp_path, state)}) > 0
    moments.bring_back([state], 1)
    assert state.stored is not None
    state.freezing = {"energy": torch.zeros(3)}
    moments.bring_back([state], 1)
    assert state.stored is None


def test_which_file_systems_lie_in_memory(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n/dev/b /dev/shm/my\\040disk xfs rw 0 0\n"
    )
    found = {
        path: lies_in_memory(path, mounts) for path in ("/dev/shm/run", "/dev/shm/my disk/run", "/dev/shmrun")
    }
    assert found == {"/dev/shm/run": True, "/dev/shm/my disk/run": False, "/dev/shmrun": False}
    assert not lies_in_memory("/dev/shm/run", tmp_path / "none")
