"""Gradients summed microbatch by microbatch over all replicas: the bits of one order, whatever cuts the work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job, small_config
from reference import train_plainly
from test_engine_bits import losses, real_config
from test_shared_states import assert_same

from benchmarks.parts.rank_threads import run_threads
from planner.rounds import order
from planner.schedule.expand import pipeline_schedules
from workers.config import WorkerConfig
from workers.launch.ranks import LaunchedJob, LaunchedRun, run_processes


def folded(work: LaunchedJob, pipelines: int | None = None, shares: tuple[int, ...] = ()) -> LaunchedJob:
    """`work` with gradients summed by the owners of shards."""
    plan = replace(work.plan, shard="gradients", pipelines=pipelines, shares=shares)
    return replace(work, plan=plan, shared=pipeline_schedules(plan, work.schedule) if shares else ())


def plain(config: WorkerConfig, folder: Path) -> tuple[str, list[float]]:
    """`state_sha256` and losses of an ordinary loop that adds gradients in the order of summation."""
    return train_plainly(config, folder, order=order(job(config).plan))


def assert_plain(found: LaunchedRun, expected: tuple[str, list[float]]) -> None:
    assert found.state_sha256 == expected[0]
    assert losses(found) == expected[1]


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("trait", "precision", "schedule", "ranks", "pipelines"),
    [
        ("plain", "float32", "gpipe", 1, 3),
        ("dropout", "float32", "1f1b", 2, 3),
        ("tied", "bfloat16", "zb-h1", 3, 3),
        ("tied", "float32", "interleaved", 2, 2),
        ("raw-matrix", "bfloat16", "zb-h1", 2, 2),
        ("attention", "bfloat16-autocast", "1f1b", 2, 1),
        ("plain", "bfloat16", "zbv", 2, 3),
        ("fixed", "bfloat16", "interleaved", 2, 3),
        ("dropout", "float16", "zbv", 1, 2),
        ("twice", "float32", "1f1b", 3, 1),
        ("two-outputs", "float32", "gpipe", 2, 2),
    ],
)
def test_the_bits_are_those_of_a_plain_loop_in_that_order(
    tmp_path: Path, trait: str, precision: str, schedule: str, ranks: int, pipelines: int
) -> None:
    """Three replicas: with two pipelines, only one of them has work in the last window."""
    config = small_config(tmp_path, trait, precision=precision, replicas=3, microbatches=4, validate_every=2)
    found = run_threads(folded(job(config, ranks=ranks, schedule=schedule), pipelines))
    assert len(found.outcomes) == ranks * pipelines
    assert_same(found, run_threads(folded(job(config), 1)))
    if trait != "tied":  # the loop knows no ties
        assert_plain(found, plain(config, tmp_path))


@pytest.mark.parametrize(
    ("schedule", "shares"), [("1f1b", (6, 2)), ("zb-h1", (3, 5)), ("interleaved", (2, 6)), ("zbv", (4, 2, 6))]
)
def test_uneven_shares_keep_the_bits(tmp_path: Path, schedule: str, shares: tuple[int, ...]) -> None:
    config = small_config(tmp_path, "dropout", replicas=sum(shares) // 4, precision="bfloat16")
    found = run_threads(folded(job(config, ranks=2, schedule=schedule), shares=shares))
    assert_plain(found, plain(config, tmp_path))


@pytest.mark.parametrize("name", ["gpt-tied", "llama"])
def test_models_in_processes_keep_their_bits_too(tmp_path: Path, name: str) -> None:
    config = real_config(tmp_path, name, precision="bfloat16", replicas=2, microbatches=2, steps=3)
    found = run_processes(folded(job(config, ranks=2, schedule="1f1b")))
    assert_same(found, run_threads(folded(job(config), 1)))


def test_the_order_differs_from_that_of_whole_replicas(tmp_path: Path) -> None:
    """Else these tests would show nothing."""
    config = small_config(tmp_path, replicas=3)
    assert run_threads(folded(job(config), 1)).state_sha256 != run_threads(job(config)).state_sha256
