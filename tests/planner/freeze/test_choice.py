"""Which way of freezing is taken: by hand on layers whose times and gradients are round."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from small_profile import layer, plan, profile

from planner.freeze.choice import GAIN, FreezeOption, better, freeze_options
from planner.freeze.decision import FreezeQuestion, decide
from planner.freezing import AUTO, Phases
from planner.schedule.registry import build
from planner.simulation.predict import predict

OF = profile(*(layer(update_s=0.0, weight_grad_s=1.0, input_grad_s=1.0) for _ in range(4)), ranks=1)
"""F = I = W = 1 s."""
WHOLE, SCHEDULE = plan(4), build("1f1b", 1, 2)
"""Two microbatches on one rank."""


def found(
    energies: Sequence[float], least_update: float, unpacked: float = 1.0, confirmed: float = 1.0
) -> list[FreezeOption]:
    """The options under SGD, where a step without a prefix takes `unpacked` of what it takes with the layers where they
    are."""
    question = FreezeQuestion(
        plan=WHOLE,
        schedule=SCHEDULE,
        phases=Phases(warm_up=0, monitoring=2, ramp=2),
        r_max=AUTO,
        least_update=least_update,
        energies=tuple(energies),
        confirmed=confirmed,
        profile=OF,
    )
    ratios = decide(question, ()).ratios

    def laid_out_s(prefix: int) -> float:
        return step_s(prefix) * (1.0 if prefix else unpacked)

    return [*freeze_options(question, ratios, laid_out_s, least=least_update)]


def test_the_ratios_count_with_the_layers_where_they_would_be_without_a_prefix() -> None:
    packed, *_ = found([1.0, 1.0, 2.0, 4.0], 0.4)
    anew, *_ = found([1.0, 1.0, 2.0, 4.0], 0.4, unpacked=0.5)
    assert anew.kappa == pytest.approx(packed.kappa / 2)
    assert anew.progress == packed.progress


def test_the_ratios_save_what_steps_have_shown() -> None:
    of_ranks, *_ = found([0.1, 1.0, 2.0, 4.0], 0.4)
    by_half, *_ = found([0.1, 1.0, 2.0, 4.0], 0.4, confirmed=0.5)
    by_none, *_ = found([0.1, 1.0, 2.0, 4.0], 0.4, confirmed=0.0)
    assert of_ranks.kappa < 1.0
    assert by_half.kappa == pytest.approx((1.0 + of_ranks.kappa) / 2)
    assert (by_none.kappa, by_none.progress) == (1.0, 1.0)


def step_s(prefix: int) -> float:
    return predict(OF.with_prefix(prefix), WHOLE, SCHEDULE).step_s


def test_a_prefix_costs_the_energy_of_its_layers_and_spares_their_backward_passes() -> None:
    ratios, *prefixes = found([1.0, 1.0, 2.0, 4.0], 0.4)
    assert ratios.prefix == 0
    assert [(each.prefix, each.progress) for each in prefixes] == [(1, 0.875), (2, 0.75), (3, 0.5)]
    unfrozen_s = predict(OF, WHOLE, SCHEDULE).step_s
    for each in prefixes:
        frozen_s = step_s(each.prefix)
        assert unfrozen_s - frozen_s == pytest.approx(2 * 2 * each.prefix)
        assert each.kappa == pytest.approx(frozen_s / unfrozen_s)
        assert each.time == pytest.approx(each.kappa / each.progress)


def test_no_prefix_leaves_less_than_is_asked_for() -> None:
    for least, most in ((0.8, 1), (0.6, 2), (0.9, 0), (0.1, 3)):
        assert max(each.prefix for each in found([1.0, 1.0, 2.0, 4.0], least)) == most
        assert all(each.progress >= least for each in found([1.0, 1.0, 2.0, 4.0], least))


@pytest.mark.parametrize(
    ("times", "now", "chosen"),
    [
        ([1.0, 0.9, 0.8], 0, 2),
        ([1.0, 0.9, 0.8], 2, None),
        ([0.7, 0.9, 0.8], 2, 0),
        ([1.0, 1.0 - 0.9 * GAIN], 0, None),
        ([1.0, 1.0 - 1.1 * GAIN], 0, 1),
        ([1.0, 0.9], 5, 1),
    ],
    ids=["the best", "it has it", "back to the ratios", "too little", "enough", "what it has is no more"],
)
def test_a_job_changes_where_that_saves_enough(times: list[float], now: int, chosen: int | None) -> None:
    each = [FreezeOption(prefix=number, kappa=time, progress=1.0) for number, time in enumerate(times)]
    best = better(each, now)
    assert (None if best is None else best.prefix) == chosen
