"""Windows of tokens, digit images, and the held-out share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from workers.config import DataConfig, ModelConfig
from workers.data.dataset import Batch
from workers.data.registry import open_dataset
from workers.data.split import held_out
from workers.data.windows import TokenWindows
from workers.protocol.errors import JobError


def test_windows_do_not_overlap_and_targets_are_moved_by_one() -> None:
    data = TokenWindows(np.arange(42, dtype=np.uint16), context=4, validation_fraction=0.2)
    assert (data.train_samples, data.validation_samples) == (8, 2)  # 41 targets make 10 windows of 4
    batch = data.train([0, 7, 3])
    assert batch.inputs[0].tolist() == [[0, 1, 2, 3], [28, 29, 30, 31], [12, 13, 14, 15]]
    assert batch.targets[0].tolist() == [[1, 2, 3, 4], [29, 30, 31, 32], [13, 14, 15, 16]]
    held = data.validation([0, 1])
    assert held.inputs[0].tolist() == [[32, 33, 34, 35], [36, 37, 38, 39]]
    assert held.targets[0].tolist() == [[33, 34, 35, 36], [37, 38, 39, 40]]


@pytest.mark.parametrize(("tokens", "samples"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_last_window_needs_its_last_target(tokens: int, samples: int) -> None:
    data = TokenWindows(np.zeros(tokens, dtype=np.uint8), context=4, validation_fraction=0.0)
    assert data.train_samples == samples
    assert data.train([samples - 1]).targets[0].shape == (1, 4)


@pytest.mark.parametrize("rows", [[0], [1, 0], [3, 3, 3]])
def test_batches_are_fresh_and_contiguous(rows: list[int], tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    np.arange(30, dtype=np.uint8).tofile(path)
    data = TokenWindows(np.memmap(path, dtype=np.uint8, mode="r"), context=5, validation_fraction=0.0)
    assert_fresh(data.train(rows), data.train(rows), torch.int64)


def assert_fresh(first: Batch, second: Batch, dtype: torch.dtype) -> None:
    tensors = [*first.inputs, *first.targets, *second.inputs, *second.targets]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert first.inputs[0].dtype == dtype
    assert first.targets[0].dtype == torch.int64
    kept = second.inputs[0].clone()
    first.inputs[0].zero_()  # writable and not shared
    assert torch.equal(second.inputs[0], kept)


def test_text_shorter_than_a_context_says_both_numbers() -> None:
    with pytest.raises(
        JobError, match=r"has 100 tokens, and one sample needs model.context \+ 1 = 129: .* 99"
    ):
        TokenWindows(np.zeros(100, dtype=np.uint8), context=128, validation_fraction=0.0)


@pytest.mark.parametrize(
    ("samples", "fraction", "count"), [(100, 0.05, 5), (99, 0.05, 4), (1, 0.0, 0), (20, 0.05, 1)]
)
def test_held_out(samples: int, fraction: float, count: int) -> None:
    assert held_out(samples, fraction) == count


def test_holding_out_none_is_an_error_that_names_a_fraction_that_works() -> None:
    with pytest.raises(
        JobError, match=r"0.05 holds out none of 7 samples: raise it to 0.143, add data, or set"
    ):
        held_out(7, 0.05)
    assert held_out(7, 0.143) == 1
    with pytest.raises(JobError, match=r"0.5 holds out none of 1 samples: add data, or set it to 0"):
        held_out(1, 0.5)


def test_digits_are_scikit_learns(tmp_path: Path) -> None:
    config = DataConfig(source="digits", validation_fraction=0.1)
    opened = open_dataset(config, ModelConfig(family="vit"), str(tmp_path))
    assert (opened.tokenizer, opened.vocabulary, opened.tokens_per_sample) == (None, None, 0)
    data = opened.dataset
    assert (data.train_samples, data.validation_samples) == (1618, 179)
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    batch = data.train([5, 0])
    expected = torch.tensor(pixels[[5, 0]] / 16, dtype=torch.float32).view(2, 1, 8, 8)
    assert torch.equal(batch.inputs[0], expected)
    assert batch.targets[0].tolist() == labels[[5, 0]].tolist()
    assert batch.inputs[0].shape == (2, 1, 8, 8)
    assert data.validation([178]).targets[0].tolist() == [labels[1796]]
    assert_fresh(data.train([4]), data.train([4]), torch.float32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 16}, r"model.image_size = 16 does not fit the data: digits has image_size = 8"),
        ({"channels": 3}, r"model.channels = 3 .* digits has channels = 1; set model.channels to 1"),
        ({"classes": 7}, r"model.classes = 7 .* digits has classes = 10"),
    ],
)
def test_digits_of_another_size(settings: dict[str, int], message: str, tmp_path: Path) -> None:
    model = ModelConfig(**{"family": "vit", **settings})
    with pytest.raises(JobError, match=message):
        open_dataset(DataConfig(source="digits"), model, str(tmp_path))
