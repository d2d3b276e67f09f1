"""Rows of tables as training data: every format, every task, and what is wrong with a row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from word_tokenizer import HIDES, SPECIAL, WORDS, saved_tokenizer

from planner.course import Course
from workers.config import DataConfig, ModelConfig
from workers.data.dataset import OpenData, stream_of
from workers.data.mixture import Mixture
from workers.data.registry import open_dataset
from workers.models.loss import IGNORED
from workers.protocol.errors import JobError

NUMBERS = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
QUESTION = {"role": "user", "content": "why is the sky blue ?"}
ANSWER = {"role": "assistant", "content": "light scatters ."}
LAST = {"role": "assistant", "content": "blue ."}
Open = Callable[..., Any]


def tokens(text: str) -> list[int]:
    return [NUMBERS[word] for word in text.split()]


def words(row: torch.Tensor) -> str:
    names = {number: word for word, number in NUMBERS.items()}
    return " ".join(names.get(int(number), "-") for number in row)


def decoder(**settings: Any) -> Any:
    return ModelConfig(family="llama", context=12, **settings)


def encoder(classes: int = 2, **config: Any) -> Any:
    fields = {"model_type": "bert", "num_labels": classes, **config}
    architecture = "BertForSequenceClassification"
    return ModelConfig(family="huggingface", architecture=architecture, config=fields, context=12)


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A function that opens a table of rows for a model."""

    def open_with(rows: list[dict[str, Any]], model: Any = None, **settings: Any) -> OpenData:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {
            "source": "table",
            "path": str(file),
            "validation_fraction": 0.0,
            "tokenizer": saved_tokenizer(tmp_path / "tokenizer"),
        }
        config = DataConfig.model_validate({**given, **settings})
        return open_dataset(config, decoder() if model is None else model, str(tmp_path / "job"))

    return open_with


TEXTS = ["the sky is blue .", "why ?", "a good film", "what is red ?"]


def as_json(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def as_list(folder: Path) -> Path:
    path = folder / "texts.json"
    path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    return path


def as_csv(folder: Path) -> Path:
    path = folder / "texts.csv"
    path.write_text("".join(f"{line}\n" for line in ("text", *TEXTS)))
    return path


def as_parquet(folder: Path) -> Path:
    path = folder / "texts.parquet"
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(path)
    return path


def as_saved(folder: Path) -> Path:
    path = folder / "texts"
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)
    return path


def as_arrow(folder: Path) -> Path:
    return next(as_saved(folder).glob("*.arrow"))


@pytest.mark.parametrize("write", [as_json, as_list, as_csv, as_parquet, as_saved, as_arrow])
def test_every_format_has_the_same_rows(write: Callable[[Path], Path], tmp_path: Path) -> None:
    config = DataConfig(
        source="table",
        path=str(write(tmp_path)),
        tokenizer=saved_tokenizer(tmp_path / "tokenizer"),
        validation_fraction=0.0,
    )
    data = open_dataset(config, decoder(), str(tmp_path / "job"))
    assert (data.dataset.train_samples, data.dataset.validation_samples) == (4, 0)
    assert (data.vocabulary, data.tokens_per_sample) == (len(NUMBERS), 12)
    batch = data.dataset.train([2, 1], [0, 0])
    assert words(batch.inputs[0][1]).startswith("[CLS] why ? [SEP] [PAD]")
    assert words(batch.inputs[0][0]).startswith("[CLS] a good film [SEP] [PAD]")


def test_documents_end_with_the_end_token_and_long_ones_go_on_in_further_rows(opened: Open) -> None:
    long = " ".join([*WORDS, *WORDS])
    data = opened([{"text": "why ?"}, {"text": long}])
    assert data.dataset.train_samples == 1 + 3
    batch = data.dataset.train([0, 1, 2, 3], [0] * 4)
    asked = [batch.targets[0][n][batch.targets[0][n] != IGNORED] for n in range(4)]
    assert words(asked[0]) == "why ? [SEP] [END]"
    assert [int(t) for row in asked[1:] for t in row] == tokens(f"{long} [SEP] [END]")
    for inputs, targets in zip(batch.inputs[0], batch.targets[0], strict=True):
        count = int((targets != IGNORED).sum())
        assert torch.equal(inputs[1:count], targets[: count - 1])
        assert not inputs[count:].any()


def test_a_conversation_asks_for_its_answers_alone(opened: Open) -> None:
    row = "<user> why is the sky blue ? [END] <assistant> light scatters . [END] <user> what ? [END] <assistant> blue ."
    model = ModelConfig(family="llama", context=24)
    data = opened(
        [{"messages": [QUESTION, ANSWER, {**QUESTION, "content": "what ?"}, LAST]}], task="chat", model=model
    )
    batch = data.dataset.train([0], [0])
    assert [int(t) for t in batch.inputs[0][0]] == tokens(row) + [0] * (24 - len(row.split()))
    asked = "light scatters . [END] blue . [END]"
    assert [int(t) for t in batch.targets[0][0] if t != IGNORED] == tokens(asked)
    # Each asked token follows the one that predicts it.
    for place, target in enumerate(batch.targets[0][0][: len(row.split()) - 1].tolist()):
        assert target in (IGNORED, int(batch.inputs[0][0][place + 1]))


def test_classes_and_pairs(opened: Open) -> None:
    rows = [{"s": "good film", "t": "is blue", "y": 1}, {"s": "bad", "t": "red", "y": 0}]
    columns = {"text": "s", "pair": "t", "label": "y"}
    batch = opened(rows, encoder(), columns=columns).dataset.train([0, 1], [0, 0])
    inputs, mask, segments = batch.inputs
    assert words(inputs[0]) == "[CLS] good film [SEP] is blue [SEP]" + " [PAD]" * 5
    assert mask.tolist() == [[1] * 7 + [0] * 5, [1] * 5 + [0] * 7]
    assert segments.tolist() == [[0, 0, 0, 0, 1, 1, 1] + [0] * 5, [0, 0, 0, 1, 1] + [0] * 7]
    (targets,) = batch.targets
    assert targets.dtype == torch.int64
    assert targets.tolist() == [1, 0]


def test_some_tokens_are_hidden_and_other_ones_in_each_epoch(opened: Open) -> None:
    fields = {"model_type": "bert", "vocab_size": len(NUMBERS)}
    model = ModelConfig(family="huggingface", architecture="BertForMaskedLM", config=fields, context=24)
    data = opened([{"text": " ".join(WORDS)}], model, mask_fraction=0.3).dataset
    whole = tokens(f"[CLS] {' '.join(WORDS)} [SEP]")
    hidden, asked, replaced = 0, 0, 0
    for draw in range(200):
        batch = data.train([0], [draw])
        (inputs, mask), (targets,) = batch.inputs, batch.targets
        assert mask[0].tolist() == [1] * len(whole) + [0] * (24 - len(whole))
        for place, token in enumerate(whole):
            if targets[0][place] == IGNORED:
                assert inputs[0][place] == token
                continue
            assert targets[0][place] == token
            assert 0 < place < len(whole) - 1, "no special token"
            asked += 1
            hidden += int(inputs[0][place] == NUMBERS["[MASK]"])
            replaced += int(inputs[0][place] not in (token, NUMBERS["[MASK]"]))
        assert (targets[0][len(whole) :] == IGNORED).all()
    assert 0.27 < asked / (200 * len(WORDS)) < 0.33
    assert 0.77 < hidden / asked < 0.84
    assert 0.07 < replaced / asked < 0.13
    again = data.train([0], [5])
    assert torch.equal(again.targets[0], data.train([0], [5]).targets[0])
    assert not torch.equal(again.targets[0], data.train([0], [6]).targets[0])


def test_a_column_with_the_name_of_what_may_be_there_is_taken(opened: Open) -> None:
    rows = [{"text": "good film", "pair": "is blue", "label": 1}]
    inputs, _, segments = opened(rows, encoder()).dataset.train([0]).inputs
    assert words(inputs[0]).startswith("[CLS] good film [SEP] is blue [SEP]")
    assert segments.sum() == 3


def test_labels_by_name_and_numbers(opened: Open) -> None:
    named = encoder(label2id={"bad": 0, "good": 1})
    rows = [{"text": "film", "label": "good"}, {"text": "film", "label": "bad"}]
    assert opened(rows, named).dataset.train([0, 1], [0, 0]).targets[0].tolist() == [1, 0]
    rows = [{"text": "film", "label": 0.5}, {"text": "film", "label": -3}]
    (targets,) = opened(rows, encoder(1)).dataset.train([0, 1], [0, 0]).targets
    assert targets.dtype == torch.float32
    assert targets.tolist() == [0.5, -3.0]


def test_held_out_rows_are_the_last_ones_or_of_their_own_table(opened: Open, tmp_path: Path) -> None:
    rows = [{"text": word} for word in WORDS[:10]]
    data = opened(rows, validation_fraction=0.2).dataset
    assert (data.train_samples, data.validation_samples) == (8, 2)
    assert words(data.validation([1]).inputs[0][0]).startswith(f"[CLS] {WORDS[9]} [SEP]")
    other = as_parquet(tmp_path)
    both = opened(rows, validation_path=str(other))
    assert (both.dataset.train_samples, both.dataset.validation_samples) == (10, 4)
    assert words(both.dataset.validation([1]).inputs[0][0]).startswith("[CLS] why ? [SEP]")
    assert both.sha256 not in (None, opened(rows).sha256)


def test_rows_are_made_once_and_a_changed_table_is_another_one(opened: Open, tmp_path: Path) -> None:
    first = opened([{"text": "why ?"}])
    (made,) = (tmp_path / "job" / "data").iterdir()
    before = made.stat().st_mtime_ns
    assert opened([{"text": "why ?"}], path=str(tmp_path / "rows.jsonl")).sha256 == first.sha256
    assert before == made.stat().st_mtime_ns or len([*(tmp_path / "job" / "data").iterdir()]) == 2
    changed = opened([{"text": "what ?"}])
    assert changed.sha256 != first.sha256
    with pytest.raises(JobError, match=r"have the sha256 .*, not data.sha256 = 'ab'"):
        opened([{"text": "why ?"}], sha256="ab")


@pytest.mark.parametrize(("too_long", "samples"), [("cut", 2), ("drop", 1)])
def test_long_rows_are_cut_or_left_out(too_long: str, samples: int, opened: Open) -> None:
    rows = [{"text": " ".join(WORDS), "label": 1}, {"text": "why ?", "label": 0}]
    data = opened(rows, encoder(), too_long=too_long).dataset
    assert data.train_samples == samples
    assert words(data.train([samples - 1], [0]).inputs[0][0]).startswith("[CLS] why ? [SEP]")


@pytest.mark.parametrize(
    ("rows", "settings", "told"),
    [
        (
            [{"text": " ".join(WORDS), "label": 1}],
            {},
            r"row 1 has 17 tokens, 5 more than a sample takes: raise model.context",
        ),
        (
            [{"text": "why", "label": 1}, {"text": None, "label": 1}],
            {},
            r"rows.jsonl, row 2: its text is empty",
        ),
        ([{"text": 7, "label": 1}], {}, r"row 1: its text is of type int, not text"),
        ([{"text": "why", "label": 2}], {}, r"row 1: its label is 2, and the model has 2 classes, 0 to 1"),
        ([{"text": "why", "label": -1}], {}, "its label is -1"),
        ([{"text": "why", "label": None}], {}, "its label is None"),
        ([{"text": "why", "label": "good"}], {}, "its label is 'good', and the model's"),
        (
            [{"text": "why"}],
            {},
            r"has no column 'label', it has text: name the one with the label, data.columns",
        ),
        (
            [{"text": "why", "label": 1}],
            {"columns": {"txt": "text"}},
            "data.columns has txt: this task has columns for text",
        ),
        (
            [{"text": "why", "label": 1}],
            {"task": "chat"},
            'data.task = "chat" does not fit the model, which is made for class',
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_row(
    rows: list[dict[str, Any]], settings: dict[str, Any], told: str, opened: Open
) -> None:
    with pytest.raises(JobError, match=told):
        opened(rows, encoder(), **settings)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "row 1: its messages are empty"),
        ("why", "its messages are a str"),
        ([{"role": "user"}], "a message is .*: give each a role and a content"),
        ([QUESTION], "no message has the role assistant"),
        (
            [QUESTION, {**ANSWER, "content": " ".join(WORDS)}],
            "row 1 has .* tokens, .* more than a sample takes",
        ),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said(messages: Any, told: str, opened: Open) -> None:
    with pytest.raises(JobError, match=told):
        opened([{"messages": messages}], task="chat")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "has no chat template"),
        (HIDES, "row 1: the chat template of data.tokenizer hides where answer 2 begins"),
        ("{{ raise_exception('never') }}", "the chat template of .* does not take .*never"),
    ],
)
def test_a_template_that_does_not_do_is_refused(
    template: str | None, told: str, opened: Open, tmp_path: Path
) -> None:
    tokenizer = saved_tokenizer(tmp_path / "other", template)
    with pytest.raises(JobError, match=told):
        opened([{"messages": [QUESTION, ANSWER]}], task="chat", tokenizer=tokenizer)
    with pytest.raises(
        JobError, match=r"needs a tokenizer with a chat template, and data.tokenizer is bytes"
    ):
        opened([{"messages": [QUESTION, ANSWER]}], task="chat", tokenizer="bytes")


def test_files_that_are_no_tables_are_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("why")
    (tmp_path / "b.parquet").write_text("why")
    (tmp_path / "empty").mkdir()
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(
        tmp_path / "splits"
    )
    for path, told in {
        "a.txt": "ends in none of .parquet, .jsonl",
        "b.parquet": "b.parquet cannot be read as a table",
        "empty": "holds no file ending in",
        "splits": "holds several splits: name one of its folders, such as .*splits/train",
        "none": "does not exist",
    }.items():
        with pytest.raises(JobError, match=told):
            opened([{"text": "why"}], path=str(tmp_path / path))
    with pytest.raises(JobError, match=r'data.source = "table" needs data.path'):
        opened([{"text": "why"}], path=None)


def test_keys_of_tables_belong_to_tables(opened: Open) -> None:
    with pytest.raises(JobError, match=r'data.task belongs to data.source = "table", and data.source is'):
        opened([], source="python-docs", path=None, task="language")


def test_tables_are_mixed_by_weights(opened: Open, tmp_path: Path) -> None:
    files = []
    for number, count in enumerate((8, 4)):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(
            "".join(json.dumps({"text": word}) + "\n" for word in WORDS[number : number + count])
        )
    paths = [str(file) for file in files]
    data = opened([], path=paths, weights=[1, 3], validation_fraction=0.25).dataset
    # A quarter of each is held out.
    assert (data.train_samples, data.validation_samples) == (6 + 3, 2 + 1)
    assert [words(row)[6:] for row in data.validation([0, 1, 2]).inputs[0][:, :2]] == [*WORDS[6:8], WORDS[4]]
    assert [words(row)[6:] for row in data.train([5, 6]).inputs[0][:, :2]] == [WORDS[5], WORDS[1]]
    mixture = stream_of(data, 1, Course.of(1, 1, 1))
    assert isinstance(mixture, Mixture)
    assert (mixture.samples, mixture.weights) == ((6, 3), (1.0, 3.0))
    assert stream_of(opened([], path=paths, validation_fraction=0.0).dataset, 1, Course.of(1, 1, 1)) == 12
    own = opened([], path=paths, weights=[1, 3], validation_path=paths[0])
    assert (own.dataset.train_samples, own.dataset.validation_samples) == (12, 8)
    with pytest.raises(
        JobError, match=r"data.weights has 1 number, and data.path 2 entries: give each file or"
    ):
        opened([], path=paths, weights=[1])
    with pytest.raises(
        JobError, match=r'data.shuffle = "permutation" has no order for tables that are mixed'
    ):
        opened([], path=paths, weights=[1, 1], shuffle="permutation")
