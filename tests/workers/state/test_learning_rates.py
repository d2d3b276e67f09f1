"""Schedules of the learning rate, against those of transformers and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import transformers

from workers.config import OptimizerConfig
from workers.state.schedules import SCHEDULES, learning_rate

STEPS, WARM_UP = 40, 8


def theirs(make: Callable[[Any], Any]) -> list[float]:
    """The rate of each step by a scheduler of theirs, over a peak of 0.5."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(**settings: Any) -> list[float]:
    config = OptimizerConfig(lr=0.5, warmup_steps=WARM_UP, min_lr_fraction=0.0, **settings)
    return [learning_rate(config, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"schedule": "cosine"}, transformers.get_cosine_schedule_with_warmup),
        ({"schedule": "linear"}, transformers.get_linear_schedule_with_warmup),
        (
            {"schedule": "polynomial", "power": 2.0},
            lambda optimizer, **along: transformers.get_polynomial_decay_schedule_with_warmup(
                optimizer, lr_end=0.0, power=2.0, **along
            ),
        ),
    ],
)
def test_what_falls_to_the_end_of_the_job(settings: dict[str, Any], make: Callable[..., Any]) -> None:
    """Our last step has the lowest rate, and the first of the warm-up is no step without an update."""
    found = ours(**settings)
    assert found[:WARM_UP] == pytest.approx([0.5 * (n + 1) / WARM_UP for n in range(WARM_UP)])
    after = theirs(lambda optimizer: make(optimizer, num_warmup_steps=WARM_UP, num_training_steps=STEPS - 1))
    assert found[WARM_UP:] == pytest.approx(after[WARM_UP:], abs=1e-12)


def test_what_does_not_depend_on_the_end() -> None:
    assert ours(schedule="constant")[WARM_UP:] == [0.5] * (STEPS - WARM_UP)
    inverse = theirs(lambda o: transformers.get_inverse_sqrt_schedule(o, num_warmup_steps=WARM_UP))
    assert ours(schedule="inverse-sqrt")[WARM_UP:] == pytest.approx(inverse[WARM_UP:])
    steps = theirs(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[20, 30], gamma=0.5))
    found = ours(schedule="step", milestones=[20, 30], gamma=0.5)
    assert found[WARM_UP:] == pytest.approx(steps[WARM_UP:])


def test_stable_then_down() -> None:
    found = ours(schedule="warmup-stable-decay", decay_fraction=0.25)
    down = [rate for rate in found[WARM_UP:] if rate < 0.5]
    assert len(down) == round(0.25 * (STEPS - 1 - WARM_UP))
    assert found[-1] == 0
    assert down == sorted(down, reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_never_rises_after_the_warm_up_nor_falls_below_the_least(schedule: Any) -> None:
    settings = {"milestones": [20]} if schedule == "step" else {}
    config = OptimizerConfig(warmup_steps=3, schedule=schedule, min_lr_fraction=0.05, gamma=0.5, **settings)
    rates = [learning_rate(config, step, 60) for step in range(80)]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert min(rates) >= 0.05 * config.lr - 1e-18
    assert learning_rate(OptimizerConfig(schedule=schedule, **settings), 0, 1) == config.lr


def test_every_schedule_of_the_spec_is_there() -> None:
    assert {*get_args(OptimizerConfig.model_fields["schedule"].annotation)} == SCHEDULES.keys()
