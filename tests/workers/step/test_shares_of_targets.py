"""A step's loss is the mean over all its targets, whichever microbatch they are in, with the bits of a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import FAMILIES, job, small_config
from masked_data import LENGTH, VOCABULARY, Masked, whole
from reference import train_plainly
from torch import nn
from torch.nn import functional

from benchmarks.parts.rank_threads import run_threads
from workers.build import build_module
from workers.config import DataConfig, ModelConfig, OptimizerConfig, WorkerConfig
from workers.data.sampling import train_indices
from workers.models.loss import IGNORED, mean_cross_entropy, share_of_targets
from workers.models.registry import build_definition
from workers.protocol.errors import JobError
from workers.protocol.reports import StepReport

LAYERS = 6


def config_of(folder: Path, *, empty: bool = False, **changes: Any) -> WorkerConfig:
    model = ModelConfig(family="gpt", layers=4, width=16, heads=2, context=LENGTH, vocabulary=VOCABULARY)
    data = DataConfig(source="masked_data:Masked", arguments={"empty": empty})
    return small_config(folder, model=model, data=data, **changes)


def losses(config: WorkerConfig, **how: Any) -> tuple[list[float], str]:
    run = run_threads(job(config, layers=LAYERS, **how))
    return [each.loss for each in run.reports if isinstance(each, StepReport)], run.state_sha256


@pytest.mark.each_choice
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_schedule_has_the_bits_of_a_plain_loop(precision: str, family: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, precision=precision)
    state_sha256, expected = train_plainly(config, tmp_path)
    ranks = 2 if family not in ("interleaved", "zbv") else 1
    assert losses(config, ranks=ranks, schedule=family) == (expected, state_sha256)


def test_replicas_and_shards_share_the_targets_of_all(tmp_path: Path) -> None:
    """Two replicas, with states shared out or not, on one pipeline's ranks or on two."""
    config = config_of(tmp_path, replicas=2)
    expected = losses(config, ranks=1)
    assert losses(config, ranks=2, schedule="1f1b") == expected
    assert losses(config_of(tmp_path, replicas=2, shard="optimizer"), ranks=2, schedule="1f1b") == expected


def test_loss_and_gradient_are_those_of_one_batch_of_all_microbatches(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=1, optimizer=OptimizerConfig(clip_norm=None))
    run = run_threads(job(config, ranks=2, schedule="1f1b", layers=LAYERS))
    (report,) = (each for each in run.reports if isinstance(each, StepReport))
    data, definition = Masked(), build_definition(config.model, VOCABULARY)
    modules = nn.Sequential(*(build_module(definition, n, config.job.seed) for n in range(LAYERS)))
    inputs, targets = whole(
        data, [n for g in range(4) for n in train_indices(3, 0, g, 4, 2, data.train_samples)]
    )
    counts = [int((each != IGNORED).sum()) for each in targets.split(2)]
    assert len({*counts}) > 2, "microbatches with unlike numbers of targets"
    loss = functional.cross_entropy(modules(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in modules.parameters() if p.grad is not None]).norm()
    assert report.loss == pytest.approx(float(loss), rel=1e-6)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_a_job_without_any_target_changes_no_weight_and_ends_by_name(tmp_path: Path) -> None:
    config = config_of(tmp_path, empty=True, optimizer=OptimizerConfig(max_skipped_steps=2))
    with pytest.raises(
        JobError, match="2 steps in a row up to step 2 changed no weight, because none of their samples"
    ):
        losses(config, ranks=1)


def test_the_loss_of_some_positions_is_torchs() -> None:
    logits = torch.randn(3, 5, 7, requires_grad=True)
    targets = torch.randint(0, 7, (3, 5))
    targets[1, 2:] = targets[2] = IGNORED
    loss = mean_cross_entropy(logits, targets)
    stock = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.equal(loss, stock)
    (found,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(stock, logits)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert share_of_targets(mean_cross_entropy, (targets,)) == torch.tensor(7 / 15)
    assert share_of_targets(functional.cross_entropy, (targets,)) is None


def test_the_loss_of_no_position_is_nothing_and_has_a_gradient_of_nothing() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = mean_cross_entropy(logits, torch.full((2, 3), IGNORED))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss == 0
    assert not gradient.any()
