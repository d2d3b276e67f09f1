"""Rows packed into samples: each of them once, in few samples, by an index that is made once."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor
from word_tokenizer import WORDS, saved_tokenizer

from workers.config import DataConfig, ModelConfig
from workers.data.dataset import Batch, Dataset
from workers.data.registry import open_dataset
from workers.data.tables import packed_rows
from workers.data.tables.packed_rows import best_fit
from workers.models.loss import IGNORED
from workers.protocol.errors import JobError

CONTEXT = 24


def bins_of(sizes: NDArray[np.int64], room: int) -> list[list[int]]:
    order, starts = best_fit(sizes, room)
    return [order[a:b].tolist() for a, b in pairwise(starts)]


def slowly(sizes: list[int], room: int) -> list[list[int]]:
    """Best fit decreasing by its definition: of the bins that take a thing the fullest, of these the one that changed
    last."""
    bins: list[list[int]] = []
    touched: list[int] = []
    for turn, thing in enumerate(sorted(range(len(sizes)), key=lambda n: -sizes[n])):
        left = [room - sum(sizes[each] for each in found) for found in bins]
        fitting = [n for n, rest in enumerate(left) if rest >= sizes[thing]]
        at = min(fitting, key=lambda n: (left[n], -touched[n])) if fitting else len(bins)
        if at == len(bins):
            bins.append([])
            touched.append(0)
        bins[at].append(thing)
        touched[at] = turn
    return [sorted(found) for found in bins]


@pytest.mark.parametrize("seed", range(20))
def test_each_goes_where_the_least_room_is_left(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    room = int(numbers.integers(1, 40))
    sizes = numbers.integers(1, room + 1, int(numbers.integers(0, 80)))
    found = bins_of(sizes, room)
    assert found == slowly(sizes.tolist(), room)
    assert sorted(thing for each in found for thing in each) == [*range(len(sizes))]


def test_samples_are_full_on_a_mix_of_lengths() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.5, 0.8, 20_000), 1, 512).astype(np.int64)
    found = bins_of(lengths, 512)
    assert all(lengths[each].sum() <= 512 for each in found)
    assert lengths.sum() / (512 * len(found)) > 0.99


def model(**settings: Any) -> Any:
    return ModelConfig(family="llama", context=CONTEXT, **settings)


def texts(count: int) -> list[str]:
    """Texts of 1 to 15 words."""
    return [" ".join(WORDS[(n + k) % 15] for k in range(1 + n * 7 % 15)) for n in range(count)]


def opened(
    folder: Path, rows: list[dict[str, Any]], section: Any = None, **settings: Any
) -> tuple[Dataset, str]:
    file = folder / f"{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:8]}.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "source": "table",
        "path": str(file),
        "validation_fraction": 0.0,
        "tokenizer": saved_tokenizer(folder / "tokenizer"),
        "pack": True,
    }
    config = DataConfig.model_validate({**given, **settings})
    data = open_dataset(config, section or model(), str(folder / "job"))
    assert data.sha256 is not None
    return data.dataset, data.sha256


def documents_of(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(inputs, targets) of each document of packed rows."""
    tokens, documents, positions = batch.inputs
    found = []
    for row, numbers, at, targets in zip(tokens, documents, positions, batch.targets[0], strict=True):
        assert (targets[numbers == 0] == IGNORED).all()
        for number in range(1, int(numbers.max()) + 1):
            there = numbers == number
            assert at[there].tolist() == [*range(int(there.sum()))]
            found.append((tuple(row[there].tolist()), tuple(targets[there].tolist())))
        filled = int((numbers > 0).sum())
        assert not numbers[filled:].any()
        assert (numbers[:filled].diff() >= 0).all()
    return found


def trimmed(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The same of rows with one document each, which ends where padding begins."""

    def until(row: Tensor, count: int) -> tuple[int, ...]:
        return tuple(row[:count].tolist())

    counts = [int((row != IGNORED).nonzero().max()) + 1 for row in batch.targets[0]]
    rows = zip(batch.inputs[0], batch.targets[0], counts, strict=True)
    return [(until(tokens, count), until(targets, count)) for tokens, targets, count in rows]


@pytest.mark.parametrize("task", ["language", "chat"])
def test_documents_and_their_targets_are_those_of_single_ones(task: str, tmp_path: Path) -> None:
    """So nothing predicts the first token of a document, and each row is in one sample."""
    rows: list[dict[str, Any]] = [{"text": text} for text in texts(60)]
    if task == "chat":
        asked = [{"role": "user", "content": "why"}]
        rows = [{"messages": [*asked, {"role": "assistant", "content": row["text"]}]} for row in rows]
    packed, _ = opened(tmp_path, rows, task=task)
    padded, _ = opened(tmp_path, rows, task=task, pack=False)
    assert padded.train_samples == 60
    assert packed.train_samples < 40
    whole = packed.train([*range(packed.train_samples)])
    assert [each.shape for each in (*whole.inputs, *whole.targets)] == [(packed.train_samples, CONTEXT)] * 4
    alone = padded.train([*range(60)])
    assert sorted(documents_of(whole)) == sorted(trimmed(alone))


@pytest.mark.parametrize("own_table", [False, True])
def test_each_held_out_document_is_in_one_sample(own_table: bool, tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts(50)]
    settings: dict[str, Any] = {"validation_fraction": 0.3}
    if own_table:
        held = tmp_path / "held.jsonl"
        held.write_text("".join(json.dumps(row) + "\n" for row in rows[:15]))
        settings = {"validation_path": str(held)}
    packed, _ = opened(tmp_path, rows, **settings)
    padded, _ = opened(tmp_path, rows, **settings, pack=False)
    assert padded.validation_samples == 15
    assert packed.validation_samples < 10
    found = documents_of(packed.validation([*range(packed.validation_samples)]))
    assert sorted(found) == sorted(trimmed(padded.validation([*range(15)])))


def test_the_index_is_made_once_and_is_part_of_what_the_samples_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": text} for text in texts(50)]
    _, sha256 = opened(tmp_path, rows)
    _, padded = opened(tmp_path, rows, pack=False)
    assert sha256 != padded
    assert sha256 != opened(tmp_path, rows, validation_fraction=0.2)[1]
    monkeypatch.setattr(packed_rows, "best_fit", None)
    assert opened(tmp_path, rows)[1] == sha256
    with pytest.raises(JobError, match=f"have the sha256 {sha256}, not data.sha256 = '{padded}'"):
        opened(tmp_path, rows, sha256=padded)


def test_a_damaged_index_is_told_of(tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts(50)]
    opened(tmp_path, rows)
    indices = [*(tmp_path / "job" / "data").glob("*.packed")]
    largest = max(indices, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-8])
    with pytest.raises(JobError, match=r"\.packed cannot be read \(it does not hold 50 rows\): delete it"):
        opened(tmp_path, rows)
    largest.write_bytes(b"")
    with pytest.raises(JobError, match=r"\.packed cannot be read \(.*\): delete it, it is made again"):
        opened(tmp_path, rows)
    largest.unlink()
    opened(tmp_path, rows)


def test_a_document_that_fills_no_sample_is_an_error_is_cut_or_left_out(tmp_path: Path) -> None:
    rows = [{"text": "why ?"}, {"text": " ".join([*WORDS, *WORDS])}, {"text": "what ?"}]
    told = r"row 2 has 33 tokens, 8 more than a sample takes: .*data.too_long to \"cut\" or \"drop\""
    with pytest.raises(JobError, match=told):
        opened(tmp_path, rows)
    dropped, _ = opened(tmp_path, rows, too_long="drop")
    assert len(documents_of(dropped.train([0]))) == 2
    cut, _ = opened(tmp_path, rows, too_long="cut")
    lengths = {len(tokens) for tokens, _ in documents_of(cut.train([*range(cut.train_samples)]))}
    assert lengths == {4, CONTEXT}


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    rows = [{"text": "why ?", "label": 1}]
    fields = {"model_type": "bert", "num_labels": 2}
    bert = ModelConfig(
        family="huggingface", architecture="BertForSequenceClassification", config=fields, context=12
    )
    with pytest.raises(
        JobError, match=r'is for documents and conversations, and data.task is "classification": remove it'
    ):
        opened(tmp_path, rows, bert)
    with pytest.raises(
        JobError, match=r"keep the documents of a sample apart, and those of a factory are not"
    ):
        opened(tmp_path, rows, ModelConfig(factory="small_models:model", context=12))
    with pytest.raises(JobError, match=r'data.pack belongs to data.source = "table", and data.source is'):
        opened(tmp_path, rows, source="text")
