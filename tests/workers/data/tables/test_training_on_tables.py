"""Jobs on tables have the bits of a plain loop, whatever the ranks, and validate on all that is held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hugging_face_models import saved_model, section_of
from jobs import job, small_config
from reference import train_plainly
from word_tokenizer import WORDS, saved_tokenizer

from benchmarks.parts.rank_threads import run_threads
from workers.config import DataConfig, WorkerConfig
from workers.models.registry import build_definition
from workers.protocol.reports import StepReport, ValidationReport

TASKS = {
    "chat": ("llama", {"perplexity"}),
    "language": ("gpt2", {"perplexity"}),
    "masked-language": ("bert, masked tokens", {"perplexity"}),
    "classification": ("bert, sequences", {"accuracy", "f1", "matthews"}),
}
"""Task -> a model for it, and its metrics."""


def row_of(task: str, number: int) -> dict[str, Any]:
    """A row of some words, other ones and another number of them for each row."""
    text = " ".join(WORDS[(number * 3 + n) % len(WORDS)] for n in range(1 + number % 5))
    if task == "chat":
        question, answer = {"role": "user", "content": text}, {"role": "assistant", "content": text}
        return {"messages": [question, answer]}
    return {"text": text, "label": number % 3}


def config_of(task: str, folder: Path, **changes: Any) -> WorkerConfig:
    case, _ = TASKS[task]
    saved_model(case, folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row_of(task, n)) + "\n" for n in range(60)))
    model = section_of(case, folder / "model").model_copy(update={"context": 16})
    data = DataConfig(
        source="table",
        task=task,  # pyright: ignore[reportArgumentType]
        path=str(folder / "rows.jsonl"),
        tokenizer=saved_tokenizer(folder / "tokenizer"),
        validation_fraction=0.2,
        cache=str(folder / "cache"),
    )
    return small_config(folder / "run", model=model, data=data, **{"steps": 4, **changes})


@pytest.mark.parametrize("task", TASKS)
def test_a_job_has_the_bits_of_a_plain_loop(task: str, tmp_path: Path) -> None:
    config = config_of(task, tmp_path)
    definition = build_definition(config.model, None)
    layers = len(definition.layers)
    if definition.ties:  # the plain loop knows none
        alone = run_threads(job(config, layers=layers))
        losses = [each.loss for each in alone.reports if isinstance(each, StepReport)]
        expected = alone.state_sha256
    else:
        expected, losses = train_plainly(config, tmp_path, boundaries=True)
    for schedule, counts in (("1f1b", (2, layers - 2)), ("zb-h1", (1, layers - 1))):
        run = run_threads(job(config, ranks=2, schedule=schedule, counts=counts, layers=layers))
        assert [each.loss for each in run.reports if isinstance(each, StepReport)] == losses
        assert run.state_sha256 == expected
        (told,) = (each for each in run.reports if isinstance(each, ValidationReport))
        assert told.metrics.keys() == TASKS[task][1]


def test_replicas_with_shards_and_another_order_have_bits_of_their_own(tmp_path: Path) -> None:
    """The same ones on one pipeline's ranks and on two; the keyed order is another order."""
    how: dict[str, Any] = {"replicas": 2, "precision": "bfloat16"}
    config = config_of("chat", tmp_path, **how)
    alone = run_threads(job(config, ranks=1, layers=5)).state_sha256
    assert run_threads(job(config, ranks=2, schedule="1f1b", counts=(2, 3), layers=5)).state_sha256 == alone
    shared = config_of("chat", tmp_path / "shared", **how, shard="optimizer")
    assert run_threads(job(shared, ranks=2, schedule="1f1b", counts=(2, 3), layers=5)).state_sha256 == alone
    feistel = config.model_copy(update={"data": config.data.model_copy(update={"shuffle": "feistel"})})
    other = run_threads(job(feistel, ranks=1, layers=5)).state_sha256
    assert other != alone
    assert run_threads(job(feistel, ranks=2, schedule="1f1b", counts=(2, 3), layers=5)).state_sha256 == other
