"""Ranks that go back to snapshots together: the same bits as without the loss, whatever was under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, quiet_sha256, state_sha256

from benchmarks.parts.rank_threads import run_threads
from planner.rank_program import rank_programs
from planner.shards import Piece, made_of
from workers.build import build_layers
from workers.checkpoint.folder import checkpoint_folder, checkpoints, read_layer, read_manifest
from workers.config import CheckpointConfig, FreezeConfig, ModelConfig, WorkerConfig
from workers.copies.snapshot_turns import SnapshotTurns
from workers.copies.snapshots import Snapshots
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.models.registry import build_definition
from workers.process.host_memory import LEAST_FREE_BYTES
from workers.protocol.carried import Carried
from workers.protocol.errors import StateStreamError
from workers.protocol.orders import Assignment, StateSource
from workers.protocol.reports import RankPosition, StandbyReport, WarningReport
from workers.state.layer_state import LayerState, bytes_of, digest, host_copy, without_fixed
from workers.state.optim import make_optimizer

LAYERS = range(8)
STEPS = 20
ENDLESS = 10_000
"""Steps of jobs that the test stops once everything has happened."""
EVERY = 3


def with_snapshots(work: LaunchedJob, every: int = EVERY) -> LaunchedJob:
    """`work` with a snapshot of each layer, or shard of one, at the place after its owner."""
    plan = work.plan
    places = tuple(((plan.owner_of(piece) + 1) % plan.world_size,) for piece in plan.pieces)
    return replace(work, plan=replace(plan, snapshots=places, snapshot_every=every))


def slow(group: RankGroup, numbers: Sequence[int]) -> None:
    """Steps that take long enough for snapshots to become complete."""
    for number in numbers:
        group.arm(number, Fault(kind=FaultKind.SLOW, factor=8.0))


def snapshot(positions: Mapping[int, RankPosition]) -> tuple[int, list[StateSource], Carried | None]:
    """The newest one that these ranks have all layers of; and where they are."""
    kept: dict[int, dict[Piece, RankPosition]] = {}
    carried: dict[int, Carried | None] = {}
    for position in positions.values():
        for one in position.snapshots:
            kept.setdefault(one.step, {}).update(dict.fromkeys(one.pieces, position))
            carried[one.step] = one.carried
    whole = [step for step, found in kept.items() if all(made_of(layer, set(found)) for layer in LAYERS)]
    step = max(whole)
    sources = [
        StateSource(layer=piece.layer, shard=piece.shard, rank=at.rank, host=at.host, port=at.port)
        for piece, at in kept[step].items()
    ]
    return step, sources, carried[step]


def snapshot_after(
    group: RankGroup, work: LaunchedJob, number: int, fault: Fault
) -> tuple[int, list[StateSource], Carried | None]:
    """The newest snapshot: its step, where it is, and what else it has. Once all ranks have one, `fault` of one rank
    ends the training of `work`."""
    ranks = range(work.plan.world_size)

    def fail() -> None:
        group.wait_for(lambda _: {one.rank for one in group.of(StandbyReport) if one.snapshot} == {*ranks})
        group.tell(number, "inject", fault)

    group.train(work, ranks, meanwhile=fail)
    assert [(rank, kind, phase) for rank, kind, _, phase in group.fired] == [
        (number, str(fault.kind), str(fault.phase))
    ]
    reached, positions, live = group.finish_commit()
    if fault.kind is FaultKind.KILL and work.plan.replicas == 1:
        assert {each.layer for each in live} < {*LAYERS}, "no living rank has the layers of the lost one"
    step, sources, carried = snapshot(positions)
    assert 0 < step <= reached
    assert all(one.bytes > 0 and one.step <= reached for one in group.of(StandbyReport) if one.snapshot)
    return step, sources, carried


@pytest.mark.parametrize(
    ("trait", "phase", "changes"),
    [
        ("plain", FaultPhase.FORWARD, {"precision": "float32"}),
        ("tied", FaultPhase.BEFORE_COMMIT, {"precision": "bfloat16"}),
        ("dropout", FaultPhase.IN_COMMIT, {"precision": "float16"}),
        ("plain", FaultPhase.AFTER_COMMIT, {"freeze": FreezeConfig(method="apf", warm_up=1, check_every=4)}),
        ("batchnorm", FaultPhase.BACKWARD, {"precision": "float32"}),
    ],
)
def test_a_lost_rank_sends_the_others_back_to_one_snapshot(
    tmp_path: Path, trait: str, phase: FaultPhase, changes: dict[str, Any]
) -> None:
    config = drilled(small_config(tmp_path, trait, steps=ENDLESS, **changes))
    four = with_snapshots(job(config, ranks=4, schedule="1f1b"))
    three = with_snapshots(job(config, ranks=3, schedule="zb-h1"))
    with RankGroup(config, 4) as group:
        step, sources, carried = snapshot_after(group, four, 1, Fault(kind=FaultKind.KILL, phase=phase))
        ended = group.train(
            three, (0, 2, 3), step=step, sources=sources, carried=carried, meanwhile=group.stop
        )
        assert state_sha256(ended) == quiet_sha256(job(config), ended)


@pytest.mark.parametrize("shards", [False, True])
def test_fixed_parameters_are_in_no_snapshot(shards: bool, tmp_path: Path) -> None:
    """And nobody asks a peer for them: those whose layers they become build them."""
    model = ModelConfig(
        factory="small_models:model",
        arguments={"trait": "plain"},
        fixed=("l0.*", "l1.up.*", "l4.*", "*.bias"),
    )
    replicas = 2 if shards else 1
    config = drilled(small_config(tmp_path, model=model, steps=ENDLESS, replicas=replicas))
    work = job(config, ranks=4 // replicas, schedule="1f1b")
    four = with_snapshots(replace(work, plan=replace(work.plan, shard="optimizer")) if shards else work)
    alone = job(config, ranks=3, schedule="1f1b")
    alone = with_snapshots(replace(alone, plan=replace(alone.plan, pipelines=1)) if shards else alone)
    with RankGroup(config, 4) as group:
        kill = Fault(kind=FaultKind.KILL, phase=FaultPhase.BACKWARD)
        step, sources, _ = snapshot_after(group, four, 2, kill)
        told = [report for report in group.of(StandbyReport) if report.snapshot]
        moving = moving_bytes(config, four)
        for report in told:
            assert report.bytes == sum(moving[piece] for piece in report.pieces)
        ended = group.train(alone, (3, 0, 1), step=step, sources=sources, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config), ended)


def moving_bytes(config: WorkerConfig, work: LaunchedJob) -> dict[Piece, int]:
    """Bytes of each layer's or shard's state without fixed parameters."""
    found: dict[Piece, int] = {}
    for shard in {piece.shard for piece in work.plan.pieces}:
        built = build_layers(
            build_definition(config.model, None),
            LAYERS,
            seed=config.job.seed,
            precision=config.job.precision,
            device=torch.device("cpu"),
            optimizer=make_optimizer(config.optimizer, config.job.steps),
            shard=shard,
        )
        found |= {Piece(layer, shard): bytes_of(without_fixed(state)) for layer, (_, state) in built.items()}
    return found


def test_a_rank_fetches_nothing_that_it_has_in_a_snapshot(tmp_path: Path) -> None:
    """All go back to one under the same plan, and nobody could be reached for layers."""
    config = drilled(small_config(tmp_path, "dropout", steps=ENDLESS))
    two = with_snapshots(job(config, ranks=2, schedule="1f1b"))
    with RankGroup(config, 2) as group:
        drop = Fault(kind=FaultKind.DROP_LINK, phase=FaultPhase.BACKWARD)
        step, sources, _ = snapshot_after(group, two, 1, drop)
        unreachable = [replace(source, port=1) for source in sources]
        ended = group.train(two, range(2), step=step, sources=unreachable, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config), ended)


def test_each_generation_begins_with_a_snapshot_of_its_own(tmp_path: Path) -> None:
    """So that a second loss costs no more than the first, and older ones need not be kept."""
    config = drilled(small_config(tmp_path, steps=ENDLESS))
    four, three, two = (
        with_snapshots(job(config, ranks=ranks, schedule="1f1b"), every=ENDLESS) for ranks in (4, 3, 2)
    )
    with RankGroup(config, 4) as group:
        assert parted(group.train(four, range(4), regroup_by=0)) == {1}
        step, _, sources = group.finish_commit()
        told = group.protected(4)

        def lose(number: int, ready: Any) -> None:
            ready()
            group.tell(number, "die")

        group.train(four, range(4), step=step, sources=sources, meanwhile=lambda: lose(3, told))
        reached, positions, _ = group.finish_commit()
        step, sources, _ = snapshot(positions)
        assert step == 1 < reached
        told = group.protected(3)
        group.train(three, (0, 1, 2), step=step, sources=sources, meanwhile=lambda: lose(0, told))
        _, positions, _ = group.finish_commit()
        assert {one.step for at in positions.values() for one in at.snapshots} == {1}
        step, sources, _ = snapshot(positions)
        ended = group.train(two, (1, 2), step=step, sources=sources, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config), ended)


def test_shards_go_back_too_and_are_put_together_for_other_plans(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, "tied", steps=ENDLESS, replicas=2, precision="bfloat16"))
    four = job(config, ranks=2, schedule="1f1b")
    shared = with_snapshots(replace(four, plan=replace(four.plan, shard="optimizer")))
    alone = job(config, ranks=3, schedule="1f1b")
    alone = with_snapshots(replace(alone, plan=replace(alone.plan, pipelines=1)))
    with RankGroup(config, 4) as group:
        kill = Fault(kind=FaultKind.KILL, phase=FaultPhase.BACKWARD)
        step, sources, _ = snapshot_after(group, shared, 2, kill)
        assert {each.shard.of for each in sources} == {2}
        ended = group.train(alone, (3, 0, 1), step=step, sources=sources, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config), ended)


def test_a_rank_that_dies_while_it_fetches_leaves_the_snapshot_before(tmp_path: Path) -> None:
    """Of the new one it had a part; of the one before, the others have all."""
    config = drilled(small_config(tmp_path, steps=STEPS))
    expected = run_threads(job(config)).state_sha256
    three = with_snapshots(job(config, ranks=3, schedule="1f1b"))
    two = with_snapshots(job(config, ranks=2, schedule="1f1b"))
    with RankGroup(config, 3) as group:
        slow(group, range(3))
        group.arm(2, Fault(kind=FaultKind.KILL, step=2 * EVERY, phase=FaultPhase.MIGRATING))
        group.train(three, range(3))
        ((rank, begun),) = [(rank, step) for rank, kind, step, _ in group.fired if kind == "kill"]
        assert (rank, begun >= 2 * EVERY) == (2, True)
        _, positions, _ = group.finish_commit()
        assert {one.step for one in positions[0].snapshots} in ({EVERY}, {EVERY, begun})
        step, sources, _ = snapshot(positions)
        assert step == EVERY
        ended = group.train(two, (0, 1), step=step, sources=sources)
        assert state_sha256(ended) == expected


def test_a_snapshot_can_be_written_as_a_checkpoint(tmp_path: Path) -> None:
    """Before ranks that hold the last copies may fail."""
    config = drilled(small_config(tmp_path, "dropout", steps=ENDLESS, precision="float16"))
    three = with_snapshots(job(config, ranks=3, schedule="1f1b"))
    with RankGroup(config, 3) as group:
        kill = Fault(kind=FaultKind.KILL, phase=FaultPhase.FORWARD)
        step, sources, _ = snapshot_after(group, three, 0, kill)
        holders = {each.layer: each.rank for each in sources}
        folder = checkpoint_folder(config.job.folder, step, 1)
        told = {
            rank: (folder, step, tuple(layer for layer, at in holders.items() if at == rank))
            for rank in {*holders.values()}
        }
        records = [record for written in group.call("save", told).values() for record in written]
        assert group.call("seal", {1: (folder, step, three.plan, 1, records)}) == {1: None}
    (ref,) = [ref for ref in checkpoints(config.job.folder) if ref.step == step]
    with RankGroup(config, 1) as group:
        ended = group.train(job(config), (0,), step=step, start=ref, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config), ended)


class Host:
    """What a `Snapshots` offers, and the memory that it is told of."""

    def __init__(self, free_bytes: int = 2**40) -> None:
        self.free_bytes = free_bytes
        self.offered: dict[int, list[int]] = {}
        self.snapshots = Snapshots(self._keep, lambda step: self.offered.pop(step, None), self._free)

    def _free(self) -> int:
        return self.free_bytes

    def _keep(self, step: int, states: Any) -> None:
        self.offered.setdefault(step, []).extend(state.layer for state in states)


def finish(snapshots: Snapshots) -> None:
    """Wait until it neither copies nor fetches any more."""
    assert snapshots._round is not None
    assert snapshots._round.thread is not None
    snapshots._round.thread.join(30)


def states_of(tmp_path: Path, layers: Sequence[int]) -> list[LayerState]:
    config: WorkerConfig = small_config(tmp_path)
    built = build_layers(
        build_definition(config.model, 0),
        layers,
        seed=1,
        precision="float32",
        device=torch.device("cpu"),
        optimizer=make_optimizer(config.optimizer, config.job.steps),
    )
    return [built[layer][1] for layer in layers]


def test_what_training_does_afterwards_does_not_reach_a_snapshot(tmp_path: Path) -> None:
    host, (state,) = Host(), states_of(tmp_path, [1])
    before = digest(state)
    host.snapshots.capture(4, [state], {})
    for buffer in state.buffers.values():
        buffer.add_(1)
    host.snapshots.wait_copied()
    for weight in state.weights.values():
        weight.detach().add_(1.0)
    assert digest(state) != before
    finish(host.snapshots)
    assert host.snapshots.complete == 4
    assert digest(host.snapshots.states(4)[Piece(1)]) == before
    assert host.offered == {4: [1]}


def test_an_update_waits_until_layers_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that take longer than a window are those of their step all the same, as its checkpoint has it."""
    config = small_config(
        tmp_path, "batchnorm", steps=8, checkpoint=CheckpointConfig(every_steps=1, keep=100)
    )
    work = replace(with_snapshots(job(config, ranks=2, schedule="1f1b"), every=2), secret=b"of the tests")
    seen: dict[tuple[int, int], str] = {}

    def copy_slowly(state: LayerState) -> LayerState:
        time.sleep(0.1)
        copy = host_copy(state)
        seen[state.layer, max(state.updates.values())] = digest(copy)
        return copy

    monkeypatch.setattr("workers.copies.snapshots.host_copy", copy_slowly)
    run_threads(work)
    saved = {
        (layer, ref.step): digest(read_layer(ref, read_manifest(ref), layer))
        for ref in checkpoints(config.job.folder)
        for layer in LAYERS
    }
    assert {layer for layer, step in seen if step == 2} == {*LAYERS}
    assert all(saved[key] == copied for key, copied in seen.items())


def test_a_snapshot_stays_until_all_ranks_have_the_next_one(tmp_path: Path) -> None:
    host, (own, other) = Host(), states_of(tmp_path, [1, 2])
    snapshots = host.snapshots
    snapshots.capture(4, [own], {Piece(2): lambda stopped: other})
    finish(snapshots)
    snapshots.capture(8, [own], {Piece(2): lambda stopped: other})
    finish(snapshots)
    assert snapshots.complete == 8
    assert [one.step for one in snapshots.held()] == [8, 4]
    snapshots.all_have(4)
    assert [one.step for one in snapshots.held()] == [8, 4]
    snapshots.all_have(8)
    assert [(one.step, one.pieces) for one in snapshots.held()] == [(8, (Piece(1), Piece(2)))]
    assert host.offered == {8: [1, 2]}


def test_steps_that_are_undone_take_their_snapshots_along(tmp_path: Path) -> None:
    host, (own,) = Host(), states_of(tmp_path, [1])
    snapshots = host.snapshots
    for step in (4, 8):
        snapshots.capture(step, [own], {})
        finish(snapshots)
    snapshots.forget_after(4)
    assert (snapshots.complete, [one.step for one in snapshots.held()]) == (0, [4])
    snapshots.capture(4, [own], {})
    finish(snapshots)
    assert snapshots.complete == 4


def test_an_owner_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    host, (own, other) = Host(), states_of(tmp_path, [1, 2])
    asked: list[int] = []

    def bring(stopped: threading.Event) -> LayerState:
        asked.append(len(asked))
        if len(asked) < 3:
            raise StateStreamError("not offered yet")
        return other

    host.snapshots.capture(4, [own], {Piece(2): bring})
    finish(host.snapshots)
    assert (len(asked), host.snapshots.complete, host.snapshots.failure) == (3, 4, None)


def test_an_owner_that_never_answers_is_named_and_the_next_snapshot_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.copies.fetch_in_rounds.ASK_AGAIN_S", (0.01, 0.01))
    host, (own, other) = Host(), states_of(tmp_path, [1, 2])
    snapshots = host.snapshots

    def bring(stopped: threading.Event) -> LayerState:
        raise StateStreamError("layer 2 of step 4: it is gone")

    snapshots.capture(4, [own], {Piece(2): bring})
    finish(snapshots)
    assert (snapshots.complete, snapshots.given_up, snapshots.held(), host.offered) == (0, 4, (), {})
    assert (
        snapshots.failure == "layers did not arrive for the snapshot of step 4: layer 2 of step 4: it is gone"
    )
    snapshots.capture(8, [own], {Piece(2): lambda stopped: other})
    finish(snapshots)
    assert (snapshots.complete, snapshots.failure) == (8, None)


def test_without_host_memory_the_snapshot_before_stays_and_the_log_says_so(tmp_path: Path) -> None:
    host, (own, other) = Host(), states_of(tmp_path, [1, 2])
    snapshots = host.snapshots
    turns = SnapshotTurns(snapshots, rank=7, place=1)
    turns.begin(4)
    snapshots.capture(4, [own], {})
    finish(snapshots)
    assert not turns.commit(5, 4, 4, 0)
    host.free_bytes = LEAST_FREE_BYTES + 10
    assert turns.due(8, 4)
    turns.begin(8)
    snapshots.capture(8, [own], {Piece(2): lambda stopped: other})
    finish(snapshots)
    assert (snapshots.complete, snapshots.given_up) == (4, 8)
    assert not turns.due(12, 4), "the others do not know yet"
    (told,) = turns.commit(9, 4, 4, 8)
    assert isinstance(told, WarningReport)
    assert "no host memory for the snapshot of step 8" in told.text
    assert "takes the job back to step 4" in told.text
    assert [one.step for one in snapshots.held()] == [4]
    assert host.offered == {4: [1]}
    host.free_bytes = 2**40
    assert turns.due(12, 4)
    turns.begin(12)
    snapshots.capture(12, [own], {})
    finish(snapshots)
    assert snapshots.complete == 12


def test_ranks_on_one_host_leave_each_other_room(tmp_path: Path) -> None:
    (own,) = states_of(tmp_path, [1])
    size = bytes_of(own)
    for sharing, complete in ((1, 4), (3, 0)):
        host = Host(LEAST_FREE_BYTES + 2 * size)
        host.snapshots.capture(4, [own], {}, sharing=sharing)
        finish(host.snapshots)
        assert host.snapshots.complete == complete


def test_the_only_snapshot_stays_if_a_newcomer_has_no_memory_for_it(tmp_path: Path) -> None:
    """All are back at it, and take it once more: without it there would be none."""
    (own,) = states_of(tmp_path, [1])
    there, newcomer = Host(), Host(free_bytes=0)
    there.snapshots.capture(8, [own], {})
    finish(there.snapshots)
    for host in (there, newcomer):
        host.snapshots.capture(8, [own], {})
        finish(host.snapshots)
    assert (newcomer.snapshots.complete, newcomer.snapshots.given_up, newcomer.snapshots.held()) == (0, 8, ())
    there.snapshots.all_have(0, 8)
    assert [one.step for one in there.snapshots.held()] == [8]
    there.snapshots.capture(12, [own], {})
    finish(there.snapshots)
    there.snapshots.all_have(0, 12)
    assert [one.step for one in there.snapshots.held()] == [8]
    # Nor does what is here go where there is no memory for more of it.
    there.free_bytes = 0
    (other,) = states_of(tmp_path, [2])
    there.snapshots.capture(8, [own, other], {})
    finish(there.snapshots)
    assert [(one.step, one.pieces) for one in there.snapshots.held()] == [(8, (Piece(1),))]
    assert there.offered[8][-1] == 1


def test_nothing_is_left_of_a_snapshot_that_another_rank_gave_up(tmp_path: Path) -> None:
    host, (own, other) = Host(), states_of(tmp_path, [1, 2])
    snapshots, going_on = host.snapshots, threading.Event()

    def bring(stopped: threading.Event) -> LayerState:
        going_on.wait(30)
        return other

    snapshots.capture(4, [own], {})
    finish(snapshots)
    snapshots.capture(8, [own], {Piece(2): bring})
    snapshots.wait_copied()
    snapshots.all_have(4, 8)
    going_on.set()
    finish(snapshots)
    assert (snapshots.complete, host.offered) == (4, {4: [1]})
    assert [one.step for one in snapshots.held()] == [4]


def test_a_snapshot_is_due_so_many_steps_after_the_one_before_began() -> None:
    """Wherever the generation begins: a loss undoes no more."""
    turns = SnapshotTurns(Host().snapshots, rank=0, place=0)
    turns.begin(13)
    turns.commit(16, 4, 13, 0)
    assert [turns.due(step, 4) for step in (16, 17, 18)] == [False, True, True]


def test_copies_that_take_so_long_that_more_is_undone_are_named_once() -> None:
    for most_undone, allowed, late_at in ((0, 7, 9), (9, 9, 10)):
        turns = SnapshotTurns(Host().snapshots, 0, 0, most_undone)
        turns.begin(4)
        told = {step: turns.commit(step, 4, 0, 0) for step in range(5, 15)}
        ((step, (late,)),) = [(step, reports) for step, reports in told.items() if reports]
        assert step == late_at
        assert isinstance(late, WarningReport)
        assert f"the snapshot of step 4 took until step {late_at}" in late.text
        assert f"where {allowed} are allowed" in late.text
        turns.commit(15, 4, 4, 0)
        assert turns.due(15, 4)


def test_a_rank_that_was_left_out_of_a_return_forgets_its_snapshots(tmp_path: Path) -> None:
    """Theirs may be of steps that were undone since."""
    config = drilled(small_config(tmp_path, steps=ENDLESS))
    two = with_snapshots(job(config, ranks=2, schedule="1f1b"))
    with RankGroup(config, 2) as group:
        snapshot_after(group, two, 0, Fault(kind=FaultKind.DROP_LINK, phase=FaultPhase.FORWARD))
        step, positions, live = group.finish_commit()
        assert all(position.snapshots for position in positions.values())
        programs = rank_programs(two.schedule)
        told = {
            place: (
                Assignment(
                    place=place,
                    plan=two.plan,
                    program=programs[place],
                    step=step,
                    sources=tuple(live),
                    fresh=place == 1,
                ),
            )
            for place in range(2)
        }
        assert group.call("follow", told) == {0: None, 1: None}
        stayed, left_out = group.each("position").values()
        assert stayed.snapshots
        assert left_out.snapshots == ()


def test_a_checkpoint_of_the_step_gone_back_to_is_written_again(tmp_path: Path) -> None:
    """It was under way when the rank was lost, and the step does not run again."""
    config = drilled(
        small_config(tmp_path, steps=ENDLESS, checkpoint=CheckpointConfig(every_steps=1, keep=1000))
    )
    three = with_snapshots(job(config, ranks=3, schedule="1f1b"))
    two = with_snapshots(job(config, ranks=2, schedule="1f1b"))
    with RankGroup(config, 3) as group:
        kill = Fault(kind=FaultKind.KILL, phase=FaultPhase.FORWARD)
        step, sources, _ = snapshot_after(group, three, 2, kill)
        group.train(two, (0, 1), step=step, sources=sources, meanwhile=group.stop)
    again = [ref.path for ref in checkpoints(config.job.folder) if ref.step == step]
    assert any(path.endswith("-gen-2") for path in again)
