"""Samples of the gradient's change: by hand, on a loss of known curvature; weights are not affected."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from jobs import job, small_config
from quadratic import SMOOTHNESS, WIDTH
from test_freezing_training import METHODS, frozen_job

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.search.convergence import CurvatureSample, estimate
from workers.checkpoint.folder import checkpoints
from workers.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, WorkerConfig
from workers.gradients.curvature import CurvatureProbe
from workers.launch.ranks import LaunchedRun
from workers.protocol.reports import CurvatureReport

LR = 0.02


def quadratic_config(output: Path, *, tied: bool = False, **changes: object) -> WorkerConfig:
    fields = {
        "model": ModelConfig(factory="quadratic:model", arguments={"tied": tied}),
        "data": DataConfig(source="quadratic:Alike"),
        "optimizer": OptimizerConfig(
            name="sgd", lr=LR, momentum=0.0, weight_decay=0.0, min_lr_fraction=1.0, clip_norm=None
        ),
        "curvature_every": 1,
    }
    return small_config(output, **{**fields, **changes})


def parts(run: LaunchedRun) -> dict[int, list[CurvatureReport]]:
    """The reports of each step, in order of ranks."""
    found: dict[int, list[CurvatureReport]] = defaultdict(list)
    for report in run.reports:
        if isinstance(report, CurvatureReport):
            found[report.step].append(report)
    return {step: sorted(found[step], key=lambda part: part.rank) for step in sorted(found)}


def sums(run: LaunchedRun) -> dict[int, tuple[float, float, float]]:
    """For each step, squared norms over all ranks: gradient change, weight change, gradient."""
    return {
        step: (
            sum(part.gradient_change_sq for part in ranks),
            sum(part.weight_change_sq for part in ranks),
            sum(part.gradient_sq for part in ranks),
        )
        for step, ranks in parts(run).items()
    }


def samples(run: LaunchedRun) -> list[CurvatureSample]:
    return [
        CurvatureSample(gradient_change=change**0.5, weight_change=moved**0.5, gradient=square**0.5)
        for change, moved, square in sums(run).values()
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_curvature_of_a_quadratic_loss_is_found(tmp_path: Path, replicas: int) -> None:
    config = quadratic_config(tmp_path, replicas=replicas)
    found = samples(run_threads(job(config, ranks=2, layers=4)))
    assert len(found) == config.job.steps - 1
    assert estimate(found).smoothness == pytest.approx(SMOOTHNESS, rel=1e-5)
    # The residual r shrinks by a factor of 1 - lr L per step; each layer's gradient is its factor times r.
    first = sum((2 * index - (WIDTH - 1)) ** 2 for index in range(WIDTH)) * SMOOTHNESS
    shrunk = 1 - LR * SMOOTHNESS
    for step, sample in enumerate(found, 1):
        assert sample.gradient**2 == pytest.approx(first * shrunk ** (2 * step), rel=1e-5)
        moved = LR**2 * first * shrunk ** (2 * step - 2)
        assert sample.weight_change**2 == pytest.approx(moved, rel=1e-5)


def test_a_tied_parameter_counts_once(tmp_path: Path) -> None:
    run = run_threads(job(quadratic_config(tmp_path, tied=True), ranks=2, layers=4))
    # One parameter is added twice, two others once: (1 + 1)^2 + 2^2 + 0.5^2.
    assert estimate(samples(run)).smoothness == pytest.approx(4 + 4 + 0.25, rel=1e-5)


@pytest.mark.parametrize("trait", ["plain", "tied", "raw-matrix"])
def test_any_partition_gives_the_same_samples_and_the_same_weights(tmp_path: Path, trait: str) -> None:
    off = run_threads(job(small_config(tmp_path, trait)))
    assert not parts(off)
    config = small_config(tmp_path, trait, curvature_every=2)
    one = run_threads(job(config))
    two = run_threads(job(config, ranks=2, schedule="1f1b", counts=(3, 5)))
    assert off.state_sha256 == one.state_sha256 == two.state_sha256
    assert list(sums(one)) == [3, 5]
    assert [len(ranks) for ranks in parts(two).values()] == [2, 2]
    for step, expected in sums(one).items():
        assert sums(two)[step] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("trait", "precision", "shard"),
    [("tied", "float32", "optimizer"), ("plain", "bfloat16", "optimizer"), ("tied", "bfloat16", "gradients")],
)
def test_siblings_that_share_out_states_have_parts_of_the_same_samples(
    tmp_path: Path, trait: str, precision: str, shard: Literal["optimizer", "gradients"]
) -> None:
    config = small_config(tmp_path, trait, curvature_every=2, replicas=3, precision=precision)
    one = job(config)
    # The order of sums is that of the value of `shard`.
    expected = run_threads(replace(one, plan=replace(one.plan, shard=shard, pipelines=1)))
    work = job(config, ranks=2, schedule="1f1b")
    found = run_threads(replace(work, plan=replace(work.plan, shard=shard)))
    assert found.state_sha256 == expected.state_sha256
    assert list(sums(found)) == [3, 5]
    assert [[part.rank for part in ranks] for ranks in parts(found).values()] == [[*range(6)]] * 2
    for step, of_whole_states in sums(expected).items():
        assert sums(found)[step] == pytest.approx(of_whole_states, rel=1e-12)


@pytest.mark.parametrize(
    ("method", "expected"), [("timelyfreeze", [2]), ("apf", []), ("timelyfreeze+apf", [2])]
)
def test_steps_that_may_freeze_are_no_samples(tmp_path: Path, method: str, expected: list[int]) -> None:
    # Nothing is frozen up to step 2, the end of TimelyFreeze's upper half; APF's warm-up ends after step 1.
    config = small_config(tmp_path, steps=6, freeze=METHODS[method])
    off = run_threads(frozen_job(config, ranks=2))
    on = run_threads(frozen_job(changed(config, curvature_every=1), ranks=2))
    assert list(parts(on)) == expected
    assert all(len(ranks) == 2 for ranks in parts(on).values())
    assert on.state_sha256 == off.state_sha256


def test_a_resumed_job_goes_on_sampling(tmp_path: Path) -> None:
    fields = {"steps": 6, "curvature_every": 2, "checkpoint": CheckpointConfig(every_steps=1)}
    whole = run_threads(job(small_config(tmp_path / "whole", **fields), ranks=2))
    config = small_config(tmp_path / "again", **fields)
    stopped = run_threads(job(config, ranks=2, stop_at=2))
    resumed = run_threads(job(config, start=checkpoints(config.job.folder)[0], generation=2))
    assert resumed.state_sha256 == whole.state_sha256
    # What step 2 had kept is lost with the first run.
    assert (list(sums(stopped)), list(sums(resumed)), list(sums(whole))) == ([], [5], [3, 5])
    assert sums(resumed)[5] == pytest.approx(sums(whole)[5], rel=1e-12)


def test_what_is_kept_waits_for_a_skipped_step_and_is_given_up_at_a_freezing_one() -> None:
    reports: list[CurvatureReport] = []
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    unused = torch.nn.Parameter(torch.tensor([5.0]))
    parameters = {(0, "w"): weight, (1, "u"): unused}
    probe = CurvatureProbe(2, 3, parameters, parameters, reports.append)
    weight.grad = torch.tensor([8.0, 0.0])
    probe.observe(2, 4.0, may_freeze=False)
    weight.data = torch.tensor([1.0, 4.0])
    weight.grad = torch.tensor([4.0, 12.0])
    probe.observe(4, 4.0, may_freeze=False)  # step 3 was skipped
    # Mean gradients (2, 0) at (1, 2) and (1, 3) at (1, 4).
    assert [astuple(report) for report in reports] == [pytest.approx((4, 3, 1.0 + 9.0, 4.0, 1.0 + 9.0))]
    assert weight.grad.tolist() == [4.0, 12.0]
    assert weight.tolist() == [1.0, 4.0]
    probe.observe(5, 4.0, may_freeze=True)
    probe.observe(6, 4.0, may_freeze=True)
    probe.observe(7, 4.0, may_freeze=False)
    assert len(reports) == 1
