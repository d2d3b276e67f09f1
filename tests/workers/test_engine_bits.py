"""The engine's weights equal a plain autograd loop's bit for bit, for any schedule and partition."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import DEVICE, FAMILIES, job, small_config
from reference import train_plainly
from torch import Tensor

from benchmarks.parts.rank_threads import run_threads
from workers.config import DataConfig, ModelConfig, WorkerConfig
from workers.layers.deferred import modules
from workers.protocol.reports import StepReport

TRAITS = ("plain", "dropout", "two-outputs", "transposed", "batchnorm", "raw-matrix", "attention", "fixed")
REAL = {
    "gpt": ModelConfig(family="gpt", layers=6, width=32, heads=2, context=16),
    "gpt-dropout": ModelConfig(family="gpt", layers=6, width=32, heads=2, context=16, dropout=0.1),
    "gpt-tied": ModelConfig(
        family="gpt", layers=6, width=32, heads=2, context=16, dropout=0.1, tied_embeddings=True
    ),
    "llama": ModelConfig(family="llama", layers=6, width=32, heads=4, kv_heads=2, context=16),
    "vit": ModelConfig(family="vit", layers=6, width=32, heads=2),
}


def real_config(output: Path, name: str, **changes: object) -> WorkerConfig:
    # All that is held out of the manual takes ten times as long as a job's few steps.
    data = DataConfig(source="digits" if name == "vit" else "python-docs", validation_batches=2)
    return small_config(output, model=REAL[name], data=data, **changes)


UNTIED = tuple(name for name in REAL if name != "gpt-tied")
UNEQUAL = ("plain", "dropout", "batchnorm")
HALVES = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.soak)])
"""Halves of families x recomputation. In `make test` the cases of a test cover both halves between them."""


def half_of(cases: Sequence[str], case: str, half: int) -> list[tuple[str, bool]]:
    """Every family once, half of them with recomputation, depending on the position of `case` in `cases`."""
    turn = cases.index(case) + half
    return [(family, (number + turn) % 2 == 0) for number, family in enumerate(FAMILIES)]


def losses(run: object) -> list[float]:
    return [r.loss for r in run.reports if isinstance(r, StepReport)]


@HALVES
@pytest.mark.parametrize("trait", TRAITS)
def test_every_family_equals_the_plain_loop(tmp_path: Path, trait: str, half: int) -> None:
    config = small_config(tmp_path, trait)
    expected, expected_losses = train_plainly(config, tmp_path, boundaries=trait == "transposed")
    for family, recompute in half_of(TRAITS, trait, half):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected, (family, recompute)
        assert losses(run) == expected_losses


@HALVES
@pytest.mark.parametrize("trait", UNEQUAL)
def test_unequal_stages_and_one_stage_per_layer_equal_the_plain_loop(
    tmp_path: Path, trait: str, half: int
) -> None:
    config = small_config(tmp_path, trait)
    expected, _ = train_plainly(config, tmp_path)
    for family, recompute in half_of(UNEQUAL, trait, half):
        two_per_rank = family in ("interleaved", "zbv")
        cuts = [(2, (1, 4, 2, 1)), (4, (1,) * 8)] if two_per_rank else [(2, (3, 5)), (8, (1,) * 8)]
        for ranks, counts in cuts:
            run = run_threads(job(config, ranks=ranks, schedule=family, counts=counts, recompute=recompute))
            assert run.state_sha256 == expected, (family, counts, recompute)


@HALVES
def test_tied_embeddings_in_every_family_equal_one_rank(tmp_path: Path, half: int) -> None:
    config = real_config(tmp_path, "gpt-tied")
    expected = run_threads(job(config))
    for family, recompute in half_of(("gpt-tied",), "gpt-tied", half):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected.state_sha256, (family, recompute)
        assert losses(run) == losses(expected)


@HALVES
@pytest.mark.parametrize("name", UNTIED)
def test_real_models_equal_the_plain_loop(tmp_path: Path, name: str, half: int) -> None:
    config = real_config(tmp_path, name)
    expected, _ = train_plainly(config, tmp_path)
    for family, recompute in half_of(UNTIED, name, half):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected, (family, recompute)


SIXTEEN_BITS = ("plain", "dropout", "two-outputs", "batchnorm", "raw-matrix", "attention", "fixed")


@pytest.mark.parametrize("trait", SIXTEEN_BITS)
def test_every_family_equals_the_plain_loop_in_16_bits(tmp_path: Path, trait: str) -> None:
    config = small_config(tmp_path, trait, precision="bfloat16")
    expected, expected_losses = train_plainly(config, tmp_path)
    for family, recompute in half_of(SIXTEEN_BITS, trait, 0):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected, (family, recompute)
        assert losses(run) == expected_losses


@pytest.mark.usefixtures("uncompared")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="what stands in for a GPU's kernel here, it has")
@pytest.mark.parametrize(
    ("trait", "precision"),
    [
        ("dropout", "bfloat16"),
        ("twice", "bfloat16"),
        ("attention", "bfloat16"),
        ("attention", "bfloat16-autocast"),
        ("raw-matrix", "bfloat16-autocast"),
    ],
)
def test_products_of_16_bits_that_are_added_in_32_equal_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trait: str, precision: str
) -> None:
    added: list[tuple[int, ...]] = []

    def add_product_(total: Tensor, one: Tensor, other: Tensor) -> None:
        added.append(tuple(total.shape))
        total.add_(one.float() @ other.float())

    monkeypatch.setattr(modules, "adds_wide", lambda factor, total: factor.element_size() == 2)
    monkeypatch.setattr(modules, "add_product_", add_product_)
    config = small_config(tmp_path, trait, precision=precision)
    expected, _ = train_plainly(config, tmp_path, wide=True)
    assert train_plainly(config, tmp_path)[0] != expected, "other products"
    plainly, added[:] = len(added), []
    for family, recompute in half_of(SIXTEEN_BITS, "plain", 0):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected, (family, recompute)
    assert len(added) == len(FAMILIES) * plainly


@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "vit"])
def test_real_models_equal_the_plain_loop_in_16_bits(tmp_path: Path, name: str) -> None:
    config = real_config(tmp_path, name, precision="bfloat16")
    expected, _ = train_plainly(config, tmp_path)
    run = run_threads(job(config, ranks=2, schedule="zb-h1"))
    assert run.state_sha256 == expected


@pytest.mark.parametrize("cases", [TRAITS, UNEQUAL, UNTIED])
def test_the_cases_of_make_test_have_every_family_with_and_without_recomputation(
    cases: Sequence[str],
) -> None:
    seen = {one for case in cases for one in half_of(cases, case, 0)}
    assert seen == {(family, again) for family in FAMILIES for again in (False, True)}
