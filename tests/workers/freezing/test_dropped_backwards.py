"""Plans without the backward passes of frozen stages: the same bits and reports, fewer messages, and no step that
trains what they leave out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import FAMILIES, job, small_config
from rank_group import RankGroup, drilled, state_sha256, with_standbys
from test_engine_bits import losses

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.schedule.expand import schedule_of
from workers.checkpoint.folder import checkpoints, read_manifest
from workers.config import FreezeConfig
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.fault_injection.points import FaultPhase
from workers.launch.ranks import LaunchedJob, LaunchedRun
from workers.protocol.reports import FreezeReport, FrozenCounts, Parted, PrefixFrozen
from workers.step.engine import Engine

PREFIX = 5
FROZEN = FreezeConfig(method="prefix", prefix=PREFIX)
BY_HAND = FreezeConfig(method="prefix", schedule=((3, 3), (5, 5), (8, 2)))


def dropping(work: LaunchedJob, frozen: int = PREFIX) -> LaunchedJob:
    """`work` without the backward passes of stages whose layers are all among the first `frozen`."""
    plan = replace(work.plan, frozen=frozen)
    schedule = schedule_of(plan)
    assert schedule.frozen_stages, "it drops none"
    return replace(work, plan=plan, schedule=schedule)


def reports(run: LaunchedRun) -> list[FreezeReport | FrozenCounts]:
    found = [report for report in run.reports if isinstance(report, FreezeReport | FrozenCounts)]
    return sorted(found, key=lambda each: (type(each).__name__, each.step, each.rank))


@pytest.mark.each_choice
@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize("trait", ["tied", "dropout", "batchnorm", "plain"])
def test_every_family_has_the_bits_and_reports_of_the_plan_that_keeps_them(
    tmp_path: Path, schedule: str, trait: str
) -> None:
    config = small_config(tmp_path, trait, steps=4, freeze=FROZEN)
    ranks = 2 if schedule in ("interleaved", "zbv") else 4
    kept = job(config, ranks=ranks, schedule=schedule, recompute=(1, 6))
    expected = run_threads(kept)
    for frozen in (PREFIX - 2, PREFIX):
        run = run_threads(dropping(kept, frozen))
        assert run.state_sha256 == expected.state_sha256
        assert losses(run) == losses(expected)
        assert reports(run) == reports(expected)


@pytest.mark.each_choice
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
@pytest.mark.parametrize("pipelines", [1, 2])
def test_replicas_and_shards_have_them_too(tmp_path: Path, shard: str, pipelines: int) -> None:
    config = small_config(tmp_path, steps=4, replicas=2, freeze=FROZEN, shard=shard, precision="bfloat16")
    kept = job(config, ranks=2, schedule="zb-h1", counts=(4, 4))
    kept = replace(kept, plan=replace(kept.plan, shard=shard, pipelines=pipelines))
    assert run_threads(dropping(kept)).state_sha256 == run_threads(kept).state_sha256


@pytest.mark.parametrize(
    "freeze",
    [
        FreezeConfig(method="pipetransformer", warm_up=1, check_every=1, alpha=0.5),
        FreezeConfig(method="autofreeze", warm_up=1, check_every=1, autofreeze_percentile=60),
    ],
    ids=lambda freeze: freeze.method,
)
def test_a_rule_finds_the_same_prefix_without_them(tmp_path: Path, freeze: FreezeConfig) -> None:
    config = small_config(tmp_path / "quiet", "batchnorm", steps=12, freeze=freeze)
    expected = run_threads(job(config))
    begun, layers = next(moved for moved in prefixes(expected) if moved[1] >= 2)
    two = job(changed(config, output=str(tmp_path / "two")), ranks=2, schedule="1f1b", counts=(2, 6))
    run_threads(replace(two, stop_at=begun - 1))
    (newest,) = checkpoints(two.config.job.folder)
    assert read_manifest(newest).carried.prefix.layers == layers
    resumed = run_threads(replace(dropping(two, 2), start=newest, generation=2))
    assert resumed.state_sha256 == expected.state_sha256
    assert prefixes(resumed) == [moved for moved in prefixes(expected) if moved[0] > begun]


def prefixes(run: LaunchedRun) -> list[tuple[int, int]]:
    return [(r.step, r.layers) for r in run.reports if isinstance(r, PrefixFrozen)]


def test_nothing_is_computed_or_sent_for_what_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[tuple[int, int]] = Counter()
    send = Engine._send

    def counted(engine: Engine, stream: Any, microbatch: int, tensors: Any) -> None:
        sent[stream.source, stream.target] += 1
        send(engine, stream, microbatch, tensors)

    monkeypatch.setattr(Engine, "_send", counted)
    config = small_config(tmp_path, steps=2, freeze=FROZEN)
    kept = job(config, ranks=4, schedule="1f1b", counts=(2, 3, 2, 1))
    run_threads(kept)
    there, whole = 2 * config.microbatches, dict(sent)
    sent.clear()
    run_threads(dropping(kept))
    back = {pair: count for pair, count in whole.items() if pair[0] > pair[1]}
    assert back == {(1, 0): there, (2, 1): there, (3, 2): there}
    assert {pair: whole[pair] - sent[pair] for pair in whole if whole[pair] != sent[pair]} == {
        (1, 0): there,
        (2, 1): there,
    }


def test_ranks_leave_before_a_step_that_trains_what_the_plan_drops(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, "dropout", steps=10, freeze=BY_HAND))
    expected = run_threads(job(changed(config, output=str(tmp_path / "quiet"))))
    two = job(config, ranks=2, schedule="zb-h1", counts=(3, 5))
    run_threads(job(config, stop_at=2))
    (newest,) = checkpoints(config.job.folder)
    with RankGroup(config, 2) as group:
        # Nothing is frozen yet: not a single step.
        ended = group.train(dropping(two, 3), (0, 1))
        assert ended == {rank: Parted(rank=rank, step=0, thawed=True) for rank in (0, 1)}
        assert group.steps() == {}
        # The prefix grows and shrinks meanwhile.
        ended = group.train(dropping(two, 3), (0, 1), step=2, start=newest)
        assert ended == {rank: Parted(rank=rank, step=7, thawed=True) for rank in (0, 1)}
        assert sorted(group.steps()) == [3, 4, 5, 6, 7]
        step, _, sources = group.finish_commit()
        ended = group.train(two, (0, 1), step=step, sources=sources)
        assert state_sha256(ended) == expected.state_sha256


@pytest.mark.each_choice
@pytest.mark.parametrize("phase", [FaultPhase.FORWARD, FaultPhase.BEFORE_COMMIT, FaultPhase.IN_COMMIT])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_lost_while_they_are_dropped_costs_no_bit(
    tmp_path: Path, lost: int, phase: FaultPhase
) -> None:
    config = drilled(small_config(tmp_path, "batchnorm", steps=6, freeze=FROZEN))
    expected = run_threads(job(config))
    three = dropping(job(config, ranks=3, schedule="1f1b", counts=(3, 2, 3)))
    with RankGroup(config, 4) as group:
        group.arm(lost, Fault(kind=FaultKind.KILL, step=3, phase=phase))
        group.train(three, range(3), plan=with_standbys(three))
        assert (lost, "kill", 3, phase) in group.fired
        reached, _, sources = group.finish_commit()
        members = [3 if number == lost else number for number in range(3)]
        ended = group.train(three, members, plan=with_standbys(three), step=reached, sources=sources)
        assert state_sha256(ended) == expected.state_sha256
