"""Replicas on fewer pipelines than replicas have the bits of one pipeline each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, state_sha256
from test_engine_bits import losses
from test_freezing_training import FIRST, METHODS, SECOND

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from workers.config import CheckpointConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob, run_processes
from workers.protocol.reports import FrozenCounts, ValidationReport


def on(pipelines: int, work: LaunchedJob) -> LaunchedJob:
    return replace(work, plan=replace(work.plan, pipelines=pipelines))


@pytest.mark.each_choice
@pytest.mark.parametrize("case", ["plain", "tied", "batchnorm", "dropout", "buckets", "timelyfreeze+apf"])
@pytest.mark.parametrize(
    ("pipelines", "ranks", "schedule"), [(2, 2, "1f1b"), (1, 2, "zb-h1"), (1, 1, "gpipe")]
)
def test_fewer_pipelines_give_the_same_bits(
    tmp_path: Path, case: str, pipelines: int, ranks: int, schedule: str
) -> None:
    about: dict[str, Any] = {}
    fields: dict[str, Any] = {"microbatches": 2, "replicas": 3, "validate_every": 2}
    trait = case
    if case in METHODS:
        trait, fields["freeze"], fields["steps"], fields["microbatches"] = "batchnorm", METHODS[case], 8, 4
        about["freeze_plans"] = (FIRST, SECOND)
    if case == "buckets":
        trait = "plain"
    config = small_config(tmp_path, trait, **fields)
    if case == "buckets":
        config = config.model_copy(update={"data": config.data.model_copy(update={"buckets": 3})})
    expected = run_threads(job(config, ranks=2, schedule="1f1b", **about))
    run = run_threads(on(pipelines, job(config, ranks=ranks, schedule=schedule, **about)))
    assert len(run.outcomes) == pipelines * ranks
    assert run.state_sha256 == expected.state_sha256
    assert losses(run) == losses(expected)
    assert [r for r in run.reports if isinstance(r, ValidationReport)] == [
        r for r in expected.reports if isinstance(r, ValidationReport)
    ]
    assert frozen(run.reports) == frozen(expected.reports)


def frozen(reports: list[Any]) -> dict[tuple[int, str], tuple[int, int]]:
    """For each (layer, parameter), the passes in which it was frozen, and all passes."""
    counted: dict[tuple[int, str], tuple[int, int]] = {}
    for report in reports:
        if isinstance(report, FrozenCounts):
            for layer, name, count in report.counts:
                before = counted.get((layer, name), (0, 0))
                counted[layer, name] = before[0] + count, before[1] + report.passes
    return counted


def test_processes_on_fewer_pipelines_resume_a_checkpoint_of_more(tmp_path: Path) -> None:
    config = small_config(tmp_path / "quiet", "batchnorm", microbatches=2, replicas=2)
    expected = run_threads(job(config, ranks=2, schedule="1f1b"))
    config = changed(config, output=str(tmp_path / "again"), checkpoint=CheckpointConfig(every_steps=1))
    run = run_processes(on(1, job(config, ranks=2, schedule="1f1b")))
    assert run.state_sha256 == expected.state_sha256


def test_a_lost_pipelines_replica_goes_on_at_the_other(tmp_path: Path) -> None:
    config = small_config(tmp_path, "batchnorm", microbatches=2, replicas=2, steps=6, precision="bfloat16")
    config = drilled(config)
    expected = run_threads(job(config, ranks=2, schedule="1f1b"))
    both = job(config, ranks=2, schedule="1f1b")
    with RankGroup(config, 4) as group:
        group.arm(0, Fault(kind=FaultKind.KILL, step=3, phase=FaultPhase.BACKWARD))
        group.train(both, range(4))
        step, positions, sources = group.finish_commit()
        assert step == 2
        assert {piece.layer for p in positions.values() for piece in p.holds} == set(range(8))
        one = on(1, job(config, ranks=3, schedule="1f1b"))
        ended = group.train(one, (3, 1, 2), step=step, sources=sources)
        assert state_sha256(ended) == expected.state_sha256
        assert sorted(group.steps()) == list(range(1, 7))
