"""Models of transformers train to the bits of a plain loop over their layers, on every partition and schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from hugging_face_models import saved_model, section_of
from jobs import even, job, small_config
from reference import train_plainly

from benchmarks.parts.rank_threads import run_threads
from workers.config import DataConfig, WorkerConfig
from workers.models.registry import build_definition
from workers.protocol.reports import LayersChecked, StepReport
from workers.protocol.section import Units

CASES = (
    *("llama", "qwen2", "gpt2", "bert, sequences", "bert, answers", "vit", "convnext_v2", "resnet"),
    *("gpt_neox", "electra, sequences", "deit"),
)


def config_of(case: str, folder: Path, units: Units = "blocks") -> WorkerConfig:
    saved_model(case, folder / "model")
    model = section_of(case, folder / "model", units)
    data = DataConfig(source="hugging_face_models:Samples", arguments={"case": case})
    return small_config(folder, model=model, data=data, steps=3)


# Each model on one of the two in `make test`.
@pytest.mark.parametrize(
    ("case", "units", "schedule"),
    [
        pytest.param(*model, schedule, marks=pytest.mark.soak if (number + turn) % 2 else ())
        for number, model in enumerate(
            [*((case, "blocks") for case in CASES), ("llama", "halves"), ("bert, answers", "halves")]
        )
        for turn, schedule in enumerate(("zb-h1", "1f1b"))
    ],
)
def test_every_partition_has_the_bits_of_a_plain_loop(
    case: str, units: Units, schedule: str, tmp_path: Path
) -> None:
    config = config_of(case, tmp_path, units)
    expected, expected_losses = train_plainly(config, tmp_path, boundaries=True)
    layers = len(build_definition(config.model, None).layers)
    counts, recompute = ((1, layers - 1), False) if schedule == "1f1b" else (even(layers, 2), True)
    run = run_threads(
        job(config, ranks=2, schedule=schedule, counts=counts, layers=layers, recompute=recompute)
    )
    assert [each.loss for each in run.reports if isinstance(each, StepReport)] == expected_losses
    assert run.state_sha256 == expected
    checked = {name for each in run.reports if isinstance(each, LayersChecked) for name in each.layers}
    assert len(checked) == layers


@pytest.mark.parametrize("case", ["llama, tied", "bert, masked tokens", "opt, tied"])
def test_a_tied_head_trains_alike_on_one_rank_and_on_two(case: str, tmp_path: Path) -> None:
    config = config_of(case, tmp_path)
    alone = run_threads(job(config, layers=5))
    apart = run_threads(job(config, ranks=2, schedule="1f1b", counts=(3, 2), layers=5))
    assert apart.state_sha256 == alone.state_sha256
