"""Questions and contexts as windows: those of the tokenizers library, with the answers' tokens; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from word_tokenizer import SPECIAL, WORDS, saved_tokenizer

from workers.config import DataConfig, ModelConfig
from workers.data.dataset import OpenData
from workers.data.registry import open_dataset
from workers.protocol.errors import JobError

NAMES = (*SPECIAL, *WORDS)
LENGTH, OVERLAP = 12, 2
SHORT = "the sky is blue ."
LONG = "the sky is blue . light scatters . a good film is red . what is a bad film ?"
Open = Callable[..., OpenData]
ROWS: list[dict[str, Any]] = []


def asked(question: str, context: str, *answers: str) -> dict[str, Any]:
    """A row of SQuAD's shape; each answer is the first place of its text."""
    return {
        "question": question,
        "context": context,
        "answers": {"text": [*answers], "answer_start": [context.index(each) for each in answers]},
    }


def returned() -> list[dict[str, Any]]:
    """A source of rows, which a file would give one type per column."""
    return ROWS


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A function that opens a table of rows for a model that answers questions."""

    def open_with(
        rows: list[dict[str, Any]], length: int = LENGTH, config: Any = None, **settings: Any
    ) -> OpenData:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = ModelConfig(
            family="huggingface",
            architecture="BertForQuestionAnswering",
            config=config or {"model_type": "bert"},
            context=length,
        )
        given = {
            "source": "table",
            "path": str(file),
            "validation_fraction": 0.0,
            "overlap": OVERLAP,
            "tokenizer": saved_tokenizer(tmp_path / "tokenizer"),
        }
        data = DataConfig.model_validate({**given, **settings})
        return open_dataset(data, model, str(tmp_path / "job"))

    return open_with


def words(row: torch.Tensor) -> list[str]:
    return [NAMES[int(number)] for number in row]


def test_a_short_context_is_one_window_with_the_answers_tokens(opened: Open) -> None:
    data = opened([asked("why ?", SHORT, "is blue", "blue")]).dataset
    assert data.train_samples == 1
    batch = data.train([0])
    tokens, mask, segments = batch.inputs
    assert " ".join(words(tokens[0])) == "[CLS] why ? [SEP] the sky is blue . [SEP] [PAD] [PAD]"
    assert mask.tolist() == [[1] * 10 + [0] * 2]
    assert segments.tolist() == [[0] * 4 + [1] * 6 + [0] * 2]
    # Training asks for the first of the right answers.
    assert [each.tolist() for each in batch.targets] == [[6], [7], [[4, 9]]]


def test_a_long_context_is_windows_as_the_library_cuts_them(opened: Open, tmp_path: Path) -> None:
    question = "what is red ?"
    data = opened([asked(question, LONG, "film is red")]).dataset
    library = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    library.no_padding()
    library.enable_truncation(LENGTH, stride=OVERLAP, strategy="only_second")
    first = library.encode(question, LONG)
    expected = [first.ids, *(each.ids for each in first.overflowing)]
    batch = data.train([*range(data.train_samples)])
    found = [row[mask > 0].tolist() for row, mask in zip(*batch.inputs[:2], strict=True)]
    assert found == expected
    assert len(expected) == 6
    held = []
    for row, begin, end, (start, stop) in zip(batch.inputs[0], *batch.targets, strict=True):
        assert 0 <= start < stop
        context = words(row)[start:stop]
        if end:
            assert words(row)[begin : end + 1] == ["film", "is", "red"]
            held.append(context)
        else:
            assert begin == 0, "the first token stands for no answer"
            assert " ".join(context).find("film is red") < 0
    assert len(held) == 1


@pytest.mark.parametrize("length", [LENGTH, 11, 16])
def test_every_token_of_a_context_is_in_a_window_and_neighbours_share_some(length: int, opened: Open) -> None:
    data = opened([asked("why ?", LONG, "blue")], length).dataset
    batch = data.train([*range(data.train_samples)])
    seen = [
        words(row)[start:stop] for row, (start, stop) in zip(batch.inputs[0], batch.targets[2], strict=True)
    ]
    whole = seen[0]
    for before, after in pairwise(seen):
        assert before[-OVERLAP:] == after[:OVERLAP]
        whole = whole + after[OVERLAP:]
    assert " ".join(whole) == LONG
    assert all(len(each) == length - 5 for each in seen[:-1])


def test_an_answer_within_a_word_is_that_word(opened: Open) -> None:
    data = opened([asked("why ?", SHORT, "lu")]).dataset
    assert [each.tolist() for each in data.train([0]).targets[:2]] == [[7], [7]]


def test_bytes_do_for_tokens(opened: Open) -> None:
    data = opened([asked("ä?", "größe: öl", "öl")], 32, tokenizer="bytes").dataset
    first, last, context = data.train([0]).targets
    tokens = data.train([0]).inputs[0][0]
    assert bytes(tokens[int(first) : int(last) + 1].tolist()).decode() == "öl"
    assert context.tolist() == [[3, 3 + len("größe: öl".encode())]]


def test_a_context_may_have_no_answer_and_lists_of_answers_do_too(opened: Open) -> None:
    none = {**asked("why ?", SHORT), "answers": {"text": [], "answer_start": []}}
    data = opened([none]).dataset
    assert [each.tolist() for each in data.train([0]).targets] == [[0], [0], [[4, 9]]]
    listed = {**none, "answers": [{"text": "sky", "answer_start": 4}]}
    assert [each.tolist() for each in opened([listed]).dataset.train([0]).targets[:2]] == [[5], [5]]


def test_the_metrics_read_the_held_out_windows(opened: Open) -> None:
    rows = [asked("why ?", SHORT, "blue"), asked("what ?", LONG, "red", "is red"), asked("a ?", SHORT, "sky")]
    # Held-out rows begin with a question: of its windows none is trained on.
    data = opened(rows, validation_fraction=0.4)
    dataset = data.dataset
    assert (dataset.train_samples, dataset.validation_samples) == (1, 5)
    measure = data.measure
    assert measure is not None
    assert measure.names == ("exact-match", "f1")
    held_out = dataset.validation([*range(5)])
    logits = torch.zeros(5, LENGTH, 2)
    for row, (first, last) in enumerate(zip(*held_out.targets[:2], strict=True)):
        logits[row, first, 0] = logits[row, last, 1] = 1.0 + (first > 0)
    samples = measure.of_samples((logits,), held_out.targets)
    assert measure.values(samples.numpy(), 1.0) == {"exact-match": 1.0, "f1": 1.0}
    # The last row's answer is "the sky", in one of two questions "is red" for "red".
    logits[4, 4, 0] = 3.0
    found = measure.values(measure.of_samples((logits,), held_out.targets).numpy(), 1.0)
    assert found == {"exact-match": 1.0, "f1": 1.0}, "articles do not count"
    logits[4, 6, 1] = 3.0
    found = measure.values(measure.of_samples((logits,), held_out.targets).numpy(), 1.0)
    assert found == {"exact-match": 0.5, "f1": pytest.approx((1 + 2 / 3) / 2)}
    assert np.isfinite(samples.numpy()).all()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"question": None}, r"row 2: its question is empty: name another column"),
        ({"question": " "}, r"row 2: its question is empty: leave the row out"),
        ({"context": 7}, r"row 2: its context is of type int, not text"),
        (
            {"answers": {"text": ["blue"], "answer_start": [3]}},
            r"row 2: its answer 'blue' should begin at character 3 of the context, where ' sky' stands: correct",
        ),
        ({"answers": {"text": ["blue"], "answer_start": [-4]}}, "should begin at character -4"),
        (
            {"answers": {"text": ["blue"], "answer_start": [400]}},
            "at character 400 of the context, where '' stands",
        ),
        ({"answers": {"text": [" "], "answer_start": [3]}}, "row 2: an answer is empty: leave it out"),
        ({"answers": {"text": ["blue"], "answer_start": []}}, r"row 2: its answers are .*: give {\"text\""),
        ({"answers": "blue"}, r"row 2: its answers are 'blue': give"),
        (
            {"question": " ".join(WORDS[:8])},
            r"row 2: its question and special tokens take 11 of the 12 tokens of a window, which leaves 1 to the"
            r" context, and windows of a context share 2: raise model.context, lower data.overlap",
        ),
    ],
)
def test_what_is_wrong_with_a_question_is_said(changes: dict[str, Any], told: str, opened: Open) -> None:
    row = asked("why ?", SHORT, "blue")
    ROWS[:] = [row, {**row, **changes}]
    with pytest.raises(JobError, match=told):
        opened([], source="test_question_answering:returned", path=None)


def test_a_question_that_is_too_long_may_be_left_out(opened: Open) -> None:
    rows = [asked(" ".join(WORDS), SHORT, "blue"), asked("why ?", SHORT, "blue")]
    assert opened(rows, too_long="drop").dataset.train_samples == 1
    with pytest.raises(JobError, match="leaves 0 to the context"):
        opened(rows, too_long="cut")


def test_columns_and_tasks_that_do_not_fit_are_refused(opened: Open) -> None:
    row = asked("why ?", SHORT, "blue")
    with pytest.raises(
        JobError, match=r"has no column 'answers', it has question, context: name the one with"
    ):
        opened([{key: row[key] for key in ("question", "context")}])
    with pytest.raises(
        JobError, match=r'"chat" does not fit the model, which is made for question-answering'
    ):
        opened([row], task="chat")
    with pytest.raises(JobError, match=r"leaves no row to train on"):
        opened([asked("what ?", LONG, "red")], validation_fraction=0.5)
    model = {"model_type": "bert", "max_position_embeddings": 8}
    with pytest.raises(
        JobError, match=r"model.context = 12 is more than the 8 positions of the model: lower it"
    ):
        opened([row], config=model)
    renamed = {"q": row["question"], "c": row["context"], "a": row["answers"], "id": "57"}
    columns = {"question": "q", "context": "c", "answers": "a"}
    assert opened([renamed], columns=columns).dataset.train_samples == 1
