"""Copies of shards on other ranks: whoever dies, whenever, the others have every shard of one step, with its bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, state_sha256
from test_freezing_training import METHODS
from test_shard_recovery import LAYERS, held, lose_rank_1, one_pipeline
from test_shared_states import shared

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.search.standbys import assign
from planner.shards import made_of
from workers.config import FreezeConfig, OptimizerConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.processes import Died
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import ValidationReport

STEP = 3


def copied(work: LaunchedJob, copies: int = 1) -> LaunchedJob:
    """`work` with states shared out and copies of each shard, every place on a node of its own."""
    work = shared(work)
    nodes = [f"node {place}" for place in range(work.plan.world_size)]
    return replace(work, plan=replace(work.plan, standbys=assign(work.plan, nodes, [1] * 8, copies)))


@pytest.mark.parametrize(
    ("phase", "blind", "reached", "trait", "precision", "then"),
    [
        pytest.param(
            FaultPhase.FORWARD, (), STEP - 1, "batchnorm", "float32", "spare", marks=pytest.mark.soak
        ),
        (FaultPhase.BACKWARD, (), STEP - 1, "tied", "bfloat16", "fewer"),
        (FaultPhase.BEFORE_COMMIT, (), STEP - 1, "plain", "float16", "whole"),
        (FaultPhase.IN_COMMIT, (0, 3), STEP, "tied", "bfloat16", "spare"),
        (FaultPhase.IN_COMMIT, (0, 2, 3), STEP - 1, "plain", "float32", "fewer"),
        (FaultPhase.AFTER_COMMIT, (), STEP, "dropout", "bfloat16", "whole"),
    ],
)
def test_a_killed_ranks_shards_go_on_elsewhere(
    tmp_path: Path,
    phase: FaultPhase,
    blind: tuple[int, ...],
    reached: int,
    trait: str,
    precision: str,
    then: str,
) -> None:
    config = drilled(small_config(tmp_path, trait, steps=6, replicas=2, precision=precision))
    expected = run_threads(job(config)).state_sha256
    four = copied(job(config, ranks=2, schedule="1f1b"))
    with RankGroup(config, 5) as group:
        positions, sources = lose_rank_1(group, four, STEP, phase, blind, reached=reached)
        following, members = {
            "spare": (four, (0, 4, 2, 3)),
            "fewer": (copied(job(config, ranks=1)), (3, 0)),
            "whole": (one_pipeline(config, 3), (0, 2, 3)),
        }[then]
        carried = next((p.carried for p in positions.values() if p.carried is not None), None)
        ended = group.train(following, members, step=reached, sources=sources, carried=carried)
        assert state_sha256(ended) == expected
        assert sorted(group.steps()) == list(range(1, 7))


@pytest.mark.parametrize("place", [2, 3])
def test_a_copy_of_a_siblings_shard_has_the_buffers_of_the_first_replica(tmp_path: Path, place: int) -> None:
    """The last step ends with the bits of the quiet run, so nothing heals what a copy began with."""
    config = drilled(small_config(tmp_path, "batchnorm", steps=4, replicas=2, validate_every=1))
    quiet = run_threads(job(config))
    four = copied(job(config, ranks=2, schedule="1f1b"))
    with RankGroup(config, 5) as group:
        group.arm(place, Fault(kind=FaultKind.KILL, step=4, phase=FaultPhase.AFTER_COMMIT))
        group.train(four, range(4))
        step, _, sources = group.finish_commit()
        assert step == 4
        members = tuple(4 if number == place else number for number in range(4))
        ended = group.train(four, members, step=step, sources=sources)
        assert state_sha256(ended) == quiet.state_sha256
        told = {r.step: r.loss for r in group.of(ValidationReport)}
        assert told == {r.step: r.loss for r in quiet.reports if isinstance(r, ValidationReport)}


def test_copies_that_come_while_training_goes_on_take_over_too(tmp_path: Path) -> None:
    """After the first loss all copies that the new ranks keep come from the owners of the shards."""
    endless = 10_000
    sgd = OptimizerConfig(name="sgd", lr=0.02, momentum=0.9)
    config = drilled(
        small_config(tmp_path, "tied", steps=endless, replicas=2, optimizer=sgd, precision="bfloat16")
    )
    four = copied(job(config, ranks=2, schedule="1f1b"))
    with RankGroup(config, 6) as group:
        lost, members = [0, 3], [0, 1, 2, 3]
        step, sources = 0, []
        for number, fresh in zip(lost, (4, 5), strict=True):
            current = group.protected(4)

            def kill(number: int = number, current: object = current) -> None:
                current()  # pyright: ignore[reportCallIssue]
                group.tell(number, "die")

            ended = group.train(four, members, step=step, sources=sources, meanwhile=kill)
            assert isinstance(ended[number], Died)
            step, positions, sources = group.finish_commit()
            found = held(positions, step)
            assert all(made_of(layer, found) for layer in LAYERS)
            members[members.index(number)] = fresh
        ended = group.train(four, members, step=step, sources=sources, meanwhile=group.stop)
        (stopped,) = {outcome.step for outcome in ended.values()}
        quiet = run_threads(replace(job(config), stop_at=stopped))
        assert state_sha256(ended) == quiet.state_sha256


@pytest.mark.parametrize(
    ("trait", "precision", "freeze", "copies_in"),
    [
        ("tied", "bfloat16", FreezeConfig(), "device"),
        ("batchnorm", "float32", METHODS["apf"], "host"),
        ("fixed", "float32", METHODS["autofreeze"], "device"),
    ],
)
def test_ranks_that_multiply_pipelines_have_copies_of_the_new_shards_at_once(
    tmp_path: Path, trait: str, precision: str, freeze: FreezeConfig, copies_in: str
) -> None:
    """A rank dies in its first step with them: no copy has come from an owner yet."""
    config = drilled(small_config(tmp_path, trait, steps=6, replicas=2, precision=precision, freeze=freeze))
    config = changed(config, elastic=config.elastic.model_copy(update={"copies_in": copies_in}))
    expected = run_threads(job(config)).state_sha256
    one, four = one_pipeline(config, 4), copied(job(config, ranks=2, schedule="1f1b"))
    with RankGroup(config, 4) as group:
        ended = group.train(one, range(4), regroup_by=0)
        assert parted(ended) == {1}
        step, positions, sources = group.finish_commit()
        group.arm(1, Fault(kind=FaultKind.KILL, step=2, phase=FaultPhase.FORWARD))
        carried = positions[0].carried
        ended = group.train(four, range(4), step=step, sources=sources, carried=carried)
        assert isinstance(ended[1], Died)
        step, positions, sources = group.finish_commit()
        assert step == 1
        found = held(positions, step)
        assert all(made_of(layer, found) for layer in LAYERS)
        ended = group.train(one_pipeline(config, 3), (0, 2, 3), step=step, sources=sources, carried=carried)
        assert state_sha256(ended) == expected


def test_an_owner_and_a_copy_may_die_together_where_there_are_two(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, steps=6, replicas=2))
    expected = run_threads(job(config)).state_sha256
    four = copied(job(config, ranks=2, schedule="1f1b"), copies=2)
    with RankGroup(config, 4) as group:
        for number in (1, 2):
            group.arm(number, Fault(kind=FaultKind.KILL, step=STEP, phase=FaultPhase.BACKWARD))
        ended = group.train(four, range(4))
        assert {number for number, end in ended.items() if isinstance(end, Died)} >= {1}
        step, positions, sources = group.finish_commit()
        left = sorted(positions)
        found = held(positions, step)
        assert all(made_of(layer, found) for layer in LAYERS)
        alone = one_pipeline(config, len(left))
        assert state_sha256(group.train(alone, left, step=step, sources=sources)) == expected
