"""The same bits for any partition, any ranks and any host of the ranks; replicas and ties stay equal."""

from pathlib import Path
from typing import Any

import pytest
from jobs import FAMILIES, job, small_config
from test_engine_bits import losses, real_config

from benchmarks.parts.rank_threads import run_threads
from workers.checkpoint.folder import checkpoints, read_layer, read_manifest
from workers.config import CheckpointConfig, ModelConfig, OptimizerConfig
from workers.launch.ranks import LaunchedRun, run_processes
from workers.protocol.reports import SampleReport, StepReport, ValidationReport

TRAITS = ("plain", "dropout", "twice", "tied", "batchnorm")
CUTS = [
    (2, (5, 3)),
    (2, (1, 7)),
    (4, (2, 3, 1, 2)),
    (8, (1,) * 8),
]


# BatchNorm cannot train on microbatches of one row.
@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("trait", "rows"), [(t, r) for t in TRAITS for r in (1, 3) if (t, r) != ("batchnorm", 1)]
)
@pytest.mark.parametrize(("ranks", "counts"), [*reversed(CUTS)])
def test_any_partition_gives_the_same_bits(
    tmp_path: Path, trait: str, rows: int, ranks: int, counts: tuple[int, ...]
) -> None:
    config = small_config(tmp_path, trait, microbatch_size=rows)
    expected = run_threads(job(config))
    # Each cut with each schedule, in one of the two sizes of microbatches.
    schedule = ("1f1b", "zb-h1")[(CUTS.index((ranks, counts)) + rows // 3) % 2]
    run = run_threads(job(config, ranks=ranks, schedule=schedule, counts=counts))
    assert run.state_sha256 == expected.state_sha256
    assert losses(run) == losses(expected)


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "shape",
    [
        {"ranks": 4, "schedule": "1f1b", "counts": (2, 3, 3, 2)},
        {"ranks": 2, "schedule": "1f1b", "counts": (5, 5)},
        {"ranks": 2, "schedule": "zbv"},
    ],
)
@pytest.mark.parametrize(
    ("precision", "tied"),
    [
        ("float32", True),
        ("bfloat16", False),
        ("bfloat16-autocast", False),
        pytest.param("float32", False, marks=pytest.mark.soak),
        pytest.param("bfloat16", True, marks=pytest.mark.soak),
    ],
)
def test_gpt_on_threads_and_processes(
    tmp_path: Path, precision: str, tied: bool, shape: dict[str, Any]
) -> None:
    config = real_config(tmp_path, "gpt", precision=precision, microbatch_size=1)
    config = config.model_copy(
        update={
            "model": ModelConfig(
                family="gpt", layers=8, width=32, heads=2, context=16, tied_embeddings=tied, dropout=0.1
            )
        }
    )
    expected = run_threads(job(config, layers=10)).state_sha256
    assert run_processes(job(config, layers=10, **shape)).state_sha256 == expected


# `make test` runs each pair of the three.
@pytest.mark.parametrize(
    ("family", "trait", "recompute"),
    [
        pytest.param(family, trait, again, marks=() if (row + column + again) % 2 else pytest.mark.soak)
        for row, family in enumerate(FAMILIES)
        for column, trait in enumerate(("twice", "tied"))
        for again in (False, True)
    ],
)
def test_what_is_used_twice_equals_one_rank(tmp_path: Path, family: str, trait: str, recompute: bool) -> None:
    config = small_config(tmp_path, trait)
    expected = run_threads(job(config)).state_sha256
    run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
    assert run.state_sha256 == expected


def test_tied_parameters_stay_equal(tmp_path: Path) -> None:
    config = small_config(tmp_path, "tied", checkpoint=CheckpointConfig(every_steps=5))
    run_threads(job(config, ranks=2, schedule="1f1b"))
    (newest,) = checkpoints(config.job.folder)
    manifest = read_manifest(newest)
    first, last = read_layer(newest, manifest, 0), read_layer(newest, manifest, 7)
    assert first.weights["up.weight"].equal(last.weights["up.weight"])
    assert not first.weights["up.bias"].equal(last.weights["up.bias"])


@pytest.mark.parametrize("trait", ["plain", "tied", "batchnorm", "dropout"])
def test_replicas_follow_the_doubled_batch_and_siblings_stay_equal(tmp_path: Path, trait: str) -> None:
    # AdamW's first steps amplify rounding, because it divides by the magnitude of a gradient near zero.
    sgd = OptimizerConfig(name="sgd", lr=0.05)
    single = run_threads(
        job(small_config(tmp_path, trait, microbatches=4, optimizer=sgd), ranks=2, schedule="1f1b")
    )
    config = small_config(tmp_path, trait, microbatches=2, replicas=2, optimizer=sgd)
    run = run_processes if trait == "tied" else run_threads
    doubled = run(job(config, ranks=2, schedule="1f1b"))
    assert losses(doubled) == pytest.approx(losses(single), rel=1e-5)
    assert_siblings_equal(doubled, 2)
    # The sum over replicas has one order, so it does not depend on the partition either.
    assert run_threads(job(config, ranks=1)).state_sha256 == doubled.state_sha256
    three = small_config(tmp_path, trait, microbatches=2, replicas=3)
    assert_siblings_equal(run_threads(job(three, ranks=2, schedule="gpipe")), 2)


def assert_siblings_equal(run: LaunchedRun, pipeline_ranks: int) -> None:
    assert len(run.outcomes) > pipeline_ranks
    for outcome in run.outcomes:
        assert outcome.layer_digests == run.outcomes[outcome.rank % pipeline_ranks].layer_digests


def test_stop_and_resume_at_any_step_with_another_partition(tmp_path: Path) -> None:
    config = small_config(tmp_path / "quiet", "batchnorm")
    expected = run_threads(job(config, ranks=2, schedule="1f1b"))
    shapes = [
        {"ranks": 1},
        {"ranks": 4, "schedule": "1f1b", "counts": (1, 3, 3, 1)},
        {"ranks": 2, "schedule": "zbv"},
    ]
    for stop_at in range(1, config.job.steps):
        again = small_config(tmp_path / f"stop-{stop_at}", "batchnorm")
        first, second = shapes[stop_at % 3], shapes[(stop_at + 1) % 3]
        stopped = run_threads(job(again, stop_at=stop_at, **first))
        assert stopped.outcomes[0].stopped
        newest = checkpoints(again.job.folder)[0]
        assert newest.step == stopped.outcomes[0].step == stop_at
        resumed = run_threads(job(again, start=newest, generation=2, **second))
        assert resumed.state_sha256 == expected.state_sha256
        assert losses(stopped) + losses(resumed) == losses(expected)


def test_checkpoints_in_the_background_change_nothing_and_are_kept(tmp_path: Path) -> None:
    config = small_config(tmp_path / "quiet", steps=6)
    expected = run_threads(job(config)).state_sha256
    busy = small_config(tmp_path / "busy", steps=6, checkpoint=CheckpointConfig(every_steps=1, keep=3))
    assert run_processes(job(busy, ranks=2, schedule="1f1b")).state_sha256 == expected
    assert [ref.step for ref in checkpoints(busy.job.folder)] == [6, 5, 4]


def test_losses_fall_and_validation_and_samples_agree_across_partitions(tmp_path: Path) -> None:
    config = real_config(tmp_path, "gpt", steps=12, validate_every=6, sample_tokens=8, microbatch_size=4)
    one = run_threads(job(config, layers=8))
    two = run_processes(job(config, layers=8, ranks=2, schedule="interleaved"))
    for kind in (ValidationReport, SampleReport):
        assert [r for r in one.reports if isinstance(r, kind)] == [
            r for r in two.reports if isinstance(r, kind)
        ]
    validations = [r for r in one.reports if isinstance(r, ValidationReport)]
    assert [v.step for v in validations] == [6, 12]
    (first,) = (r.loss for r in one.reports if isinstance(r, StepReport) and r.step == 1)
    assert all(validation.loss < first - 0.5 for validation in validations)
    (sample,) = (r for r in one.reports if isinstance(r, SampleReport))
    assert len(sample.text.encode()) >= 8
