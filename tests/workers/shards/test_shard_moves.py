"""Layers whose states are shared out change ranks while training goes on: each shard moves in its pipeline, and the
bits are those of whole states that stay where they are."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import job, small_config
from rank_group import SECRET, RankGroup, drilled, quiet_sha256, state_sha256
from test_gradient_shards import folded
from test_migration import ENDLESS, cut, follow, tell
from test_shard_copies import copied
from test_shard_recovery import LAYERS, held
from test_shared_states import shared
from torch import Tensor

from benchmarks.parts.rank_threads import run_threads
from orchestrator.lifecycle.migration import path
from planner.arrivals import arrivals
from planner.plan import Plan
from planner.rank_program import rank_programs
from planner.search.standbys import assign
from planner.shards import Piece, Shard, made_of
from workers.config import CheckpointConfig, ElasticConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.processes import Died
from workers.launch.ranks import LaunchedJob
from workers.layers.sharded_weights import WeightExchange
from workers.protocol.orders import StatePart
from workers.protocol.reports import (
    RankPosition,
    Report,
    StepReport,
    SwitchReport,
    TimelineReport,
    WarningReport,
)
from workers.rank import Rank
from workers.state_stream.fetching import fetch

PLACES = range(4)
COUNTS, OTHERS = (4, 4), (2, 6)


def to(now: Plan, counts: tuple[int, ...]) -> tuple[Plan, ...]:
    """The plans that lead from `now` to `counts` layers per stage, with as many copies."""
    then = replace(now, layers=cut(now, counts))
    if now.standbys:
        nodes = [f"node {place}" for place in range(now.world_size)]
        then = replace(then, standbys=assign(then, nodes, [1] * len(LAYERS), len(now.standbys[0])))
    plans = path(now, then)
    return tuple(replace(plan, version=now.version + 1 + number) for number, plan in enumerate(plans))


def begun(group: RankGroup) -> None:
    group.wait_for(lambda reports: any(isinstance(report, StepReport) for report in reports))


@pytest.mark.parametrize(
    ("trait", "precision", "copies", "schedule"),
    [
        pytest.param("plain", "float32", 0, "zb-h1", marks=pytest.mark.soak),
        ("tied", "bfloat16", 1, "1f1b"),
        ("batchnorm", "float32", 1, "zb-h1"),
        ("dropout", "float16", 0, "1f1b"),
        ("fixed", "bfloat16", 1, "1f1b"),
    ],
)
def test_layers_move_there_and_back_with_the_same_bits(
    tmp_path: Path, trait: str, precision: str, copies: int, schedule: str
) -> None:
    config = drilled(small_config(tmp_path, trait, steps=ENDLESS, replicas=2, precision=precision))
    work = job(config, ranks=2, schedule=schedule)
    four = copied(work) if copies else shared(work)
    there_and_back = (OTHERS, COUNTS) if trait == "tied" else (OTHERS,)
    with RankGroup(config, 4) as group:

        def move() -> None:
            begun(group)
            now = four.plan
            for counts in there_and_back:
                for plan in to(now, counts):
                    follow(group, four, PLACES, plan)
                    now = plan
            group.stop()

        ended = group.train(four, PLACES, meanwhile=move)
        assert state_sha256(ended) == quiet_sha256(job(config), ended)
        assert sorted(group.steps()) == list(range(1, ended[0].step + 1))
        switches: list[SwitchReport] = group.of(SwitchReport)
        first, second = [(0, (2, 3)), (2, (2, 3))], [(1, (2, 3)), (3, (2, 3))]
        back = len(there_and_back) > 1
        assert sorted((s.rank, s.taken) for s in switches if s.taken) == sorted(second + first * back)
        assert sorted((s.rank, s.given) for s in switches if s.given) == sorted(first + second * back)
        skipped = "changed no weight"
        assert [warned for warned in group.of(WarningReport) if skipped not in warned.text] == []


@pytest.mark.parametrize("copies", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_layers_move_where_sums_of_gradients_are_shared_out_too(tmp_path: Path, copies: int) -> None:
    config = drilled(small_config(tmp_path, steps=ENDLESS, replicas=2, precision="bfloat16"))
    work = job(config, ranks=2, schedule="zb-h1")
    four = folded(copied(work) if copies else work)
    with RankGroup(config, 4) as group:

        def move() -> None:
            begun(group)
            for plan in to(four.plan, OTHERS):
                follow(group, four, PLACES, plan)
            group.stop()

        ended = group.train(four, PLACES, meanwhile=move)
        assert state_sha256(ended) == quiet_sha256(folded(job(config), 1), ended)
        switches: list[SwitchReport] = group.of(SwitchReport)
        assert sorted((s.rank, s.taken) for s in switches if s.taken) == [(1, (2, 3)), (3, (2, 3))]


def test_held_back_updates_of_shards_reach_the_new_owners(tmp_path: Path) -> None:
    """With copies that are there already, and so are not held back, in one pipeline."""
    config = drilled(small_config(tmp_path, "batchnorm", steps=ENDLESS, replicas=2))
    four = shared(job(config, ranks=2, schedule="1f1b"))
    ahead = {Piece(5, Shard(0, 2)): (0,)}
    four = replace(four, plan=replace(four.plan, standbys=tuple(ahead.get(p, ()) for p in four.plan.pieces)))
    then = replace(four.plan, layers=cut(four.plan, (6, 2)), standbys=())
    copying, taking = (
        replace(plan, version=number) for number, plan in enumerate(path(four.plan, then), start=2)
    )
    held = arrivals(four.plan, then)
    assert held == ((Piece(4, Shard(0, 2)), 0), (Piece(4, Shard(1, 2)), 2), (Piece(5, Shard(1, 2)), 2))
    with RankGroup(config, 4) as group:

        def move() -> None:
            begun(group)
            programs = rank_programs(four.schedule)
            for number in PLACES:
                group.tell(number, "prepare_plan", copying, programs[number % 2], group.generation, held)
            group.wait_for(lambda _: len(group.of(SwitchReport)) == 4)
            since = group.of(SwitchReport)[0].step
            group.wait_for(lambda _: max(group.steps()) >= since + 3)
            follow(group, four, PLACES, taking)
            group.stop()

        ended = group.train(four, PLACES, meanwhile=move)
        assert state_sha256(ended) != quiet_sha256(job(config), ended)
        assert sorted(group.steps()) == list(range(1, ended[0].step + 1))
        assert not group.of(WarningReport)


def salvageable(positions: dict[int, RankPosition], step: int) -> dict[Piece, bool]:
    """The shards of which siblings of their owners offer the weights, and whether these have their owners' bits."""
    owners = {piece: position for position in positions.values() for piece in position.holds}
    found: dict[Piece, bool] = {}
    for sibling in positions.values():
        for piece in sibling.weights:
            theirs, owners_own = (
                fetch(at.host, at.port, SECRET, piece.layer, step, wait_s=5, part=part, shard=piece.shard)
                for at, part in ((sibling, StatePart.WEIGHTS), (owners[piece], StatePart.ALL))
            )
            found[piece] = all(torch.equal(t, owners_own.weights[name]) for name, t in theirs.weights.items())
    return found


def test_siblings_weights_are_salvaged_only_while_no_update_is_held_back(tmp_path: Path) -> None:
    """What a sibling computes with is older than what the owner has once that applies what it has held back."""
    elastic = ElasticConfig(allow_faults=True, salvage="weights")
    config = small_config(tmp_path, steps=ENDLESS, replicas=2, elastic=elastic)
    four = shared(job(config, ranks=2, schedule="1f1b"))
    then = replace(four.plan, layers=cut(four.plan, (6, 2)))
    copying, held = replace(path(four.plan, then)[0], version=2), arrivals(four.plan, then)
    drop = Fault(kind=FaultKind.DROP_LINK, phase=FaultPhase.BEFORE_COMMIT)
    with RankGroup(config, 4) as group:
        group.arm(3, drop.model_copy(update={"step": 3}))
        group.train(four, PLACES)
        step, positions, sources = group.finish_commit()
        assert salvageable(positions, step) == dict.fromkeys(four.plan.pieces, True)

        def hold_back() -> None:
            programs = rank_programs(four.schedule)
            for number in PLACES:
                group.tell(number, "prepare_plan", copying, programs[number % 2], group.generation, held)
            group.wait_for(lambda _: len(group.of(SwitchReport)) == 4)
            since = group.of(SwitchReport)[0].step
            group.wait_for(lambda _: max(group.steps()) > since + 2)
            group.tell(3, "inject", drop)

        group.train(four, PLACES, step=step, sources=sources, meanwhile=hold_back)
        assert [fired[:2] for fired in group.fired] == [(3, "drop-link")] * 2
        step, positions, _ = group.finish_commit()
        assert salvageable(positions, step) == {}


def test_siblings_compute_with_the_same_weights_once_held_back_updates_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a step that was skipped, which changes no weight by itself."""
    checkpoint, elastic = CheckpointConfig(every_steps=6), ElasticConfig(allow_faults=True)
    config = small_config(
        tmp_path, steps=9, replicas=2, timeline_every=1, checkpoint=checkpoint, elastic=elastic
    )
    four = replace(shared(job(config, ranks=2, schedule="1f1b")), secret=SECRET)
    then = replace(four.plan, layers=cut(four.plan, (6, 2)))
    copying, held = replace(path(four.plan, then)[0], version=2), arrivals(four.plan, then)
    programs = rank_programs(four.schedule)
    bring, seen = WeightExchange.bring, defaultdict[tuple[str, int], list[Tensor]](list)

    def see(exchange: WeightExchange) -> None:
        bring(exchange)
        name = threading.current_thread().name
        for layer, weights in exchange._layers.items():
            seen[name, layer].append(torch.cat([each.flatten().clone() for each in weights.buffers]))

    def react(_: LaunchedJob, rank: Rank, report: Report) -> None:
        if isinstance(report, TimelineReport) and report.step == 2:
            rank.prepare_plan(copying, programs[report.rank % 2], 1, held)
            if report.rank == 0:
                rank.faults.arm(Fault(kind=FaultKind.NAN, phase=FaultPhase.BACKWARD, step=6))

    monkeypatch.setattr(WeightExchange, "bring", see)
    monkeypatch.setattr("benchmarks.parts.rank_threads.react", react)
    run = run_threads(four)
    switched = {report.step for report in run.reports if isinstance(report, SwitchReport)}
    assert len(switched) == 1
    assert max(switched) < 5, "no update was held back before the step that was skipped"
    assert any("changed no weight" in one.text for one in run.reports if isinstance(one, WarningReport))
    for layer in LAYERS:
        of_one, of_other = (weights for (_, number), weights in seen.items() if number == layer)
        assert len(of_one) == len(of_other) >= config.job.steps
        assert [*map(torch.equal, of_one, of_other)] == [True] * len(of_one)


@pytest.mark.parametrize(
    ("moment", "phase", "victim"),
    [
        ("copying", FaultPhase.MIGRATING, 3),
        pytest.param("copied", FaultPhase.BACKWARD, 1, marks=pytest.mark.soak),
        ("copied", FaultPhase.BEFORE_COMMIT, 0),
        ("copied", FaultPhase.IN_COMMIT, 3),
        pytest.param("copied", FaultPhase.AFTER_COMMIT, 2, marks=pytest.mark.soak),
        ("taken", FaultPhase.FORWARD, 1),
        pytest.param("taken", FaultPhase.IN_COMMIT, 2, marks=pytest.mark.soak),
        ("taken", FaultPhase.AFTER_COMMIT, 0),
    ],
)
def test_a_rank_killed_while_shards_move_takes_no_committed_step_along(
    tmp_path: Path, moment: str, phase: FaultPhase, victim: int
) -> None:
    """Layers move from places 0 and 2 to places 1 and 3. The others go on with a spare, or with fewer pipelines."""
    config = drilled(small_config(tmp_path, "tied", steps=ENDLESS, replicas=2, precision="bfloat16"))
    four = copied(job(config, ranks=2, schedule="1f1b"))
    copying, taking, *_ = to(four.plan, OTHERS)
    fault = Fault(kind=FaultKind.KILL, phase=phase)
    with RankGroup(config, 5) as group:

        def move() -> None:
            begun(group)
            if moment == "copying":
                group.tell(victim, "inject", fault)
            if moment == "taken":
                follow(group, four, PLACES, copying)
                tell(group, four, PLACES, taking)
                group.wait_for(lambda _: any(s.version == taking.version for s in group.of(SwitchReport)))
            else:
                tell(group, four, PLACES, copying)
                group.wait_for(lambda _: victim not in group.alive or bool(group.of(SwitchReport)))
            if moment != "copying":
                group.tell(victim, "inject", fault)
            if moment == "copied":
                tell(group, four, set(PLACES) - {victim}, taking)

        ended = group.train(four, PLACES, meanwhile=move)
        assert isinstance(ended[victim], Died)
        assert [fired[::3] for fired in group.fired] == [(victim, str(phase))]
        committed = max(group.steps())
        step, positions, sources = group.finish_commit()
        assert step >= committed
        found = held(positions, step)
        assert all(made_of(layer, found) for layer in LAYERS)
        following = (
            four
            if phase in (FaultPhase.BACKWARD, FaultPhase.IN_COMMIT, FaultPhase.MIGRATING)
            else copied(job(config))
        )
        members = [4 if number == victim else number for number in PLACES][: following.plan.world_size]
        ended = group.train(following, members, step=step, sources=sources, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config), ended)
        assert sorted(group.steps()) == list(range(1, ended[members[0]].step + 1))
