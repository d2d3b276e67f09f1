"""The engine's weights equal a plain autograd loop's bit for bit, for any schedule and partition."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
SIXTEEN_BITS = ("plain", "dropout", "two-outputs", "batchnorm", "raw-matrix", "attention", "fixed")
PAIRS = [(family, (number + half) % 2 == 0) for half in (0, 1) for number, family in enumerate(FAMILIES)]
"""Every family with and without recomputation; each half has every family once."""


def turns(cases: Sequence[str]) -> list[Any]:
    """Values of `turn`: each case of a test has all pairs with them. In `make test` is the first, with which the cases
    have all pairs between them."""
    return [0, *(pytest.param(turn, marks=pytest.mark.soak) for turn in range(1, parts(cases)))]


def parts(cases: Sequence[str]) -> int:
    return min(max(len(cases), 2), 5)


def part_of(cases: Sequence[str], case: str, turn: int) -> list[tuple[str, bool]]:
    """The pairs of `case` in this turn."""
    size = -(-len(PAIRS) // parts(cases))
    first = size * ((cases.index(case) + turn) % parts(cases))
    return PAIRS[first : first + size]


def losses(run: object) -> list[float]:
    return [r.loss for r in run.reports if isinstance(r, StepReport)]


@pytest.mark.parametrize("turn", turns(TRAITS))
@pytest.mark.parametrize("trait", TRAITS)
def test_every_family_equals_the_plain_loop(tmp_path: Path, trait: str, turn: int) -> None:
    config = small_config(tmp_path, trait)
    expected, expected_losses = train_plainly(config, tmp_path, boundaries=trait == "transposed")
    for family, recompute in part_of(TRAITS, trait, turn):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected, (family, recompute)
        assert losses(run) == expected_losses


@pytest.mark.parametrize("turn", turns(UNEQUAL))
@pytest.mark.parametrize("trait", UNEQUAL)
def test_unequal_stages_and_one_stage_per_layer_equal_the_plain_loop(
    tmp_path: Path, trait: str, turn: int
) -> None:
    config = small_config(tmp_path, trait)
    expected, _ = train_plainly(config, tmp_path)
    for family, recompute in part_of(UNEQUAL, trait, turn):
        two_per_rank = family in ("interleaved", "zbv")
        cuts = [(2, (1, 4, 2, 1)), (4, (1,) * 8)] if two_per_rank else [(2, (3, 5)), (8, (1,) * 8)]
        for ranks, counts in cuts:
            run = run_threads(job(config, ranks=ranks, schedule=family, counts=counts, recompute=recompute))
            assert run.state_sha256 == expected, (family, counts, recompute)


@pytest.mark.parametrize("turn", turns(("gpt-tied",)))
def test_tied_embeddings_in_every_family_equal_one_rank(tmp_path: Path, turn: int) -> None:
    config = real_config(tmp_path, "gpt-tied")
    expected = run_threads(job(config))
    for family, recompute in part_of(("gpt-tied",), "gpt-tied", turn):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected.state_sha256, (family, recompute)
        assert losses(run) == losses(expected)


@pytest.mark.parametrize("turn", turns(UNTIED))
@pytest.mark.parametrize("name", UNTIED)
def test_real_models_equal_the_plain_loop(tmp_path: Path, name: str, turn: int) -> None:
    config = real_config(tmp_path, name)
    expected, _ = train_plainly(config, tmp_path)
    for family, recompute in part_of(UNTIED, name, turn):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected, (family, recompute)


@pytest.mark.parametrize("turn", turns(SIXTEEN_BITS))
@pytest.mark.parametrize("trait", SIXTEEN_BITS)
def test_every_family_equals_the_plain_loop_in_16_bits(tmp_path: Path, trait: str, turn: int) -> None:
    config = small_config(tmp_path, trait, precision="bfloat16")
    expected, expected_losses = train_plainly(config, tmp_path)
    for family, recompute in part_of(SIXTEEN_BITS, trait, turn):
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected, (family, recompute)
        assert losses(run) == expected_losses


ADDED_WIDE = (
    "dropout bfloat16",
    "twice bfloat16",
    "attention bfloat16",
    "attention bfloat16-autocast",
    "raw-matrix bfloat16-autocast",
)


@pytest.mark.usefixtures("uncompared")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="what stands in for a GPU's kernel here, it has")
@pytest.mark.parametrize("turn", turns(ADDED_WIDE))
@pytest.mark.parametrize("case", ADDED_WIDE)
def test_products_of_16_bits_that_are_added_in_32_equal_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, turn: int
) -> None:
    (trait, precision), pairs = case.split(), part_of(ADDED_WIDE, case, turn)
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
    for family, recompute in pairs:
        run = run_threads(job(config, ranks=2, schedule=family, recompute=recompute))
        assert run.state_sha256 == expected, (family, recompute)
    assert len(added) == len(pairs) * plainly


@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "vit"])
def test_real_models_equal_the_plain_loop_in_16_bits(tmp_path: Path, name: str) -> None:
    config = real_config(tmp_path, name, precision="bfloat16")
    expected, _ = train_plainly(config, tmp_path)
    run = run_threads(job(config, ranks=2, schedule="zb-h1"))
    assert run.state_sha256 == expected


@pytest.mark.parametrize("cases", [TRAITS, UNEQUAL, UNTIED, SIXTEEN_BITS, ADDED_WIDE])
def test_the_cases_of_make_test_have_every_family_with_and_without_recomputation(
    cases: Sequence[str],
) -> None:
    every = {(family, again) for family in FAMILIES for again in (False, True)}
    assert {one for case in cases for one in part_of(cases, case, 0)} == every
    for case in cases:
        assert {one for turn in range(parts(cases)) for one in part_of(cases, case, turn)} == every
