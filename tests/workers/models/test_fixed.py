"""`model.fixed`: parameters that a job does not train, in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import FAMILIES, job, small_config
from pydantic import ValidationError
from reference import train_plainly

from benchmarks.parts.rank_threads import run_threads
from workers.build import build_layers
from workers.config import ModelConfig, WorkerConfig
from workers.models.outline import outline
from workers.models.registry import build_definition
from workers.protocol.errors import JobError
from workers.state.layer_state import digest
from workers.state.optim import make_optimizer

LAYERS = range(8)


def config_of(
    folder: Path, fixed: tuple[str, ...] | None, trait: str = "plain", **changes: Any
) -> WorkerConfig:
    model = ModelConfig(factory="small_models:model", arguments={"trait": trait}, fixed=fixed)
    return small_config(folder, model=model, **changes)


def digests(config: WorkerConfig, **how: Any) -> dict[int, str]:
    outcomes = run_threads(job(config, **how)).outcomes
    return {layer: text for outcome in outcomes for layer, text in outcome.layer_digests}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_fixed_keeps_its_values_and_all_else_the_bits_of_a_plain_loop(
    tmp_path: Path, precision: str
) -> None:
    """Whole layers at the beginning and in the middle, and the biases of all."""
    config = config_of(tmp_path, ("l0.*", "l1.*", "l4.*", "*.bias"), precision=precision)
    expected, _ = train_plainly(config, tmp_path)
    definition = build_definition(config.model, None)
    built = build_layers(
        definition,
        [*LAYERS],
        seed=config.job.seed,
        precision=precision,
        device=torch.device("cpu"),
        optimizer=make_optimizer(config.optimizer, config.job.steps),
    )
    fresh = {layer: digest(state) for layer, (_, state) in built.items()}
    for family in FAMILIES:
        run = run_threads(job(config, ranks=2, schedule=family))
        assert run.state_sha256 == expected, family
        after = {layer: text for outcome in run.outcomes for layer, text in outcome.layer_digests}
        assert {layer for layer in LAYERS if after[layer] == fresh[layer]} == {0, 1, 4}


def test_an_unset_pattern_trains_all(tmp_path: Path) -> None:
    assert digests(config_of(tmp_path, ("l2.*",))) != digests(config_of(tmp_path, None))
    with pytest.raises(ValidationError, match="at least 1 item"):
        config_of(tmp_path, ())


@pytest.mark.parametrize(
    ("trait", "fixed", "told"),
    [
        (
            "plain",
            ("l0.*", "embed.*"),
            r"model.fixed has 'embed\.\*', which matches none of the \d+ parameters",
        ),
        ("plain", ("*",), "leaves none of the .* parameters to train"),
        ("tied", ("l0.*",), r"is tied and has requires_grad = False.*\(in model.fixed, name all\)"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(
    tmp_path: Path, trait: str, fixed: tuple[str, ...], told: str
) -> None:
    config = config_of(tmp_path, fixed, trait)
    with pytest.raises(JobError, match=told):
        outline(build_definition(config.model, None))
