"""Layers' times follow what steps measure: their division among the passes, whatever the device's speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_profile

from planner.adapt.layer_times import LayerTimeCorrections, with_factors
from planner.adapt.speeds import slowdown_of
from planner.observed import StageTime, StepTimes

LAYERS = tuple(small_profile.layer(f"layer{number}") for number in range(4))
PROFILE = small_profile.profile(*LAYERS)
PLAN = small_profile.plan(3, 1)
FORWARD_S, BACKWARD_S = LAYERS[0].forward_s, LAYERS[0].backward_s


def step(number: int, forward: float, backward: float, *, frozen: bool = False) -> StepTimes:
    """The first rank's step of two microbatches; its three layers' passes take these times the profile's."""
    return StepTimes(
        rank=0,
        place=0,
        step=number,
        plan=PLAN.key,
        times=(
            StageTime(kind="F", stage=0, seconds=2 * 3 * FORWARD_S * forward, count=2),
            StageTime(kind="B", stage=0, seconds=2 * 3 * BACKWARD_S * backward, count=2),
        ),
        frozen=frozen,
    )


def test_a_slow_device_changes_no_layer() -> None:
    known = LayerTimeCorrections(PROFILE)
    assert not any(known.observe(step(number, 3.0, 3.0), PLAN) for number in range(100))
    assert known.factors == ((1.0, 1.0, 1.0),) * 4


def test_the_division_among_passes_is_learned_and_the_whole_stays() -> None:
    known = LayerTimeCorrections(PROFILE)
    changed = [number for number in range(100) if known.observe(step(number, 2 * 1.5, 2 * 1.0), PLAN)]
    assert changed
    assert changed[0] < 10
    corrected = with_factors(PROFILE, known.factors).model.layers
    ratio = (corrected[0].forward_s / FORWARD_S) / (corrected[0].backward_s / BACKWARD_S)
    assert ratio == pytest.approx(1.5, rel=0.01)
    whole = corrected[0].forward_s + corrected[0].backward_s
    assert whole == pytest.approx(FORWARD_S + BACKWARD_S, rel=0.01)
    assert corrected[3] == LAYERS[3]
    again = LayerTimeCorrections(PROFILE, known.factors)
    assert again.factors == known.factors
    assert not again.observe(step(100, 2 * 1.5, 2 * 1.0), PLAN)


def test_frozen_steps_and_other_actions_teach_nothing() -> None:
    known = LayerTimeCorrections(PROFILE)
    assert not any(known.observe(step(number, 2.0, 1.0, frozen=True), PLAN) for number in range(20))
    assert known.factors == ((1.0, 1.0, 1.0),) * 4


def test_a_layer_without_a_backward_pass_teaches_its_forward_alone() -> None:
    """Two of the first rank's three layers are frozen as a whole: its backward passes are those of the third."""
    known = LayerTimeCorrections(PROFILE)
    one = step(1, 1.0, 1 / 3)
    for number in range(50):
        known.observe(replace(one, step=number, prefix=2), PLAN)
    assert known.factors == ((1.0, 1.0, 1.0),) * 4
    for layers, factor in ((0, 1 / 3), (2, 1.0)):
        slowdown, why = slowdown_of(PROFILE, PLAN, 0, one.times[1:], frozen=False, prefix=layers)
        assert not why
        assert slowdown == pytest.approx(factor)


def test_factors_are_three_for_each_layer() -> None:
    assert with_factors(PROFILE, ()) is PROFILE
    with pytest.raises(ValueError):
        with_factors(PROFILE, ((1.0, 1.0, 1.0),))
