"""What a model's preprocessor_config.json says, what it leaves out, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hugging_face_models import saved_model
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from workers.config import ModelConfig
from workers.models.huggingface.processor import preparation_of, read_processor
from workers.models.image_preparation import ImagePreparation, usual_preparation
from workers.protocol.errors import JobError

VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 6}}


def test_files_of_earlier_versions_mean_what_they_did() -> None:
    found = preparation_of({"feature_extractor_type": "ViTFeatureExtractor", "size": 8}, 3, (4, 4))
    assert found == usual_preparation(3, (8, 8))
    found = preparation_of({"feature_extractor_type": "ConvNextFeatureExtractor", "size": 14}, 3, (4, 4))
    assert (found.size, found.resize, found.crops, found.resample) == ((14, 14), 16, ((14, 14),), 3)
    found = preparation_of({"crop_pct": 0.5, "size": {"shortest_edge": 8}}, 3, (4, 4))
    assert (found.resize, found.crops) == (16, ((8, 8),))


def test_nulls_are_what_a_kind_of_processor_usually_does() -> None:
    found = preparation_of({**VIT, "image_mean": None, "do_resize": None}, 3, (4, 4))
    assert found == usual_preparation(3, (8, 6))


def test_a_processor_that_scales_nothing_takes_images_of_the_models_size() -> None:
    found = preparation_of({**VIT, "do_resize": False}, 3, (5, 7))
    assert found == ImagePreparation(channels=3, size=(5, 7), resize=None, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"image_processor_type": "DetrImageProcessor"},
            "prepared by DetrImageProcessor, .* one of ViT, ConvNext,",
        ),
        ({**VIT, "do_pad": True}, "has do_pad, which is not done here"),
        ({**VIT, "size": "large"}, "does not fit a processor of ViT"),
        (
            {**VIT, "size": {"longest_edge": 8}},
            "a size has height and width, or shortest_edge, not longest_edge",
        ),
        ({**VIT, "size": {"shortest_edge": 8}}, "without a crop makes images of many sizes"),
        ({**VIT, "resample": 9}, "resample = 9 is no filter of Pillow"),
        ({**VIT, "image_mean": [0.5]}, "1 numbers for mean or std, and the model takes images of 3 channels"),
        ({**VIT, "do_center_crop": True}, r"does not fit a processor of ViT \(KeyError"),
        (
            {"image_processor_type": "ConvNextImageProcessor", "size": {"height": 8, "width": 8}},
            "no shortest_edge",
        ),
    ],
)
def test_what_is_not_done_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        preparation_of(fields, 3, (8, 8))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert read_processor(tmp_path) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": VIT}))
    assert read_processor(tmp_path) == VIT
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(JobError, match=r"preprocessor_config\.json cannot be read"):
        read_processor(tmp_path)


def located(folder: Path, **settings: Any) -> Any:
    return ModelConfig(family="huggingface", path=str(folder), **settings).located(os.path.abspath)


def test_a_model_has_the_preparation_of_its_folder(tmp_path: Path) -> None:
    saved_model("vit", tmp_path)
    model = located(tmp_path)
    assert model.processor is None
    assert model.image_preparation() == usual_preparation(1, (16, 16))
    assert (model.tasks, model.class_count) == (("images",), 10)
    ViTImageProcessorPil(size=16, image_mean=[0.1], image_std=[0.9], resample=3).save_pretrained(tmp_path)
    found = located(tmp_path).image_preparation()
    assert (found.mean, found.std, found.resample) == ((0.1,), (0.9,), 3)
    # A job that began without the file goes on without it.
    again = type(model).model_validate(model.model_dump()).located(os.path.abspath)
    assert again.image_preparation() == usual_preparation(1, (16, 16))


def test_a_vit_takes_images_of_its_size_alone(tmp_path: Path) -> None:
    saved_model("vit", tmp_path)
    fields = {**VIT, "image_mean": [0.5], "image_std": [0.5]}
    with pytest.raises(JobError, match="makes images of 8 x 6 pixels, and the model takes 16 x 16"):
        located(tmp_path, processor=fields).image_preparation()
    saved_model("resnet", tmp_path / "resnet")
    assert located(tmp_path / "resnet", processor=fields).image_preparation().size == (8, 6)
