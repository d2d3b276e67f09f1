"""A job that skips one step after the other reports it and ends."""

from __future__ import annotations

import math
from pathlib import Path

from jobs import job, small_config
from rank_group import RankGroup

from workers.commit.commit import CommitDecision
from workers.config import OptimizerConfig
from workers.protocol.loss_scale import LossScale
from workers.protocol.reports import RankPosition, WarningReport
from workers.step.skipped_steps import SkippedSteps


def decision(step: int, norm: float) -> CommitDecision:
    return CommitDecision(
        step=step,
        loss=1.0,
        grad_norm=norm,
        scale=1.0,
        lr=0.01,
        skipped=not math.isfinite(norm),
        requests=frozenset(),
        busy_s=0.0,
    )


def test_only_a_run_of_skipped_steps_is_too_many_and_few_are_warned_of() -> None:
    steps = SkippedSteps(30)
    warned = [step for step in range(1, 30) if steps.count(decision(step, math.inf))]
    assert warned == [1, 10, 15]
    assert not steps.too_many
    assert steps.count(decision(30, 1.0)) is None
    for step in range(31, 61):
        assert not steps.too_many
        warning = steps.count(decision(step, math.nan))
    assert warning is None, "the end is said by the error"
    assert steps.too_many
    assert steps.explain(60).startswith("30 steps in a row up to step 60 changed no weight")


def test_a_warning_tells_the_loss_scale_where_there_is_one() -> None:
    steps = SkippedSteps(30)
    warning = steps.count(decision(1, math.inf), LossScale(value=32768.0))
    assert warning is not None
    assert "step 1 changed no weight: the gradient norm is inf; the loss scale is 32768 now." in warning


def test_a_learning_rate_out_of_all_bounds_ends_the_job_with_no_step_half_done(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(name="sgd", lr=1e30, clip_norm=None, max_skipped_steps=4)
    config = small_config(tmp_path, steps=50, optimizer=optimizer)
    with RankGroup(config, 2) as group:
        ended = group.train(job(config, ranks=2, schedule="1f1b"), range(2))
        positions: dict[int, RankPosition] = group.each("position")
        steps, warnings = group.steps(), group.of(WarningReport)
    for error in (answer.error for answer in ended.values()):
        assert error.startswith("JobError: 4 steps in a row up to step")
        assert "lower optimizer.lr" in error
    assert {(position.step, position.undecided) for position in positions.values()} == {(max(steps), None)}
    assert max(steps) < 50
    skipped = [step for step, report in sorted(steps.items()) if report.skipped]
    assert skipped == list(range(max(steps) - 3, max(steps) + 1))
    assert [warning.text.split(":")[0] for warning in warnings] == [
        f"step {skipped[0]} changed no weight",
        f"2 steps in a row up to step {skipped[1]} changed no weight",
    ]
