"""`table` with images: the rows of tables and folders of images as training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from workers.config import DataConfig
from workers.data.dataset import OpenData
from workers.data.images.decoding import check_pillow, decoder_versions
from workers.data.tables.files import TableSource, table_in_file
from workers.data.tables.image_folders import class_names, find_held_out_images, find_images, read_images
from workers.data.tables.stored_rows import StoredRows, open_rows
from workers.data.tables.table_data import (
    TaskRows,
    chosen_task,
    columns_of_roles,
    encoded_rows,
    mixed_tables,
    named_classes,
    sha256_of_rows,
)
from workers.data.tasks.images import BYTE_VALUES, Images, ImageSetting
from workers.models.families.family import ModelFamily
from workers.models.image_preparation import ImagePreparation
from workers.protocol.errors import JobError


def open_images(
    config: DataConfig, model: ModelFamily, preparation: ImagePreparation, folder: Path
) -> OpenData:
    """The images that `config` names, for `model`.

    Args:
        folder: of the cached rows, which are the image files byte for byte.

    Raises:
        JobError: the task is not the model's; a file is missing or no image; a label is none of the classes.
    """
    chosen_task(config, model)
    check_pillow()
    tables = find_images(config.path, "data.path")
    held_out = find_held_out_images(config.path)
    if config.validation_path:
        held_out = find_images(config.validation_path, "data.validation_path")
    setting = ImageSetting(
        preparation=preparation,
        classes=model.class_count,
        labels=_classes(config, model, tables, held_out),
        augment=config.augment,
    )
    task, plain = Images(setting), Images(replace(setting, augment=None))
    columns = columns_of_roles(config, task)

    def opened(tables: tuple[TableSource, ...]) -> StoredRows:
        states = [[*table.identify(columns.values())] for table in tables]
        determined_by = ["images", columns, setting.classes, dict(setting.labels), states]
        return open_rows(lambda: encoded_rows(plain, tables, columns), determined_by, BYTE_VALUES, folder)

    rows = [opened(each) for each in mixed_tables(config, _images_at)]
    held = opened(_sources(held_out)) if held_out else None
    if held is not None and setting.classes > 1:
        _check_classes(rows, held, setting.labels)
    return OpenData(
        dataset=TaskRows(task, rows, held, config.validation_fraction, config.weights, plain),
        sha256=sha256_of_rows(config, (*rows, held), decoder=decoder_versions()),
    )


def _images_at(path: str | tuple[str, ...] | None, key: str) -> tuple[TableSource, ...]:
    return _sources(find_images(path, key))


def _sources(tables: tuple[Path, ...]) -> tuple[TableSource, ...]:
    return tuple(table_in_file(each, read_images) for each in tables)


def _classes(
    config: DataConfig, model: ModelFamily, tables: tuple[Path, ...], held_out: tuple[Path, ...]
) -> Mapping[str, int]:
    """Name of a class -> its number: as the spec or the model has them, else the folders' names in their order.

    Raises:
        JobError: there are more folders than classes, or one to validate on that is none to train on.
    """
    named, names = named_classes(config, model), class_names(tables)
    if not names:
        return named
    if unknown := sorted({*class_names(held_out)} - {*names}):
        raise JobError(
            f"the images to validate on have the class {unknown[0]}, and those to train on have"
            f" {', '.join(names)} alone: remove its folder, or add images of it to train on"
        )
    if config.labels is not None or {*names} <= named.keys():
        return named
    if len(names) > model.class_count:
        raise JobError(
            f"data.path has folders of {len(names)} classes, and the model has {model.class_count}: set model.classes"
        )
    return {name: number for number, name in enumerate(names)}


def _check_classes(rows: Sequence[StoredRows], held_out: StoredRows, labels: Mapping[str, int]) -> None:
    """Raises JobError where a class is to be validated on and not to be trained on."""
    unknown = sorted(
        map(int, {*np.unique(held_out.labels)} - {*np.unique(np.concatenate([each.labels for each in rows]))})
    )
    if unknown:
        names = {number: name for name, number in labels.items()}
        raise JobError(
            f"the images to validate on have the class {names.get(unknown[0], unknown[0])}, and those to train on have"
            " none of it: leave it out, or add images of it to train on"
        )
