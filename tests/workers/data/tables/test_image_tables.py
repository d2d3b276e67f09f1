"""Folders and tables of images as training data: every layout, changes by chance, and what is wrong with an image."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL
import pytest
import torch
from image_files import CLASSES, encoded, image_of, write_folder

from workers.config import AugmentConfig, DataConfig, ModelConfig
from workers.data.dataset import OpenData, draws_anew, takes_draws
from workers.data.images.decoding import decoder_versions
from workers.data.images.preparing import ImagePreparer
from workers.data.registry import open_dataset
from workers.data.tables.stored_rows import StoredRows
from workers.data.tasks.images import BYTE_VALUES
from workers.models.image_preparation import usual_preparation
from workers.protocol.errors import JobError

COUNT, SIDE = 12, 8
PREPARER = ImagePreparer(usual_preparation(3, (SIDE, SIDE)))


def vit(classes: int = 3, **settings: Any) -> Any:
    return ModelConfig(family="vit", image_size=SIDE, channels=3, classes=classes, **settings)


def opened(path: Path | list[str], folder: Path, model: Any = None, **settings: Any) -> OpenData:
    named = path if isinstance(path, list) else str(path)
    given = {"source": "table", "path": named, "validation_fraction": 0.0, "cache": str(folder / "cache")}
    config = DataConfig.model_validate({**given, **settings})
    return open_dataset(config, model or vit(), str(folder))


def numbers_of(seed: int) -> torch.Tensor:
    return torch.from_numpy(PREPARER.numbers(PREPARER.place(image_of(seed=seed))))


def rows_of(data: OpenData) -> dict[bytes, int]:
    """Prepared image -> its class, of all training samples."""
    batch = data.dataset.train([*range(data.dataset.train_samples)])
    (images,), (labels,) = batch.inputs, batch.targets
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    assert labels.dtype == torch.int64
    return {image.numpy().tobytes(): int(label) for image, label in zip(images, labels, strict=True)}


EXPECTED = {numbers_of(n).numpy().tobytes(): n % len(CLASSES) for n in range(COUNT)}


def as_folder(folder: Path) -> Path:
    return write_folder(folder / "images", COUNT)


def as_parts(folder: Path) -> Path:
    write_folder(folder / "parts" / "train", COUNT)
    write_folder(folder / "parts" / "validation", 3, first=COUNT)
    write_folder(folder / "parts" / "test", 3, first=COUNT + 3)
    return folder / "parts"


def names(folder: Path) -> list[tuple[str, int]]:
    files = sorted(write_folder(folder, COUNT).rglob("*.png"), key=lambda file: file.name)
    return [(str(file.relative_to(folder)), number % len(CLASSES)) for number, file in enumerate(files)]


def as_metadata(folder: Path) -> Path:
    with (folder / "listed.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file_name", "label"), *names(folder / "listed")])
    (folder / "listed.csv").rename(folder / "listed" / "metadata.csv")
    return folder / "listed"


def as_metadata_lines(folder: Path) -> Path:
    lines = [
        json.dumps({"file_name": name, "label": label}) + "\n" for name, label in names(folder / "lines")
    ]
    (folder / "lines" / "metadata.jsonl").write_text("".join(lines))
    return folder / "lines"


def as_paths(folder: Path) -> Path:
    lines = [json.dumps({"image": name, "label": label}) + "\n" for name, label in names(folder / "paths")]
    (folder / "paths" / "rows.jsonl").write_text("".join(lines))
    return folder / "paths" / "rows.jsonl"


def table(column: str = "image") -> datasets.Dataset:
    features = datasets.Features(
        {column: datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    rows = {
        column: [image_of(seed=n) for n in range(COUNT)],
        "label": [n % len(CLASSES) for n in range(COUNT)],
    }
    return datasets.Dataset.from_dict(rows, features=features)


def as_parquet(folder: Path) -> Path:
    table().to_parquet(folder / "images.parquet")
    return folder / "images.parquet"


def as_raw_bytes(folder: Path) -> Path:
    rows = {
        "image": [encoded(image_of(seed=n)) for n in range(COUNT)],
        "label": [n % 3 for n in range(COUNT)],
    }
    datasets.Dataset.from_dict(rows).to_parquet(folder / "bytes.parquet")
    return folder / "bytes.parquet"


def as_saved(folder: Path) -> Path:
    table().save_to_disk(folder / "saved")
    return folder / "saved"


def as_arrow(folder: Path) -> Path:
    return next(as_saved(folder).glob("*.arrow"))


LAYOUTS = [
    *(
        as_folder,
        as_parts,
        as_metadata,
        as_metadata_lines,
        as_paths,
        as_parquet,
        as_raw_bytes,
        as_saved,
        as_arrow,
    )
]


@pytest.mark.parametrize("write", LAYOUTS)
def test_every_layout_has_the_same_rows(write: Callable[[Path], Path], tmp_path: Path) -> None:
    data = opened(write(tmp_path), tmp_path)
    assert (data.tokenizer, data.vocabulary, data.tokens_per_sample) == (None, None, 0)
    assert rows_of(data) == EXPECTED
    assert data.dataset.validation_samples == (3 if write is as_parts else 0)
    assert data.sha256 is not None


@pytest.mark.parametrize("write", [as_folder, as_parts, as_metadata])
def test_folders_are_read_as_datasets_reads_them(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    loaded = datasets.load_dataset("imagefolder", data_dir=str(path), cache_dir=str(tmp_path / "hub"))
    rows = {}
    for row in loaded["train"]:  # pyright: ignore[reportArgumentType, reportCallIssue]
        found: Any = row
        rows[PREPARER.numbers(PREPARER.place(found["image"])).tobytes()] = found["label"]
    assert rows == EXPECTED


def test_held_out_images_are_of_all_classes_and_prepared_as_they_are(tmp_path: Path) -> None:
    data = opened(
        write_folder(tmp_path / "images", 60), tmp_path, validation_fraction=0.3, augment={"flip": 1.0}
    )
    assert (data.dataset.train_samples, data.dataset.validation_samples) == (42, 18)
    batch = data.dataset.validation([*range(18)])
    assert {*batch.targets[0].tolist()} == {0, 1, 2}
    whole = opened(tmp_path / "images", tmp_path).dataset.train([*range(60)])
    assert torch.equal(batch.inputs[0], whole.inputs[0][42:])
    # Training has all of them mirrored.
    mirrored = data.dataset.train([*range(42)]).inputs[0]
    assert not torch.equal(mirrored, whole.inputs[0][:42])
    assert torch.allclose(mirrored.flip(-1), whole.inputs[0][:42], atol=2 / 255)


def test_a_batch_is_a_function_of_samples_and_keys(tmp_path: Path) -> None:
    augment = {"crop": 0.3, "flip": 0.5, "operations": 2}
    dataset: Any = opened(as_folder(tmp_path), tmp_path, augment=augment).dataset
    assert takes_draws(dataset)
    assert draws_anew(dataset)
    assert not draws_anew(opened(as_folder(tmp_path), tmp_path).dataset)
    one = dataset.train([3, 1, 4], [10, 11, 12]).inputs[0]
    assert torch.equal(one, dataset.train([3, 1, 4], [10, 11, 12]).inputs[0])
    assert torch.equal(one[1:], dataset.train([1, 4], [11, 12]).inputs[0])
    assert not torch.equal(one[0], dataset.train([3], [11]).inputs[0][0])
    assert one.shape == (3, 3, SIDE, SIDE)


def test_a_rank_that_needs_targets_alone_decodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset: Any = opened(as_folder(tmp_path), tmp_path).dataset
    expected = dataset.train([3, 1, 4], [0, 0, 0]).targets
    monkeypatch.setattr("workers.data.tasks.images.decoded_image", None)
    found = dataset.train_targets([3, 1, 4], [0, 0, 0])
    assert found.inputs == ()
    assert torch.equal(found.targets[0], expected[0])


def test_folders_are_mixed_by_weights(tmp_path: Path) -> None:
    few, many = write_folder(tmp_path / "few", 3), write_folder(tmp_path / "many", 9, first=3)
    both = [str(few), str(many)]
    assert rows_of(opened(both, tmp_path)) == EXPECTED
    mixed: Any = opened(both, tmp_path, weights=[1, 2]).dataset
    assert mixed.mixture is not None
    assert mixed.train_samples == COUNT


def test_classes_are_numbered_by_the_spec_else_by_the_model_else_by_their_names(tmp_path: Path) -> None:
    path = as_folder(tmp_path)
    by_name = rows_of(opened(path, tmp_path))
    assert by_name == EXPECTED
    turned = rows_of(opened(path, tmp_path, labels=["eel", "dog", "cat"]))
    assert turned == {image: 2 - label for image, label in EXPECTED.items()}
    fields = {"model_type": "vit", "num_channels": 3, "image_size": SIDE, "num_labels": 4}
    named = {"label2id": {"dog": 0, "eel": 1, "cat": 2, "gnu": 3}}
    classifier = ModelConfig(
        family="huggingface", architecture="ViTForImageClassification", config={**fields, **named}
    )
    assert {*rows_of(opened(path, tmp_path, classifier)).values()} == {0, 1, 2}
    assert rows_of(opened(path, tmp_path, classifier))[numbers_of(1).numpy().tobytes()] == 0
    unnamed = classifier.model_copy(update={"config": {**fields, "label2id": {"LABEL_0": 0}}})
    assert rows_of(opened(path, tmp_path, unnamed)) == EXPECTED


def test_a_regression_takes_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(image_of()))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "a.png", "label": 0.25}) + "\n")
    (targets,) = opened(tmp_path / "rows.jsonl", tmp_path, vit(classes=1)).dataset.train([0]).targets
    assert (targets.dtype, targets.tolist()) == (torch.float32, [0.25])


def test_a_name_may_begin_with_two_dots(tmp_path: Path) -> None:
    (tmp_path / "..a.png").write_bytes(encoded(image_of()))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "..a.png", "label": 0}) + "\n")
    assert rows_of(opened(tmp_path / "rows.jsonl", tmp_path)) == {numbers_of(0).numpy().tobytes(): 0}


def test_rows_are_kept_by_their_files_and_checked_by_their_digest(tmp_path: Path) -> None:
    path = as_folder(tmp_path)
    first = opened(path, tmp_path).sha256
    (made,) = (tmp_path / "cache").iterdir()
    again = opened(path, tmp_path, sha256=first)
    assert again.sha256 == first
    assert [*(tmp_path / "cache").iterdir()] == [made]
    tokens = StoredRows(made, BYTE_VALUES)[0].tokens
    assert isinstance(tokens, np.memmap)  # no byte of an image is read before it is decoded
    assert tokens.dtype == np.uint8
    (path / "cat" / "000.png").write_bytes(encoded(image_of(seed=99)))
    with pytest.raises(JobError, match=r"have the sha256 .*, not data\.sha256"):
        opened(path, tmp_path, sha256=first)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("cat/bad.png", b"no image", r"cat/bad\.png is no image that can be read"),
        ("cat/empty.png", b"", r"cat/empty\.png is no image that can be read"),
        ("top.png", encoded(image_of()), r"top\.png lies in no class's folder: put it into .*/CLASS"),
        ("cat/deep/er.png", encoded(image_of()), r"cat/deep/er\.png lies in no class's folder"),
        ("fox/1.png", encoded(image_of()), r"folders of 4 classes, and the model has 3: set model\.classes"),
        ("metadata.csv", b"name,label\na,1\n", r"metadata\.csv has no column file_name, it has name, label"),
        ("metadata.csv", b"file_name\ncat/000.png\n", r"has no column 'label', it has image, file_name"),
        (
            "metadata.csv",
            b"file_name,label\nno.png,1\n",
            r"row 1: its image '.*no\.png' cannot be read: No such file",
        ),
        (
            "metadata.jsonl",
            b'{"file_name": "a\\u0000.png", "label": 1}\n',
            r"row 1: its image '.*a\\x00\.png' cannot be read: embedded null byte",
        ),
        ("metadata.csv", b"file_name,label\n../x.png,1\n", r"row 1: its image \.\./x\.png lies outside of"),
        ("metadata.csv", b"file_name,label\n/etc/passwd,1\n", r"its image /etc/passwd lies outside of"),
        (
            "metadata.csv",
            b"file_name,label\ncat/000.png,3\n",
            r"000\.png: its label is 3, and the model has 3 classes",
        ),
        ("metadata.csv", b"file_name,label\ncat/000.png,-1\n", r"000\.png: its label is -1"),
        (
            "metadata.csv",
            b"file_name,label\ncat/000.png,gnu\n",
            r"its label is 'gnu', and the model's 3 classes",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(file: str, content: bytes, told: str, tmp_path: Path) -> None:
    path = as_folder(tmp_path)
    (path / file).parent.mkdir(parents=True, exist_ok=True)
    (path / file).write_bytes(content)
    with pytest.raises(JobError, match=told):
        opened(path, tmp_path)


def test_a_class_without_images_is_refused(tmp_path: Path) -> None:
    path = as_folder(tmp_path)
    (path / "fox").mkdir()
    (path / "fox" / "notes.txt").touch()
    with pytest.raises(JobError, match=r"fox holds no image: remove that class's folder"):
        opened(path, tmp_path, vit(classes=4))


def test_files_that_are_no_images_by_their_names_are_left_out(tmp_path: Path) -> None:
    path = as_folder(tmp_path)
    for name in ("cat/notes.txt", "cat/.hidden.png", ".cache/x.png", "__MACOSX/x.png"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"no image")
    assert rows_of(opened(path, tmp_path)) == EXPECTED


def test_a_class_may_have_the_name_of_a_part(tmp_path: Path) -> None:
    for number, name in enumerate(("bus", "plane", "train")):
        (tmp_path / "vehicles" / name).mkdir(parents=True)
        (tmp_path / "vehicles" / name / "1.png").write_bytes(encoded(image_of(seed=number)))
    expected = {numbers_of(n).numpy().tobytes(): n for n in range(3)}
    assert rows_of(opened(tmp_path / "vehicles", tmp_path)) == expected


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        JobError, match=r"data\.path: the folder .*empty holds neither images \(\.png, .* nor a table"
    ):
        opened(tmp_path / "empty", tmp_path)
    with pytest.raises(JobError, match="does not exist"):
        opened(tmp_path / "nowhere", tmp_path)
    with pytest.raises(JobError, match=r'data\.source = "table" needs data\.path'):
        open_dataset(DataConfig(source="table"), vit(), str(tmp_path))


def test_classes_to_validate_on_are_among_those_to_train_on(tmp_path: Path) -> None:
    path = as_parts(tmp_path)
    (path / "validation" / "fox").mkdir()
    (path / "validation" / "fox" / "1.png").write_bytes(encoded(image_of()))
    with pytest.raises(
        JobError, match=r"validate on have the class fox, and those to train on have cat, dog, eel alone"
    ):
        opened(path, tmp_path, vit(classes=4))
    rows = datasets.Dataset.from_dict({"image": [encoded(image_of())], "label": [3]})
    rows.to_parquet(tmp_path / "other.parquet")
    with pytest.raises(JobError, match="validate on have the class 3, and those to train on have none of it"):
        opened(as_folder(tmp_path), tmp_path, vit(classes=4), validation_path=str(tmp_path / "other.parquet"))


def test_what_is_wrong_with_a_table_is_said(tmp_path: Path) -> None:
    table("picture").to_parquet(tmp_path / "named.parquet")
    with pytest.raises(
        JobError, match=r"no column 'image', it has picture, label: name the one with the image"
    ):
        opened(tmp_path / "named.parquet", tmp_path)
    assert rows_of(opened(tmp_path / "named.parquet", tmp_path, columns={"image": "picture"})) == EXPECTED
    for value, told in (
        (None, r"odd\.parquet, row 2: its image is empty: give bytes, a path, or both"),
        (b"", r"odd\.parquet, row 2: its image is empty"),
        (b"no image", r"odd\.parquet, row 2 is no image that can be read"),
    ):
        rows = {"image": [encoded(image_of()), value], "label": [0, 1]}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "odd.parquet")
        with pytest.raises(JobError, match=told):
            opened(tmp_path / "odd.parquet", tmp_path)
    datasets.Dataset.from_dict({"image": [7], "label": [0]}).to_parquet(tmp_path / "odd.parquet")
    with pytest.raises(JobError, match=r"row 1: its image is of type int: give bytes"):
        opened(tmp_path / "odd.parquet", tmp_path)


def test_images_of_another_size_are_refused_where_nothing_scales_them(tmp_path: Path) -> None:
    fields = {"model_type": "resnet", "num_channels": 3, "num_labels": 3, "image_size": SIDE}
    model = ModelConfig(
        family="huggingface",
        architecture="ResNetForImageClassification",
        config=fields,
        processor={"image_processor_type": "ViTImageProcessor", "do_resize": False},
    )
    with pytest.raises(
        JobError, match=r"\.png has 9 x 12 pixels, and the model takes 8 x 8, without scaling"
    ):
        opened(as_folder(tmp_path), tmp_path, model)


def test_images_that_scaling_makes_huge_are_refused(tmp_path: Path) -> None:
    fields = {"model_type": "resnet", "num_channels": 3, "num_labels": 3, "image_size": SIDE}
    sizes = {"size": {"shortest_edge": 256}, "crop_size": SIDE}
    model = ModelConfig(
        family="huggingface",
        architecture="ResNetForImageClassification",
        config=fields,
        processor={"image_processor_type": "CLIPImageProcessor", **sizes},
    )
    path = as_folder(tmp_path)
    (path / "cat" / "thin.png").write_bytes(encoded(image_of("L", 60_000, 1)))
    with pytest.raises(
        JobError, match=r"thin\.png has 1 x 60000 pixels, .* to 256 .* to 15,360,000, which is more than"
    ):
        opened(path, tmp_path, model)


def test_versions_of_what_decodes_are_part_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"Pillow {PIL.__version__}, jpg " in decoder_versions()
    first = opened(as_folder(tmp_path), tmp_path).sha256
    monkeypatch.setattr("workers.data.tables.image_data.decoder_versions", lambda: "Pillow 0.9")
    with pytest.raises(JobError, match=r"a label or what decodes it \(Pillow 0\.9 here\) has changed"):
        opened(tmp_path / "images", tmp_path, sha256=first)


def test_tasks_and_keys_go_with_the_model(tmp_path: Path) -> None:
    path = as_folder(tmp_path)
    with pytest.raises(
        JobError, match=r'data\.task = "language" does not fit the model, which is made for images'
    ):
        opened(path, tmp_path, task="language")
    with pytest.raises(JobError, match=r"data\.columns has text: this task has columns for image, label"):
        opened(path, tmp_path, columns={"text": "image"})
    llama = ModelConfig(family="llama", context=8)
    with pytest.raises(JobError, match=r"data\.augment changes images, and the model reads text"):
        opened(path, tmp_path, llama, augment=AugmentConfig(flip=0.5))
    with pytest.raises(JobError, match=r"data\.augment belongs to data\.source = \"table\""):
        open_dataset(DataConfig(source="digits", augment=AugmentConfig(flip=0.5)), vit(), str(tmp_path))
    with pytest.raises(JobError, match=r"'text' is text, and model.family = 'vit' reads images"):
        opened(path, tmp_path, source="text")


def test_numbers_are_finite_and_of_the_range(tmp_path: Path) -> None:
    images = opened(as_folder(tmp_path), tmp_path).dataset.train([0, 1]).inputs[0].numpy()
    assert np.abs(images).max() <= 1.0
