"""A batch that grows as layers freeze: the bits of a plain loop that takes the same samples, whatever pipelines run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, state_sha256
from reference import train_plainly
from test_engine_bits import losses
from torch import nn

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.course import Course, Leg
from workers.checkpoint.folder import checkpoints, read_manifest
from workers.config import DataConfig, FreezeConfig, WorkerConfig
from workers.data.sampling import samples_at, samples_digest
from workers.fault_injection.points import FaultPhase
from workers.launch.ranks import LaunchedRun
from workers.protocol.reports import PrefixFrozen, StepReport

SCHEDULE = ((3, 5), (6, 7))
SCALE = FreezeConfig(method="prefix", schedule=SCHEDULE, batch="scale", lr="sqrt", frozen_cost=0.1)
"""Of 8 layers, 5 frozen ones leave 3.5, so there are twice as many replicas, and 7 leave 1.7: four times as many."""
STEPS = 20
"""20 steps of the first batch are 2 of it, 3 of twice as many, and 3 of four times as many, which take 20 in all."""


def config_of(output: Path, trait: str = "plain", **changes: object) -> WorkerConfig:
    keys = {"steps": STEPS, "microbatches": 1, "freeze": SCALE, **changes}
    return small_config(output, trait, **keys)


def course_of(config: WorkerConfig) -> Course:
    """As it follows from the schedule."""
    first, batch = config.pipeline.replicas, config.course().legs[0].batch
    size = config.pipeline.microbatch_size
    legs = [
        Leg(
            step=step,
            sample=sample * batch,
            replicas=times * first,
            microbatches=config.microbatches,
            microbatch_size=size,
            lr_factor=times**0.5,
        )
        for step, sample, times in ((3, 2, 2), (6, 8, 4))
    ]
    return config.course(tuple(legs))


def legs(run: LaunchedRun) -> list[Leg]:
    return [r.leg for r in run.reports if isinstance(r, PrefixFrozen) and r.leg is not None]


def steps(run: LaunchedRun) -> list[StepReport]:
    return [r for r in run.reports if isinstance(r, StepReport)]


def frozen_by_hand(step: int, microbatch: int, name: str, module: nn.Module) -> list[str]:
    layers = [layers for first, layers in SCHEDULE if first <= step]
    below = int(name.removeprefix("l")) < (layers[-1] if layers else 0)
    return [key for key, _ in module.named_parameters()] if below else []


@pytest.mark.each_choice
@pytest.mark.parametrize("trait", ["plain", "dropout", "attention"])
@pytest.mark.parametrize(
    "shape",
    [
        {"ranks": 1},
        {"ranks": 3, "schedule": "gpipe", "counts": (3, 3, 2)},
        {"ranks": 2, "schedule": "zb-h1", "recompute": True},
    ],
)
def test_the_bits_are_those_of_a_plain_loop_with_the_batch_of_each_leg(
    tmp_path: Path, trait: str, shape: dict[str, Any]
) -> None:
    config = config_of(tmp_path, trait)
    course = course_of(config)
    expected, expected_losses = train_plainly(config, tmp_path, frozen=frozen_by_hand, course=course)
    run = run_threads(job(config, **shape))
    assert run.state_sha256 == expected
    assert losses(run) == expected_losses
    assert legs(run) == list(course.further)
    assert [r.samples for r in steps(run)] == [2, 2, 4, 4, 4, 8, 8, 8]
    # The rate of the schedule where as many samples are taken, by the root of how many times the batch is.
    keeping = SCALE.model_copy(update={"batch": "keep"})
    kept = run_threads(job(changed(config, freeze=keeping, output=str(tmp_path / "k"))))
    rates = [r.lr for r in steps(kept)]
    along = [(0, 1.0), (1, 1.0), (2, 2**0.5), (4, 2**0.5), (6, 2**0.5), (8, 2.0), (12, 2.0), (16, 2.0)]
    assert [r.lr for r in steps(run)] == [rates[at] * factor for at, factor in along]


@pytest.mark.each_choice
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
@pytest.mark.parametrize("pipelines", [4, 2])
def test_any_number_of_pipelines_has_the_same_bits_more_than_there_are_replicas_too(
    tmp_path: Path, shard: str, pipelines: int
) -> None:
    config = config_of(tmp_path, microbatches=2, shard=shard)
    expected = ""
    for number in (1, pipelines):
        work = job(config, ranks=1 if number > 1 else 2)
        plan = replace(work.plan, pipelines=number, shard=shard)
        run = run_threads(replace(work, plan=plan))
        expected = expected or run.state_sha256
        assert run.state_sha256 == expected
        assert [r.samples for r in steps(run)] == [4, 4, 8, 8, 8, 16, 16, 16]


@pytest.mark.parametrize("buckets", [1, 2])
def test_each_sample_comes_once_in_each_epoch(tmp_path: Path, buckets: int) -> None:
    config = config_of(
        tmp_path, replicas=2, steps=30, data=DataConfig(source="small_models:Vectors", buckets=buckets)
    )
    run = run_threads(job(config, ranks=1))
    course = course_of(config)
    from workers.data.buckets import Buckets

    samples = 64
    stream = samples if buckets == 1 else Buckets(samples, buckets, course)
    for report in steps(run):
        leg = course.at(report.step)
        used = {
            number: samples_at(config.job.seed, course.positions(report.step, number), stream)
            for number in range(leg.replicas * leg.microbatches)
        }
        assert report.samples_digest == samples_digest(used)


# Where the batch grows with the next step, and amid a leg.
@pytest.mark.parametrize(
    "stop_at", [2, 4, 5, *(pytest.param(step, marks=pytest.mark.soak) for step in (1, 3, 6, 7))]
)
def test_stop_and_resume_at_any_step(tmp_path: Path, stop_at: int) -> None:
    config = config_of(tmp_path / "quiet", "batchnorm", validate_every=3)
    expected = run_threads(job(config, ranks=2, schedule="1f1b"))
    course = course_of(config)
    again = changed(config, output=str(tmp_path / "stopped"))
    stopped = run_threads(job(again, stop_at=stop_at, ranks=stop_at % 2 + 1))
    (newest,) = checkpoints(again.job.folder)
    manifest = read_manifest(newest)
    assert manifest.samples == course.taken(stop_at)
    assert manifest.carried.legs == tuple(leg for leg in course.further if leg.step <= stop_at + 1)
    resumed = run_threads(job(again, start=newest, generation=2, ranks=(stop_at + 1) % 2 + 1))
    assert resumed.state_sha256 == expected.state_sha256
    assert legs(stopped) + legs(resumed) == legs(expected)


@pytest.mark.parametrize(
    ("step", "phase"),
    [
        (2, FaultPhase.IN_COMMIT),
        (2, FaultPhase.AFTER_COMMIT),
        pytest.param(3, FaultPhase.FORWARD, marks=pytest.mark.soak),
        (3, FaultPhase.BEFORE_COMMIT),
        pytest.param(5, FaultPhase.IN_COMMIT, marks=pytest.mark.soak),
        (6, FaultPhase.BACKWARD),
        pytest.param(8, FaultPhase.IN_COMMIT, marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_comes_after_a_loss_learns_the_batch(
    tmp_path: Path, step: int, phase: FaultPhase
) -> None:
    config = drilled(config_of(tmp_path, "dropout", microbatches=2))
    expected = run_threads(job(config))
    three = job(config, ranks=3, schedule="1f1b")
    with RankGroup(config, 4) as group:
        ended = group.train_with_loss(three, step, phase)
        assert state_sha256(ended) == expected.state_sha256
        told = {report.leg for report in group.of(PrefixFrozen)}
    assert told == set(legs(expected))


def test_pipetransformer_checks_after_as_many_samples_as_before(tmp_path: Path) -> None:
    paper = {"method": "pipetransformer", "warm_up": 1, "check_every": 4, "alpha": 0.5, "frozen_cost": 0.1}
    freeze = FreezeConfig.model_validate({**paper, "batch": "scale"})
    config = config_of(tmp_path, steps=40, freeze=freeze)
    run = run_threads(job(config, ranks=1))
    moved = [r.step for r in run.reports if isinstance(r, PrefixFrozen)]
    assert legs(run)
    assert len([step for step in moved if step > legs(run)[0].step]) > 0, "no check once the batch had grown"
    course = config.course(tuple(legs(run)))
    for step in moved:
        # In steps of the first batch, from the warm-up on: an interval of 4 ended in the step before.
        began, ended = (course.along(steps) - 1 for steps in (step - 2, step - 1))
        assert began // 4 < ended // 4
    assert (
        run_threads(job(changed(config, output=str(tmp_path / "two")), ranks=2)).state_sha256
        == run.state_sha256
    )


def test_a_batch_that_never_grows_is_that_of_keep(tmp_path: Path) -> None:
    freeze = SCALE.model_copy(update={"frozen_cost": 1.0, "lr": "linear"})
    scaled = run_threads(job(config_of(tmp_path / "scale", freeze=freeze)))
    kept = run_threads(job(config_of(tmp_path / "keep", freeze=freeze.model_copy(update={"batch": "keep"}))))
    assert legs(scaled) == []
    assert scaled.state_sha256 == kept.state_sha256
    assert len(steps(scaled)) == STEPS
