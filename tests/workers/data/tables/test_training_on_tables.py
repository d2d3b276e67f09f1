"""Jobs on tables have the bits of a plain loop, whatever the ranks, and validate on all that is held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import saved_model, section_of
from jobs import job, small_config
from reference import train_plainly
from word_tokenizer import WORDS, saved_tokenizer

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from orchestrator.verify.ledger import Batches
from planner.course import Course
from workers.checkpoint.folder import checkpoints
from workers.config import DataConfig, FreezeConfig, OptimizerConfig, WorkerConfig
from workers.data.dataset import draws_anew
from workers.data.mixture import Mixture
from workers.data.registry import open_dataset
from workers.devices.device import CpuDevice
from workers.models.registry import build_definition
from workers.protocol.reports import ActivationsKept, ActivationsUsed, StepReport, ValidationReport

TASKS = {
    "chat": ("llama", {"perplexity"}),
    "language": ("gpt2", {"perplexity"}),
    "masked-language": ("bert, masked tokens", {"perplexity"}),
    "classification": ("bert, sequences", {"accuracy", "f1", "matthews"}),
    "question-answering": ("bert, answers", {"exact-match", "f1"}),
}
"""Task -> a model for it, and its metrics."""


def some_words(first: int, count: int) -> str:
    return " ".join(WORDS[(first + n) % len(WORDS)] for n in range(count))


def row_of(task: str, number: int) -> dict[str, Any]:
    """A row of some words, other ones and another number of them for each row."""
    text = some_words(number * 3, 1 + number % 5)
    if task == "question-answering":
        context = some_words(number, 6 + number % 12)
        right = [] if number % 7 == 6 else context.split()[number % 6 :][:2]
        start = context.index(" ".join(right))
        found = (
            {"text": [" ".join(right)], "answer_start": [start]}
            if right
            else {"text": [], "answer_start": []}
        )
        return {"question": text, "context": context, "answers": found}
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
    metrics = []
    for schedule, counts in (("1f1b", (2, layers - 2)), ("zb-h1", (1, layers - 1))):
        run = run_threads(job(config, ranks=2, schedule=schedule, counts=counts, layers=layers))
        assert [each.loss for each in run.reports if isinstance(each, StepReport)] == losses
        assert run.state_sha256 == expected
        (told,) = (each for each in run.reports if isinstance(each, ValidationReport))
        assert told.metrics.keys() == TASKS[task][1]
        metrics.append(told.metrics)
    assert metrics[0] == metrics[1]


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


def test_what_frozen_layers_make_of_rows_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "forward_s", lambda *_: 1.0)
    freeze = FreezeConfig(method="prefix", prefix=2, frozen_mode="eval")
    config = config_of("classification", tmp_path, steps=14, freeze=freeze)
    layers = len(build_definition(config.model, None).layers)
    run = run_threads(job(config, layers=layers))
    without = changed(config, freeze=freeze.model_copy(update={"cache": "off"}))
    assert run.state_sha256 == run_threads(job(without, layers=layers)).state_sha256
    (told,) = (each for each in run.reports if isinstance(each, ActivationsKept))
    assert told.why_not == ""
    assert sum(each.hits for each in run.reports if isinstance(each, ActivationsUsed)) > 30


@pytest.mark.parametrize("task", TASKS)
def test_one_task_makes_something_else_of_a_row_in_each_epoch(task: str, tmp_path: Path) -> None:
    config = config_of(task, tmp_path)
    dataset: Any = open_dataset(config.data, config.model, config.job.folder).dataset
    batches = [dataset.train([0, 1, 2, 3], [key] * 4) for key in (1, 2)]
    other = any(not torch.equal(a, b) for a, b in zip(*(b.inputs for b in batches), strict=True))
    assert draws_anew(dataset) == other == (task == "masked-language")


def validation_of(config: WorkerConfig, **how: Any) -> ValidationReport:
    (told,) = (
        each
        for each in run_threads(job(config, layers=5, **how)).reports
        if isinstance(each, ValidationReport)
    )
    return told


def test_answers_are_judged_alike_on_one_rank_and_on_two(tmp_path: Path) -> None:
    """Questions in several windows, and some without an answer; a learning rate at which the model finds some."""
    config = config_of("question-answering", tmp_path, steps=12)
    config = config.model_copy(update={"optimizer": OptimizerConfig(lr=0.02)})
    alone = validation_of(config)
    assert 0 < alone.metrics["exact-match"] <= alone.metrics["f1"] < 1
    assert validation_of(config, ranks=2, schedule="1f1b", counts=(2, 3)) == alone


def test_mixed_tables_have_one_trajectory_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    """The second table has an eighth of the samples and half of the weight: some of them come several times."""
    config = config_of("masked-language", tmp_path)
    (tmp_path / "few.jsonl").write_text(
        "".join(json.dumps(row_of("masked-language", n)) + "\n" for n in range(5, 15))
    )
    paths = (str(tmp_path / "rows.jsonl"), str(tmp_path / "few.jsonl"))
    data = config.data.model_copy(update={"path": paths, "weights": (1.0, 1.0)})
    config = config.model_copy(update={"data": data})
    layers = len(build_definition(config.model, None).layers)
    whole = run_threads(job(config, layers=layers))
    losses = [each.loss for each in whole.reports if isinstance(each, StepReport)]
    two = run_threads(job(config, ranks=2, schedule="1f1b", layers=layers))
    assert two.state_sha256 == whole.state_sha256
    used = [each.samples_digest for each in whole.reports if isinstance(each, StepReport)]
    mixture = Mixture((48, 8), (1.0, 1.0))
    batches = Batches(seed=config.job.seed, course=Course.of(1, 4, 2))
    assert used == [batches.digest(step, mixture) for step in range(1, 5)]
    stopped = changed(config, output=str(tmp_path / "stopped"))
    first = run_threads(job(stopped, stop_at=2, layers=layers))
    (newest,) = checkpoints(stopped.job.folder)
    second = run_threads(job(stopped, start=newest, generation=2, ranks=2, schedule="1f1b", layers=layers))
    assert second.state_sha256 == whole.state_sha256
    found = [each.loss for run in (first, second) for each in run.reports if isinstance(each, StepReport)]
    assert found == losses
