"""`float16`: steps whose gradients overflow are skipped and lower the loss scale, with the same bits wherever it runs
and whatever is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, state_sha256
from reference import train_plainly

from benchmarks.parts.rank_threads import run_threads
from workers.checkpoint.folder import checkpoints, read_manifest, write_manifest
from workers.config import CheckpointConfig, ModelConfig, OptimizerConfig, WorkerConfig
from workers.fault_injection.fault import FaultPhase
from workers.launch.ranks import LaunchedRun, assignment
from workers.protocol.carried import Carried
from workers.protocol.errors import JobError
from workers.protocol.loss_scale import INITIAL, LossScale
from workers.protocol.reports import StepReport
from workers.rank import Rank

STEPS = 9
STEEP = 8.0
"""Factor on the loss with which the first steps overflow."""


def config(folder: Path, trait: str = "plain", factor: float = STEEP, **changes: Any) -> WorkerConfig:
    model = ModelConfig(factory="small_models:model", arguments={"trait": trait, "factor": factor})
    fields: dict[str, Any] = {"precision": "float16", "steps": STEPS, "model": model}
    return small_config(folder, **{**fields, **changes})


def skipped(run: LaunchedRun) -> list[bool]:
    return [report.skipped for report in run.reports if isinstance(report, StepReport)]


@pytest.fixture
def grows_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale grows after two steps in a row without overflow."""
    monkeypatch.setattr("workers.protocol.loss_scale.GROWS_AFTER", 2)


def test_overflow_halves_the_scale_and_a_long_time_without_doubles_it() -> None:
    scale = LossScale()
    assert scale.value == INITIAL
    for _ in range(2):
        scale = scale.after(skipped=True)
    assert scale == LossScale(value=INITIAL / 4)
    for _ in range(1999):
        scale = scale.after(skipped=False)
    assert scale == LossScale(value=INITIAL / 4, applied=1999)
    assert scale.after(skipped=True) == LossScale(value=INITIAL / 8)
    assert scale.after(skipped=False) == LossScale(value=INITIAL / 2)


@pytest.mark.parametrize("value", [[1.0], "1", [0.0, 1], [1.0, -1], [1.0, 1, 1]])
def test_what_is_no_scale_is_refused(value: object) -> None:
    assert LossScale.from_json(
        json.loads(json.dumps(LossScale(value=2.0, applied=3).to_json()))
    ) == LossScale(value=2.0, applied=3)
    with pytest.raises(ValueError, match="wrong loss_scale"):
        LossScale.from_json(value)


@pytest.mark.each_choice
@pytest.mark.parametrize("trait", ["plain", "dropout", "batchnorm", "tied"])
@pytest.mark.parametrize(
    "shape",
    [
        {"ranks": 2, "schedule": "zb-h1"},
        {"ranks": 4, "schedule": "1f1b"},
        {"ranks": 2, "schedule": "zbv"},
    ],
)
def test_partitions_and_families_equal_the_plain_loop(
    tmp_path: Path, trait: str, shape: dict[str, Any], grows_soon: None
) -> None:
    settings = config(tmp_path, trait)
    if trait == "tied":  # the plain loop knows no ties
        expected = run_threads(job(settings)).state_sha256
    else:
        expected, _ = train_plainly(settings, tmp_path)
    run = run_threads(job(settings, **shape))
    assert run.state_sha256 == expected
    assert 0 < sum(skipped(run)) < STEPS


def test_gradients_and_norms_are_those_without_a_scale(tmp_path: Path) -> None:
    """At a scale that nothing overflows at, only what would have become 0 may differ."""
    run = run_threads(job(config(tmp_path, factor=0.01)))
    wide = run_threads(job(config(tmp_path, factor=0.01, precision="float32")))
    pairs = zip(*([r for r in one.reports if isinstance(r, StepReport)] for one in (run, wide)), strict=True)
    for ours, theirs in pairs:
        assert not ours.skipped
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.02)
        assert ours.loss == pytest.approx(theirs.loss, rel=0.01)


def test_replicas_and_fewer_pipelines_have_the_same_bits(tmp_path: Path, grows_soon: None) -> None:
    settings = config(tmp_path, replicas=2)
    one = run_threads(job(settings, ranks=2, schedule="1f1b"))
    assert 0 < sum(skipped(one)) < STEPS
    again = run_threads(job(settings, ranks=1))
    assert again.state_sha256 == one.state_sha256


@pytest.mark.parametrize(
    "stop_at", [2, 6, *(pytest.param(step, marks=pytest.mark.soak) for step in (1, 3, 4, 5, 7, 8))]
)
def test_stop_and_resume_at_any_step(tmp_path: Path, stop_at: int, grows_soon: None) -> None:
    expected = run_threads(job(config(tmp_path / "quiet"), ranks=2, schedule="1f1b"))
    scales = [LossScale()]
    for overflowed in skipped(expected):
        scales.append(scales[-1].after(skipped=overflowed))
    assert len({*scales[1:STEPS]}) > 3
    settings = config(tmp_path / "stopped")
    stopped = run_threads(job(settings, stop_at=stop_at, ranks=2, schedule="1f1b"))
    (newest, *_) = checkpoints(settings.job.folder)
    assert read_manifest(newest).carried.loss_scale == scales[stop_at]
    resumed = run_threads(job(settings, start=newest, generation=2, ranks=1))
    assert resumed.state_sha256 == expected.state_sha256
    assert skipped(stopped) + skipped(resumed) == skipped(expected)


@pytest.mark.each_choice
@pytest.mark.parametrize("phase", [FaultPhase.BACKWARD, FaultPhase.IN_COMMIT])
@pytest.mark.parametrize("step", [2, 6])
def test_a_rank_that_comes_after_a_loss_learns_the_scale(
    tmp_path: Path, phase: FaultPhase, step: int
) -> None:
    settings = drilled(config(tmp_path))
    expected = run_threads(job(settings))
    assert 2 < sum(skipped(expected)) < 6
    three = job(settings, ranks=3, schedule="1f1b")
    with RankGroup(settings, 4) as group:
        ended = group.train_with_loss(three, step, phase)
        assert state_sha256(ended) == expected.state_sha256
        told = group.steps()
    assert [told[step].skipped for step in range(1, STEPS + 1)] == skipped(expected)


def test_ranks_that_are_all_new_are_told_the_scale(tmp_path: Path) -> None:
    settings = drilled(config(tmp_path))
    expected = run_threads(job(settings))
    two = job(settings, ranks=2, schedule="1f1b")
    with RankGroup(settings, 4) as group:
        ended = group.train(two, (0, 1), regroup_by=0)
        assert parted(ended) == {1}
        step, positions, sources = group.finish_commit()
        (carried,) = {position.carried for position in positions.values() if position.step == step}
        assert carried is not None
        assert carried.loss_scale is not None
        assert carried.loss_scale.value < INITIAL
        ended = group.train(two, (2, 3), step=step, sources=sources, carried=carried)
        assert state_sha256(ended) == expected.state_sha256


def test_a_checkpoint_without_a_scale_is_damaged(tmp_path: Path) -> None:
    settings = config(tmp_path)
    run_threads(job(settings, stop_at=2))
    (newest, *_) = checkpoints(settings.job.folder)
    write_manifest(newest.path, replace(read_manifest(newest), carried=Carried()))
    rank = Rank(settings, 0, lambda report: None)
    rank.setup()
    damage = rank.follow(replace(assignment(job(settings), 0), step=2, start=newest))
    assert damage is not None
    assert damage.file == "manifest.json"
    assert "has no loss scale" in damage.problem


def test_gradients_that_overflow_at_every_scale_end_the_job(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(lr=0.01, max_skipped_steps=4)
    settings = config(tmp_path, factor=1e30, optimizer=optimizer, checkpoint=CheckpointConfig())
    with pytest.raises(
        JobError, match=r"overflowed float16 at every loss scale down to 8192 .* \"bfloat16\""
    ):
        run_threads(job(settings))
