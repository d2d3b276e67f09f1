"""Estimates of the unfrozen gradient's energy from what freezing left of it; and definition D.7."""

import itertools
from collections.abc import Sequence

import pytest

from workers.commit.freezing_scores import total_of
from workers.freezing.energy import estimate
from workers.freezing.mask import Chance, LayerParameters

HELD = LayerParameters("l0", ("a", "b"), (4, 6), (4, 6))
NORM = 2.5
"""The norm of each microbatch's gradient."""


def energy_of_a(chances: Sequence[Chance], formed: int, stable: frozenset[str] = frozenset()) -> float:
    """The estimated energy of `a` when `formed` microbatches have formed gradients at right angles to each other."""
    norms = {"a": formed * NORM**2} if formed else {}
    (energy, _), _ = estimate(HELD, stable, chances, norms, [77.0, 0.0])
    return energy


@pytest.mark.parametrize("frozen", [(0.8,), (0.8,) * 4, (0.1, 0.6, 0.95), (0.0, 0.9), (1.0, 0.3, 1.0)])
@pytest.mark.parametrize("stable", [False, True])
def test_unlike_gradients_give_their_energy_in_expectation(frozen: tuple[float, ...], stable: bool) -> None:
    """The expectation is over all masks, by probability, except the one that leaves nothing."""
    chances = [Chance(p, 0.5) if stable else Chance(0.5, p) for p in frozen]
    names = frozenset({"a"} if stable else ())
    expected = seen = 0.0
    for mask in itertools.product((False, True), repeat=len(frozen)):
        likely = 1.0
        for leaves_out, p in zip(mask, frozen, strict=True):
            likely *= p if leaves_out else 1.0 - p
        if not all(mask):
            seen += likely
            expected += likely * energy_of_a(chances, len(mask) - sum(mask), names)
    assert expected / seen == pytest.approx(len(frozen) * NORM**2)


def test_a_single_microbatch_that_is_formed_is_all_there_is() -> None:
    assert energy_of_a([Chance(0.9, 0.9)], 1) == pytest.approx(NORM**2)


def test_with_nothing_frozen_the_norm_is_the_energy() -> None:
    assert energy_of_a([Chance(0.0, 0.0)] * 8, 8) == 8 * NORM**2


def test_the_last_estimate_stands_where_nothing_was_formed() -> None:
    assert energy_of_a([Chance(0.5, 0.5)] * 2, 0) == 77.0
    # It is always frozen here, although a tied use elsewhere formed a gradient.
    assert energy_of_a([Chance(1.0, 1.0)] * 2, 2) == 77.0


def test_what_is_let_through_is_each_energy_by_its_mean_probability() -> None:
    chances = [Chance(1.0, 0.5), Chance(0.5, 0.0)]
    energies = estimate(HELD, frozenset({"b"}), chances, {}, [8.0, 16.0])
    assert energies == [(8.0, 0.75 * 8.0), (16.0, 0.25 * 16.0)]
    assert total_of(energies) == (24.0, 0.75 * 8.0 + 0.25 * 16.0)
