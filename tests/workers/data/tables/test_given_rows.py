"""Rows that a user's source returns are those of a table with the same rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from word_tokenizer import WORDS, saved_tokenizer

from workers.config import DataConfig, ModelConfig
from workers.data.dataset import OpenData
from workers.data.registry import open_dataset
from workers.data.tables.given_rows import table_of
from workers.protocol.errors import JobError

TEXTS = ["the sky is blue .", "why ?", "a good film", "what is red ?", "a bad film", "light scatters ."]
ROWS = [{"text": text, "label": number % 2} for number, text in enumerate(TEXTS)]
Open = Callable[..., OpenData]
RETURNED: dict[str, Any] = {}


def returned() -> Any:
    return RETURNED["it"]


class Rows(TorchDataset[Any]):
    """A PyTorch data set of dicts."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


class Drawn(Rows):
    """One that adds a word at random."""

    def __getitem__(self, index: int) -> Any:
        number = int(torch.randint(len(WORDS), ())) + random.randrange(2)
        return {**super().__getitem__(index), "text": WORDS[number % len(WORDS)]}


class Broken(Rows):
    def __getitem__(self, index: int) -> Any:
        if index:
            raise OSError("disk on fire")
        return super().__getitem__(index)


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A function that opens what a source returns, or else a file with the rows."""

    def open_with(it: Any, model: Any = None, **settings: Any) -> OpenData:
        RETURNED["it"] = it
        given = {
            "source": "test_given_rows:returned",
            "validation_fraction": 0.0,
            "tokenizer": saved_tokenizer(tmp_path / "tokenizer"),
        }
        config = DataConfig.model_validate({**given, **settings})
        return open_dataset(config, model or encoder(), str(tmp_path / "job"))

    return open_with


def encoder() -> Any:
    fields = {"model_type": "bert", "num_labels": 2}
    architecture = "BertForSequenceClassification"
    return ModelConfig(family="huggingface", architecture=architecture, config=fields, context=12)


def same(one: OpenData, other: OpenData) -> bool:
    samples = [*range(one.dataset.train_samples)]
    tensors = [
        (*batch.inputs, *batch.targets) for batch in (each.dataset.train(samples) for each in (one, other))
    ]
    return one.sha256 == other.sha256 and all(map(torch.equal, *tensors))


@pytest.mark.parametrize(
    "make",
    [
        datasets.Dataset.from_list,
        lambda rows: datasets.Dataset.from_list(rows).with_format("torch"),
        lambda rows: datasets.Dataset.from_list([*rows, *rows]).select(range(len(rows))),
        lambda rows: datasets.Dataset.from_list(rows).map(_shouted).with_transform(_quiet),
        Rows,
        list,
    ],
)
def test_rows_are_those_of_a_file(make: Callable[..., Any], opened: Open, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    of_file = opened(None, source="table", path=str(file))
    found = opened(make(ROWS))
    assert found.dataset.train_samples == len(ROWS)
    assert same(found, of_file)
    assert found.tokenizer is not None


def _shouted(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"].upper()}


def _quiet(rows: dict[str, Any]) -> dict[str, Any]:
    return {**rows, "text": [text.lower() for text in rows["text"]]}


def test_columns_tasks_and_held_out_rows_are_as_for_files(opened: Open) -> None:
    rows = datasets.Dataset.from_list(ROWS).rename_column("text", "body")
    data = opened(rows, columns={"text": "body"}, validation_fraction=0.4)
    assert (data.dataset.train_samples, data.dataset.validation_samples) == (4, 2)
    language = opened(ROWS, ModelConfig(family="llama", context=12))
    assert language.dataset.train([0]).inputs[0].shape == (1, 12)
    with pytest.raises(JobError, match=r"test_given_rows:returned' has no column 'text', it has body, label"):
        opened(rows)


def test_rows_are_made_once_and_other_rows_are_other_ones(opened: Open, tmp_path: Path) -> None:
    for make in (datasets.Dataset.from_list, Rows):
        made = tmp_path / "job" / "data"
        first = opened(make(ROWS))
        before = {*made.iterdir()}
        assert same(opened(make(ROWS)), first)
        assert {*made.iterdir()} == before
        other = opened(make([*ROWS[:-1], {"text": "red", "label": 1}]))
        assert other.sha256 != first.sha256
        assert len({*made.iterdir()}) == len(before) + 1
        with pytest.raises(
            JobError, match=r"the rows of data.source = .* have the sha256 .*, not data.sha256 ="
        ):
            opened(make(ROWS), sha256=other.sha256)


def _drawn(rows: dict[str, Any]) -> dict[str, Any]:
    return {**rows, "text": [random.choice(WORDS) for _ in rows["text"]]}


def test_draws_of_a_data_set_are_the_same_in_every_process(opened: Open) -> None:
    first = opened(Drawn(ROWS))
    torch.manual_seed(7)
    random.seed(7)
    assert same(first, opened(Drawn(ROWS)))


def test_draws_of_a_transform_are_the_same_at_every_read() -> None:
    table = table_of(datasets.Dataset.from_list(ROWS).with_transform(_drawn), "it")
    assert table is not None
    first = [*table.read()]
    random.seed(7)
    assert [*table.read()] == first


def test_the_columns_in_use_alone_identify_rows(opened: Open, tmp_path: Path) -> None:
    folder = tmp_path / "job" / "data"
    for number in range(2):
        opened([{**row, "seen": {1: object(), "a": number}} for row in ROWS])
    assert len([*folder.iterdir()]) == 1


def test_every_element_of_an_array_counts_and_no_address_does() -> None:
    def identity(value: Any, column: str = "text") -> Any:
        table = table_of([{"text": value}], "it")
        assert table is not None
        return table.identify({column})

    one, other = np.zeros(2000), np.zeros(2000)
    other[1000] = 1
    given = (
        one,
        other,
        one.astype(np.float32),
        one.reshape(2, 1000),
        np.int64(1),
        b"a",
        b"b",
        {1: 2, "a": 3},
    )
    assert len({str(identity(value)) for value in given}) == len(given)
    assert identity(one) == identity(one.copy())
    assert identity(object(), "other") == identity(object(), "other")
    with pytest.raises(
        JobError, match=r"it: column 'text' holds a value .* \(it is of type object\): give text"
    ):
        identity([{"a": object()}])
    with pytest.raises(JobError, match=r"column 'text' holds a value .* \(keys must be str, .*, not tuple\)"):
        identity({(1, 2): 3})


@pytest.mark.parametrize(
    ("it", "told"),
    [
        (
            Rows([*ROWS, {"text": None, "label": 1}]),
            r"data.source = 'test_given_rows:returned', row 7: its text",
        ),
        (Rows([*ROWS, ("why", 1)]), r"row 7 is a tuple: return a dict for each, as for the first"),
        (
            Rows([*ROWS, {"text": "why"}]),
            r"row 7 has the columns text, and the first one text, label: give all",
        ),
        (Broken(ROWS), r"reading rows 1 to 6 raised OSError: disk on fire, at .*test_given_rows.py:\d+ in"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
            r"returned the splits train: return one of them",
        ),
        (Rows([]), r"returned a data set with 0 training samples"),
    ],
)
def test_rows_that_do_not_do_are_told(it: Any, told: str, opened: Open) -> None:
    with pytest.raises(JobError, match=told):
        opened(it)


def test_keys_of_tables_need_rows(opened: Open) -> None:
    pairs = [(torch.zeros(2), 1), (torch.zeros(2), 0)]
    assert opened(pairs).dataset.train_samples == 2
    with pytest.raises(JobError, match=r'data.task belongs to data.source = "table", and data.source is'):
        opened(pairs, task="classification")
    with pytest.raises(JobError, match=r"data.weights has 2 numbers, and data.path 0 entries"):
        opened(ROWS, weights=[1, 2])
