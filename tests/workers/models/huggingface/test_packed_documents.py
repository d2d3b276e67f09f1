"""Documents packed into a row: the logits and gradients of single ones, and jobs with the same bits everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import CONFIGS, logits_of, saved_model, section_of, small_model
from jobs import job, small_config
from rank_group import RankGroup, quiet_sha256, state_sha256
from reference import train_plainly
from test_migration import ENDLESS, follow, moving
from torch import Tensor, nn
from word_tokenizer import WORDS, saved_tokenizer

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from workers.build import build_module
from workers.config import DataConfig, ModelConfig, WorkerConfig
from workers.data.registry import open_dataset
from workers.models.documents import positions_in, seen_by_each
from workers.models.huggingface.definition import CLASSES, definition_of
from workers.models.registry import build_definition
from workers.protocol.reports import SampleReport, StepReport, ValidationReport
from workers.protocol.section import Units

DECODERS = [
    case
    for case, (name, _) in CONFIGS.items()
    if name in CLASSES and CLASSES[name].classes[name][1] == "language"
]
OWN = ["gpt", "llama of ours"]
LENGTHS = ((5, 1, 6), (9, 2))
"""Of the documents in each row of 12 tokens; the rest of the second is padding."""
DOCUMENTS = torch.tensor([[1] * 5 + [2] + [3] * 6, [1] * 9 + [2] * 2 + [0]])
TOKENS = torch.randint(4, 50, (2, 12), generator=torch.Generator().manual_seed(2))


def layers_of(case: str, units: Units) -> list[nn.Module]:
    if case in OWN:
        sizes = {"layers": 3, "width": 32, "heads": 4, "context": 12, "vocabulary": 50, "units": units}
        if case != "gpt":
            sizes["kv_heads"] = 2
        definition = build_definition(ModelConfig(family=case.split()[0], **sizes), None)
    else:
        definition = definition_of(small_model(case), None, units)
    return [build_module(definition, n, seed=0).train() for n in range(len(definition.layers))]


def run(modules: list[nn.Module], *inputs: Tensor) -> Tensor:
    tensors = inputs
    for each in modules:
        returned = each(*tensors)
        tensors = returned if isinstance(returned, tuple) else (returned,)
    return tensors[0]


def gradients(modules: list[nn.Module]) -> dict[str, Tensor]:
    found = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            found[f"{number}.{name}"], parameter.grad = parameter.grad, None
    return found


def test_who_sees_whom() -> None:
    assert positions_in(DOCUMENTS).tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5], [*range(9), 0, 1, 0]]
    for window in (None, 3):
        seen = seen_by_each(DOCUMENTS, window)
        assert seen.shape == (2, 1, 12, 12)
        for row, numbers in enumerate(DOCUMENTS.tolist()):
            for one, own in enumerate(numbers):
                expected = [
                    number == own and other <= one and (window is None or one - other < window)
                    for other, number in enumerate(numbers)
                ]
                assert seen[row, 0, one].tolist() == expected


@pytest.mark.parametrize(
    ("case", "units"),
    [
        *((case, "blocks") for case in (*DECODERS, *OWN)),
        *((case, "halves") for case in ("llama", "gpt2", *OWN)),
    ],
)
def test_packed_documents_have_the_logits_and_gradients_of_single_ones(case: str, units: Units) -> None:
    """To the last bits but few: kernels add up rows of other lengths in another order."""
    modules = layers_of(case, units)
    weights = torch.randn(2, 12, 50, generator=torch.Generator().manual_seed(3))
    weights[DOCUMENTS == 0] = 0.0
    packed = run(modules, TOKENS, DOCUMENTS, positions_in(DOCUMENTS))
    packed.backward(weights)
    together = gradients(modules)
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            part = (slice(row, row + 1), slice(begin, begin + length))
            alone = run(modules, TOKENS[part])
            torch.testing.assert_close(packed[part], alone, rtol=1e-5, atol=2e-6)
            alone.backward(weights[part])
            begin += length
    torch.testing.assert_close(together, gradients(modules), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [*DECODERS, *OWN])
def test_a_document_does_not_see_the_others_by_a_bit(case: str) -> None:
    modules = layers_of(case, "blocks")
    positions = positions_in(DOCUMENTS)
    before = run(modules, TOKENS, DOCUMENTS, positions)
    other = torch.where(DOCUMENTS == 2, TOKENS, 53 - TOKENS)
    after = run(modules, other, DOCUMENTS, positions)
    assert torch.equal(before[DOCUMENTS == 2], after[DOCUMENTS == 2])
    assert not torch.equal(before[DOCUMENTS == 3], after[DOCUMENTS == 3])


@pytest.mark.parametrize("case", DECODERS)
def test_packed_logits_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """It finds the documents by positions that begin again."""
    model = small_model(case)
    whole = saved_model(case, tmp_path)
    definition = section_of(case, tmp_path).definition(None)
    modules = [build_module(definition, n, seed=0).train() for n in range(len(definition.layers))]
    positions = positions_in(DOCUMENTS)
    theirs = logits_of(model, whole, {"input_ids": TOKENS, "position_ids": positions})
    weights = torch.randn_like(theirs)
    ours = run(modules, TOKENS, DOCUMENTS, positions)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)
    theirs.backward(weights)
    ours.backward(weights)
    found = sorted(float(each.double().sum()) for each in gradients(modules).values())
    if model.config.tie_word_embeddings:
        return  # the whole model has the sum of two of ours
    expected = [parameter.grad for parameter in whole.parameters()]
    assert found == sorted(float(each.double().sum()) for each in expected)


def config_of(case: str, folder: Path, **changes: Any) -> WorkerConfig:
    if case in OWN:
        model: Any = ModelConfig(family=case.split()[0], layers=3, width=16, heads=2)
    else:
        saved_model(case, folder / "model")
        model = section_of(case, folder / "model")
    texts = (" ".join(WORDS[(n + k) % 15] for k in range(1 + n * 7 % 15)) for n in range(60))
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataConfig(
        source="table",
        task="language",
        path=str(folder / "rows.jsonl"),
        tokenizer=saved_tokenizer(folder / "tokenizer"),
        validation_fraction=0.3,
        cache=str(folder / "cache"),
        pack=True,
    )
    model = model.model_copy(update={"context": 24})
    return small_config(folder / "run", model=model, data=data, **{"steps": 3, **changes})


@pytest.mark.parametrize("case", ["llama", "mistral", "gpt2", *OWN])
def test_a_job_on_packed_documents_has_the_bits_of_a_plain_loop(case: str, tmp_path: Path) -> None:
    config = config_of(case, tmp_path)
    expected, losses = train_plainly(config, tmp_path, boundaries=True)
    for schedule, counts, recompute in (("1f1b", (2, 3), False), ("zb-h1", (1, 4), True)):
        run = run_threads(
            job(config, ranks=2, schedule=schedule, counts=counts, layers=5, recompute=recompute)
        )
        assert [each.loss for each in run.reports if isinstance(each, StepReport)] == losses
        assert run.state_sha256 == expected


def test_layers_move_with_the_same_bits_while_documents_are_packed(tmp_path: Path) -> None:
    config = config_of("llama of ours", tmp_path, steps=ENDLESS)
    two = job(config, ranks=2, schedule="zb-h1", counts=(2, 3), layers=5)
    with RankGroup(config, 2) as group:

        def move() -> None:
            group.wait_for(lambda reports: any(isinstance(r, StepReport) for r in reports))
            copying, taking = moving(two, (4, 1))
            follow(group, two, range(2), copying)
            follow(group, two, range(2), taking)
            group.stop()

        ended = group.train(two, range(2), meanwhile=move)
        assert state_sha256(ended) == quiet_sha256(job(config, layers=5), ended)


def test_a_sample_of_text_continues_one_document(tmp_path: Path) -> None:
    config = config_of("llama of ours", tmp_path, steps=1, sample_tokens=2)
    run = run_threads(job(config, ranks=2, schedule="1f1b", counts=(2, 3), layers=5))
    (told,) = (report for report in run.reports if isinstance(report, SampleReport))
    data = open_dataset(config.data, config.model, config.job.folder)
    tokens, documents, _ = data.dataset.validation([0]).inputs
    assert documents[0].max() > 1
    assert data.tokenizer is not None
    assert told.prompt == data.tokenizer.decode(tokens[0][documents[0] == 1].tolist())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_perplexity_is_that_of_padded_documents(precision: str, tmp_path: Path) -> None:
    """Before a step changes weights, as packed and padded steps are of other documents."""
    config = config_of("llama", tmp_path, steps=1, precision=precision)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 1e-30})})
    found = []
    for pack in (True, False):
        data = config.data.model_copy(update={"pack": pack})
        each = run_threads(job(changed(config, data=data), ranks=2, schedule="1f1b", counts=(2, 3), layers=5))
        (told,) = (report for report in each.reports if isinstance(report, ValidationReport))
        found.append(told.metrics["perplexity"])
    assert found[0] == pytest.approx(found[1], rel=1e-6 if precision == "float32" else 1e-3)
    assert found[0] > 10
