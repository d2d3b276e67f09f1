"""Jobs on folders of images have the bits of a plain loop, with changes by chance, whatever the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_models import saved_model, section_of
from image_files import write_folder
from jobs import job, small_config
from PIL import Image
from reference import train_plainly

from benchmarks.parts.rank_threads import run_threads
from workers.config import DataConfig, ModelConfig, WorkerConfig
from workers.models.registry import build_definition
from workers.protocol.reports import StepReport, ValidationReport

OWN: dict[str, dict[str, Any]] = {
    "our vit": {"family": "vit", "image_size": 8, "layers": 2, "width": 16, "heads": 2, "classes": 3},
    "our vgg": {"family": "vgg", "depth": 11, "width": 2, "hidden": 8, "channels": 3, "classes": 3},
}
CASES = (*OWN, "vit", "convnext_v2", "resnet")


def config_of(case: str, folder: Path, **changes: Any) -> WorkerConfig:
    write_folder(folder / "images" / "train", 30)
    write_folder(folder / "images" / "validation", 9, first=30)
    if case in OWN:
        model = ModelConfig(**OWN[case])
    else:
        saved_model(case, folder / "model")
        model = section_of(case, folder / "model")
    data = DataConfig.model_validate(
        {
            "source": "table",
            "path": str(folder / "images"),
            "augment": {"crop": 0.5, "flip": 0.5, "operations": 1},
            "cache": str(folder / "cache"),
        }
    )
    return small_config(folder / "run", model=model, data=data, **{"steps": 3, **changes})


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_bits_of_a_plain_loop(case: str, tmp_path: Path) -> None:
    config = config_of(case, tmp_path)
    layers = len(build_definition(config.model, None).layers)
    expected, losses = train_plainly(config, tmp_path, boundaries=True)
    run = run_threads(job(config, ranks=2, schedule="1f1b", counts=(1, layers - 1), layers=layers))
    assert [each.loss for each in run.reports if isinstance(each, StepReport)] == losses
    assert run.state_sha256 == expected
    (told,) = (each for each in run.reports if isinstance(each, ValidationReport))
    assert {"accuracy", "f1", "matthews"} <= told.metrics.keys()


def test_vgg_learns_shades_from_images(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for number in range(48):
        shade = number % 3
        file = tmp_path / "shades" / str(shade) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((draws.integers(0, 60, (12, 12, 3)) + 70 * shade).astype(np.uint8)).save(file)
    config = small_config(
        tmp_path / "run",
        model=ModelConfig(**{**OWN["our vgg"], "width": 4, "hidden": 16, "dropout": 0.0}),
        data=DataConfig(source="table", path=str(tmp_path / "shades")),
        steps=40,
    )
    run = run_threads(job(config, layers=11))
    losses = [each.loss for each in run.reports if isinstance(each, StepReport)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
