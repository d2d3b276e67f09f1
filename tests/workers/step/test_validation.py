"""A validation takes each held-out sample once, whatever the partition, and can end the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import masked_data
import pytest
import torch
from jobs import job, small_config
from masked_data import LENGTH, VOCABULARY, Masked, whole
from rank_group import RankGroup, drilled, with_standbys
from torch import nn
from torch.nn import functional

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from orchestrator.cli.exporting import export_command
from workers.build import build_module
from workers.checkpoint.folder import best_checkpoint, checkpoints, read_manifest
from workers.commit.unfinished import Greeting, Unfinished, agree, agreed_validations
from workers.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, WorkerConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.models.registry import build_definition
from workers.protocol.errors import JobError
from workers.protocol.goals import PastValidation
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import ValidationReport

LAYERS = 6
HELD_OUT = [1, 2, 7, 8, 9, 11, 19]
"""Fewer than a microbatch, whole ones, more than a step's, and two steps' with a rest."""


def config_of(folder: Path, held_out: int = 11, batches: int | None = None, **changes: Any) -> WorkerConfig:
    model = ModelConfig(family="gpt", layers=4, width=16, heads=2, context=LENGTH, vocabulary=VOCABULARY)
    data = DataConfig(
        source="masked_data:Masked", arguments={"held_out": held_out}, validation_batches=batches
    )
    return small_config(folder, model=model, data=data, **changes)


def validations(config: WorkerConfig, **how: Any) -> list[ValidationReport]:
    masked_data.READ.clear()
    reports = run_threads(job(config, layers=LAYERS, **how)).reports
    return [each for each in reports if isinstance(each, ValidationReport)]


@pytest.mark.parametrize("held_out", HELD_OUT)
def test_each_sample_is_read_once_and_every_partition_says_the_same(held_out: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, held_out, steps=1)
    expected = validations(config)
    assert len(expected) == 1
    assert sorted(masked_data.READ) == [*range(held_out)]
    assert validations(config, ranks=2, schedule="1f1b") == expected
    # First and last stage read, for inputs and for targets.
    assert sorted(masked_data.READ) == sorted([*range(held_out)] * 2)
    replicas = changed(config, replicas=2, microbatches=2)
    (found,) = validations(replicas, ranks=2, schedule="1f1b")
    assert sorted(masked_data.READ) == sorted([*range(held_out)] * 2)
    assert found.metrics.keys() == {"perplexity"}


def test_the_loss_is_the_mean_over_all_held_out_targets(tmp_path: Path) -> None:
    """As a plain loop finds it that takes them all at once, before the first update has any effect."""
    config = config_of(tmp_path, 11, steps=1)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 1e-30})})
    (found,) = validations(config, ranks=2, schedule="1f1b")
    definition = build_definition(config.model, VOCABULARY)
    modules = nn.Sequential(*(build_module(definition, n, config.job.seed) for n in range(LAYERS))).eval()
    inputs, targets = whole(Masked(), [Masked.train_samples + n for n in range(11)])
    with torch.no_grad():
        loss = float(functional.cross_entropy(modules(inputs).flatten(0, 1), targets.flatten()))
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(2.718281828459045**loss, rel=1e-4)


def test_a_limit_takes_the_first_steps_worth(tmp_path: Path) -> None:
    validations(config_of(tmp_path, 19, batches=2, steps=1))
    assert sorted(masked_data.READ) == [*range(16)]


def test_a_job_ends_at_the_validation_that_reaches_what_was_asked(tmp_path: Path) -> None:
    """With a checkpoint of that step, on one rank and on two; and a rank that is killed then changes nothing."""
    config = config_of(tmp_path / "quiet", steps=8, validate_every=1)
    told = {each.step: each.loss for each in validations(config)}
    first = next(
        step for step in range(8, 1, -1) if told[step] < min(told[before] for before in range(1, step))
    )
    goal = f"loss <= {told[first]!r}"
    asked = config_of(tmp_path / "asked", steps=8, validate_every=1, stop_at=goal)
    for number, ranks in enumerate((1, 2)):
        here = changed(asked, output=str(tmp_path / f"asked {number}"))
        run = run_threads(job(here, ranks=ranks, schedule="1f1b", layers=LAYERS))
        assert {(each.step, each.stopped) for each in run.outcomes} == {(first, False)}
        assert {each.reached for each in run.outcomes} == {f"loss {told[first]:.4g}"}
        assert [ref.step for ref in checkpoints(here.job.folder)] == [first]
    lost = drilled(changed(asked, output=str(tmp_path / "lost")))
    three = job(lost, ranks=3, schedule="1f1b", layers=LAYERS)
    with RankGroup(lost, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=first, phase=FaultPhase.AFTER_COMMIT))
        group.train(three, range(3), plan=with_standbys(three))
        assert group.fired == [(1, "kill", first, FaultPhase.AFTER_COMMIT)]
        step, _, sources = group.finish_commit()
        assert step == first
        two = job(lost, ranks=2, schedule="1f1b", layers=LAYERS)
        ended = group.train(two, (0, 2), step=step, sources=sources)
        assert {(outcome.step, outcome.reached) for outcome in ended.values()} == {
            (first, f"loss {told[first]:.4g}")
        }
    assert [ref.step for ref in checkpoints(lost.job.folder)] == [first]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_checkpoint_is_kept_beside_the_newest(ranks: int, tmp_path: Path) -> None:
    """With a learning rate at which the model gets worse again."""
    config = config_of(
        tmp_path,
        steps=3,
        validate_every=1,
        checkpoint=CheckpointConfig(keep=1, keep_best="loss"),
        optimizer=OptimizerConfig(lr=0.2, clip_norm=None),
    )
    told = {each.step: each.loss for each in validations(config, ranks=ranks, schedule="1f1b")}
    best = min(told, key=lambda step: told[step])
    assert best < 3, told
    found = {ref.step: ref.path for ref in checkpoints(config.job.folder)}
    assert found.keys() == {best, 3}
    assert best_checkpoint(config.job.folder, "loss") == found[best]
    metrics = {
        step: read_manifest(CheckpointRef(path=path, step=step)).metrics for step, path in found.items()
    }
    assert {step: each["loss"] for step, each in metrics.items()} == {step: told[step] for step in found}
    (line,) = export_command(config.job.folder, str(tmp_path / "best.safetensors"), force=False, best=True)
    assert f"of step {best}" in line
    (line,) = export_command(config.job.folder, str(tmp_path / "newest.safetensors"), force=False)
    assert "of step 3" in line


def test_a_loss_of_a_rank_after_the_best_validation_loses_neither_it_nor_its_metrics(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "steps": 4,
        "validate_every": 1,
        "checkpoint": CheckpointConfig(keep=1, keep_best="loss"),
        "optimizer": OptimizerConfig(lr=0.2, clip_norm=None),
    }
    quiet = config_of(tmp_path / "quiet", **changes)
    told = {each.step: each.loss for each in validations(quiet)}
    best = min(told, key=lambda step: told[step])
    assert best < 4, told
    lost = drilled(config_of(tmp_path / "lost", **changes))
    three = job(lost, ranks=3, schedule="1f1b", layers=LAYERS)
    with RankGroup(lost, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=best + 1, phase=FaultPhase.BACKWARD))
        group.train(three, range(3), plan=with_standbys(three))
        assert group.fired == [(1, "kill", best + 1, FaultPhase.BACKWARD)]
        step, _, sources = group.finish_commit()
        assert step == best
        two = job(lost, ranks=2, schedule="1f1b", layers=LAYERS)
        group.train(two, (0, 2), step=step, sources=sources)
    found = {ref.step: read_manifest(ref).metrics for ref in checkpoints(lost.job.folder)}
    assert found.keys() == {best, 4}
    assert found[best]["loss"] == told[best]


def test_a_job_that_keeps_no_best_has_none_to_export(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=1)
    validations(config)
    with pytest.raises(
        JobError, match=r"--best: no checkpoint of .* tells a metric: set checkpoint.keep_best"
    ):
        export_command(config.job.folder, str(tmp_path / "best.safetensors"), force=False, best=True)


def test_one_rank_that_knows_of_a_validation_tells_the_others() -> None:
    done = Unfinished(step=4, validated=True, best=0.98, begun=4)
    first, second = (PastValidation(step=step, values={"accuracy": 0.9 + step / 50}) for step in (2, 4))
    known = [
        Greeting(host="", port=0, left=left, validations=past)
        for left, past in (
            (Unfinished(step=4), (first,)),
            (done, (first, second)),
            (Unfinished(step=3), ()),
            (None, (replace(second, step=6),)),
        )
    ]
    assert agree(known, 4) == done
    assert agreed_validations(known, 4) == (first, second)
