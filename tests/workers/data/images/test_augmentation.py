"""Random changes of images: each a function of its key alone, and of the kind that was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from image_files import image_of
from PIL import ImageOps

from workers.config import AugmentConfig
from workers.data.images.augmentation import (
    ATTEMPTS,
    MAGNITUDES,
    OPERATIONS,
    WIDEST,
    Augmentation,
    random_box,
)
from workers.data.images.preparing import ImagePreparer
from workers.models.image_preparation import usual_preparation
from workers.protocol.errors import JobError
from workers.reproducibility import rng

SIZE = (9, 12)
IMAGE = image_of()
KEYS = [rng.key(0, "sample", number) for number in range(400)]


def augmentation(channels: int = 3, **settings: Any) -> Augmentation:
    return Augmentation(AugmentConfig(**settings), ImagePreparer(usual_preparation(channels, SIZE)))


@pytest.mark.parametrize(
    "settings", [{"crop": 0.2}, {"flip": 0.5}, {"operations": 2}, {"crop": 0.5, "flip": 0.5, "operations": 1}]
)
def test_changes_are_a_function_of_the_key(settings: dict[str, Any]) -> None:
    changes = augmentation(**settings)
    before = IMAGE.tobytes()
    found = [changes.changed(IMAGE, key).tobytes() for key in KEYS[:40]]
    assert [augmentation(**settings).changed(IMAGE, key).tobytes() for key in KEYS[:40]] == found
    assert len({*found}) > 1
    assert IMAGE.tobytes() == before
    assert all(len(each) == len(before) for each in found)


def test_nothing_asked_for_is_the_preparation() -> None:
    assert augmentation().changed(IMAGE, KEYS[0]).tobytes() == IMAGE.tobytes()


def test_a_flip_is_the_mirror_image_as_often_as_asked() -> None:
    mirrored = ImageOps.mirror(IMAGE).tobytes()
    found = [augmentation(flip=0.3).changed(IMAGE, key).tobytes() for key in KEYS]
    assert {*found} == {mirrored, IMAGE.tobytes()}
    assert 0.23 < found.count(mirrored) / len(found) < 0.37
    assert all(augmentation(flip=1.0).changed(IMAGE, key).tobytes() == mirrored for key in KEYS[:20])


def test_crops_have_the_areas_and_shapes_asked_for() -> None:
    draws = np.random.default_rng(1)
    areas, ratios, lefts = [], [], []
    for _ in range(500):
        left, top, right, bottom = random_box(200, 150, 0.25, draws.random((ATTEMPTS, 2)), draws.random(2))
        assert 0 <= left < right <= 200
        assert 0 <= top < bottom <= 150
        areas.append((right - left) * (bottom - top) / (200 * 150))
        ratios.append((right - left) / (bottom - top))
        lefts.append(left)
    assert min(areas) > 0.24
    assert max(areas) > 0.9
    assert 0.5 < np.mean(areas) < 0.68
    assert 1 / WIDEST - 0.02 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < WIDEST + 0.02
    assert len({*lefts}) > 50


def test_an_image_too_narrow_for_any_crop_gives_its_middle() -> None:
    draws = np.full((ATTEMPTS, 2), 0.999)
    assert random_box(90, 9, 0.9, draws, [0.5, 0.5]) == (39, 0, 51, 9)
    assert random_box(9, 90, 0.9, draws, [0.5, 0.5]) == (0, 39, 9, 51)


def test_a_crop_is_a_part_of_the_image_at_the_models_size() -> None:
    halves = image_of("L", 40, 40)
    halves.paste(0, (0, 0, 40, 20))
    halves.paste(255, (0, 20, 40, 40))
    changes = augmentation(1, crop=0.1)
    shades = {np.asarray(changes.changed(halves, key)).mean() for key in KEYS[:60]}
    assert 0.0 in shades
    assert 255.0 in shades
    assert changes.changed(halves, KEYS[0]).size == (12, 9)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_each_operation_changes_an_image_and_keeps_its_size(mode: str) -> None:
    image = image_of(mode, 30, 20)
    still = 0
    for operation in OPERATIONS:
        for level in (-1.0, -9 / MAGNITUDES, 9 / MAGNITUDES, 1.0):
            found = operation(image, level)
            assert (found.mode, found.size) == (mode, image.size)
            still += found.tobytes() == image.tobytes()
    # The identity, autocontrast where all shades are there; in gray the change of color too.
    assert still <= 4 * 3
    assert OPERATIONS[0](image, 1.0).tobytes() == image.tobytes()


def test_one_kind_of_change_leaves_the_chances_of_the_others_alone() -> None:
    mirrored = [augmentation(flip=0.5).changed(IMAGE, key) != IMAGE for key in KEYS[:50]]
    cropped = augmentation(crop=0.3)
    both = augmentation(crop=0.3, flip=0.5)
    for key, flipped in zip(KEYS, mirrored, strict=False):
        expected = cropped.changed(IMAGE, key)
        assert both.changed(IMAGE, key) == (ImageOps.mirror(expected) if flipped else expected)


def test_operations_on_images_with_opacity_are_refused() -> None:
    with pytest.raises(
        JobError, match=r"data\.augment\.operations change images of 1 or 3 channels, and .* takes 4"
    ):
        augmentation(4, operations=1)
