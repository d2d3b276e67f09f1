"""Siblings that share out optimizer states train as siblings that have all of them do, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from test_engine_bits import losses, real_config

from benchmarks.parts.rank_threads import run_threads
from planner.schedule.expand import pipeline_schedules
from workers.checkpoint.folder import checkpoints
from workers.config import CheckpointConfig, OptimizerConfig
from workers.launch.ranks import LaunchedJob, LaunchedRun, run_processes
from workers.protocol.reports import StepReport, ValidationReport


def shared(work: LaunchedJob, pipelines: int | None = None) -> LaunchedJob:
    """`work` with states shared out among its pipelines."""
    return replace(work, plan=replace(work.plan, shard="optimizer", pipelines=pipelines))


def assert_same(found: LaunchedRun, expected: LaunchedRun) -> None:
    assert found.state_sha256 == expected.state_sha256
    assert losses(found) == losses(expected)
    for kind, told in ((StepReport, lambda r: (r.step, r.grad_norm, r.skipped)), (ValidationReport, repr)):
        here, there = ([told(r) for r in run.reports if isinstance(r, kind)] for run in (found, expected))
        assert here == there
    digests = [layer for outcome in found.outcomes for layer, _ in outcome.layer_digests]
    assert sorted(digests) == list(range(len(digests))), "each layer is told by one rank"


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("trait", "precision", "schedule", "pipelines"),
    [
        ("plain", "float32", "gpipe", 3),
        ("tied", "bfloat16", "zb-h1", 3),
        ("tied", "float32", "1f1b", 2),
        ("batchnorm", "bfloat16", "1f1b", 2),
        ("dropout", "float16", "zbv", 3),
        ("attention", "bfloat16-autocast", "interleaved", 2),
        ("fixed", "bfloat16", "gpipe", 2),
        ("raw-matrix", "float32", "zb-h1", 3),
        ("plain", "bfloat16", "1f1b", 1),
    ],
)
def test_the_bits_are_those_of_whole_states(
    tmp_path: Path, trait: str, precision: str, schedule: str, pipelines: int
) -> None:
    config = small_config(tmp_path, trait, precision=precision, replicas=3, microbatches=4, validate_every=2)
    expected = run_threads(job(config, ranks=1))
    found = run_threads(shared(job(config, ranks=2, schedule=schedule), pipelines))
    assert len(found.outcomes) == 2 * pipelines
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["gpt-tied", "llama"])
def test_models_in_processes_keep_their_bits_too(tmp_path: Path, name: str) -> None:
    config = real_config(tmp_path, name, precision="bfloat16", replicas=2, microbatches=2, steps=3)
    assert_same(run_processes(shared(job(config, ranks=2, schedule="1f1b"))), run_threads(job(config)))


def test_sgd_and_uneven_shares_keep_their_bits(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)
    config = small_config(tmp_path, replicas=2, optimizer=optimizer)
    work = shared(job(config, ranks=2, schedule="zb-h1"))
    plan = replace(work.plan, shares=(6, 2))
    uneven = replace(work, plan=plan, shared=pipeline_schedules(plan, work.schedule))
    assert_same(run_threads(uneven), run_threads(job(config, ranks=1)))


@pytest.mark.each_choice
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("begins", ["shared", "whole"])
def test_a_checkpoint_goes_on_with_other_ranks_and_whole_states_and_back(
    tmp_path: Path, precision: str, begins: str
) -> None:
    def config(folder: str, **changes: Any) -> Any:
        checkpoint = CheckpointConfig(every_steps=3)
        return small_config(
            tmp_path / folder,
            "tied",
            precision=precision,
            replicas=2,
            steps=6,
            checkpoint=checkpoint,
            **changes,
        )

    expected = run_threads(job(config("quiet"), ranks=1)).state_sha256
    begun = job(config("begun"), ranks=1)
    then = shared(job(config("after"), ranks=4, schedule="zb-h1"))
    if begins == "shared":
        begun, then = shared(job(config("begun"), ranks=2, schedule="1f1b")), job(config("after"), ranks=3)
    stopped = run_threads(replace(begun, stop_at=3))
    assert {outcome.step for outcome in stopped.outcomes} == {3}
    (start,) = checkpoints(str(tmp_path / "begun"))
    assert run_threads(replace(then, start=start)).state_sha256 == expected
