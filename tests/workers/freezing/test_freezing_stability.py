"""APF and AutoFreeze against sequences computed by hand."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from planner.freezing import APF_EVERY, statistics_scalars
from workers.commit.freezing_scores import UNKNOWN, score_of
from workers.config import FreezeConfig, OptimizerConfig
from workers.freezing.checks import CheckFindings, Checks
from workers.freezing.mask import LayerParameters
from workers.freezing.stability import (
    STABLE,
    Apf,
    AutoFreeze,
    StabilityMetric,
    make_metric,
    perturbation,
    stable_prefix,
)
from workers.state.layer_state import LayerState
from workers.state.optim import make_optimizer


def layer(metric: StabilityMetric, weight: list[float], bias: list[float]) -> LayerState:
    module = nn.Linear(len(weight), len(bias))
    state = LayerState.of(0, "l0", module, make_optimizer(OptimizerConfig(), 1))
    set_to(state, weight, bias)
    state.freezing = metric.begin(state, LayerParameters.of(state))
    return state


def set_to(state: LayerState, weight: list[float], bias: list[float]) -> None:
    with torch.no_grad():
        state.weights["weight"].copy_(torch.tensor([weight]))
        state.weights["bias"].copy_(torch.tensor(bias))


def checked(metric: StabilityMetric, state: LayerState) -> float:
    """Run a check and adopt its statistics; returns the score for all ranks."""
    before = {key: tensor.clone() for key, tensor in state.freezing.items()}
    found = metric.check(state, LayerParameters.of(state))
    assert all(torch.equal(state.freezing[key], tensor) for key, tensor in before.items())
    for key, value in found.statistics.items():
        state.freezing[key].copy_(value)
    return score_of(found.moves.values())


def flags(state: LayerState) -> list[bool]:
    """Whether bias and weight are stable, in name order."""
    return state.freezing[STABLE].tolist()


def test_apf_by_hand() -> None:
    """alpha 1/2, threshold 0.3. The bias goes up and down, the first weight only up, the second stays."""
    metric = Apf(threshold=0.3, alpha=0.5)
    state = layer(metric, [0.0, 9.0], [0.0])
    assert checked(metric, state) == UNKNOWN
    assert flags(state) == [False, False]
    steps = [
        # weights, bias, E and E_abs of the bias, E = E_abs of the first weight
        ([1.0, 9.0], 8.0, 4.0, 4.0, 0.5),
        ([2.0, 9.0], 0.0, -2.0, 6.0, 0.75),
        ([3.0, 9.0], 4.0, 1.0, 5.0, 0.875),
        ([4.0, 9.0], 3.0, 0.0, 3.0, 0.9375),
        ([5.0, 9.0], 13.0, 5.0, 6.5, 0.96875),
    ]
    stable = [[False, False], [False, False], [True, False], [True, False], [False, False]]
    for (weight, bias, trend, travel, up), expected in zip(steps, stable, strict=True):
        set_to(state, weight, [bias])
        checked(metric, state)
        assert state.freezing["trend"].tolist() == [trend, up, 0.0]
        assert state.freezing["travel"].tolist() == [travel, up, 0.0]
        assert flags(state) == expected
    assert int(state.freezing["checks"]) == 6


def test_apf_scores_a_tensor_by_the_mean_of_its_scalars_that_have_moved() -> None:
    trend = torch.tensor([1.0, -3.0, 0.0, 0.0])
    travel = torch.tensor([2.0, 4.0, 5.0, 0.0])
    assert perturbation(trend, travel) == pytest.approx((0.5 + 0.75 + 0.0) / 3)
    assert perturbation(torch.zeros(3), torch.zeros(3)) == 1.0


def test_apf_a_tensor_that_stands_still_stays_stable() -> None:
    metric = Apf(threshold=0.3, alpha=0.5)
    state = layer(metric, [0.0], [0.0])
    checked(metric, state)
    for value in (8.0, 0.0, 4.0, 4.0, 4.0):
        set_to(state, [value], [value])
        checked(metric, state)
    assert flags(state) == [True, True]
    set_to(state, [40.0], [4.0])
    checked(metric, state)
    assert flags(state) == [True, False]


def drifting(seed: int, scalars: int) -> Iterator[Tensor]:
    """The weights of a parameter at each check: each moves at random, a third of them with a trend."""
    draws = torch.Generator().manual_seed(seed)
    trend = torch.where(torch.arange(scalars) % 3 == 0, 0.5, 0.0)
    weights = torch.zeros(scalars)
    while True:
        weights = weights + torch.randn(scalars, generator=draws) + trend
        yield weights


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_apf_scores_a_large_parameter_by_every_fourth_of_its_scalars(seed: int) -> None:
    """The same score as by all of them, but for chance: 25,000 numbers from 0 to 1 have a mean within 0.01."""
    metric, scalars = Apf(threshold=0.3, alpha=0.9), 100_000
    state = layer(metric, [0.0] * scalars, [0.0])
    trend, travel, before = torch.zeros(scalars), torch.zeros(scalars), torch.zeros(scalars)
    for number, weights in zip(range(8), drifting(seed, scalars), strict=False):
        set_to(state, weights.tolist(), [float(number)])
        checked(metric, state)
        if number:
            trend = 0.9 * trend + 0.1 * (weights - before)
            travel = 0.9 * travel + 0.1 * (weights - before).abs()
        before = weights
    _, looked_at = metric.parts(state.freezing["trend"], LayerParameters.of(state))
    _, walked = metric.parts(state.freezing["travel"], LayerParameters.of(state))
    assert looked_at.allclose(trend[::APF_EVERY], atol=1e-6)
    assert perturbation(looked_at, walked) == pytest.approx(perturbation(trend, travel), abs=0.01)


@pytest.mark.parametrize("method", ["apf", "autofreeze", "timelyfreeze+apf"])
def test_statistics_take_four_bytes_for_each_weight_as_the_planner_counts_them(method: str) -> None:
    metric = make_metric(FreezeConfig(method=method))
    assert metric is not None
    module = nn.Sequential(nn.Linear(64, 129), nn.LayerNorm(129), nn.Linear(129, 64))
    state = LayerState.of(0, "l0", module, make_optimizer(OptimizerConfig(), 1))
    kept = metric.begin(state, LayerParameters.of(state))
    sizes = [weight.numel() for weight in state.weights.values()]
    planned = 4 * sum(statistics_scalars(method, scalars) for scalars in sizes)
    assert sum(kept[key].nbytes for key in kept.keys() & {"reference", "trend", "travel"}) == planned
    assert planned <= 4 * sum(sizes)


def test_autofreeze_by_hand() -> None:
    metric = AutoFreeze()
    state = layer(metric, [0.0, 0.0], [0.0])
    scores = []
    # Updates by (3, 4, 0), (0, 0, 10), (0, 6, 8), (0, 0, 0), (2, 0, 0): norms 5, 10, 10, 0, 2.
    places = [((0, 0), 0), ((3, 4), 0), ((3, 4), 10), ((3, 10), 18), ((3, 10), 18), ((5, 10), 18)]
    for weight, bias in places:
        set_to(state, list(weight), [bias])
        scores.append(checked(metric, state))
    assert scores == [UNKNOWN, UNKNOWN, 1.0, 0.0, 1.0, UNKNOWN]
    assert state.freezing["squares"].tolist() == [0.0, 4.0]


@pytest.mark.parametrize(
    ("scores", "percentile", "stable"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5], 80, 4),
        ([0.1, 0.2, 0.3, 0.4, 0.5], 79, 3),
        ([0.1, 0.9, 0.3, 0.4, 0.5], 80, 1),
        ([0.9, 0.1, 0.1, 0.1, 0.1], 80, 0),
        ([0.1, 0.2, 0.3, 0.4, 0.5], 100, 5),
        ([0.1, 0.2, 0.3, 0.4, 0.5], 19, 0),
        ([0.1, 0.2, 0.3, 0.4, 0.5], 0, 0),
        # Settled layers keep score 0. They count towards the percentile, so in the end not all layers freeze.
        ([0.0, 0.0, 0.0, 0.3, 0.2], 80, 3),
        ([0.0, 0.0, 0.0, 0.2, 0.3], 80, 4),
        ([0.0, 0.0, 0.0, 0.0, 0.3], 80, 4),
        ([UNKNOWN] * 5, 80, 0),
        ([0.1, UNKNOWN, 0.2, 0.3, 0.4], 100, 1),
    ],
)
def test_layers_become_stable_from_the_input_up(scores: list[float], percentile: float, stable: int) -> None:
    assert stable_prefix(dict(enumerate(scores)), percentile) == stable


@pytest.mark.parametrize("method", ["apf", "autofreeze"])
def test_checks_are_due_at_the_end_of_the_warm_up_and_every_so_many_steps_after(method: str) -> None:
    config = FreezeConfig(method=method, warm_up=3, check_every=4)
    metric = make_metric(config)
    assert metric is not None
    state = layer(metric, [1.0], [2.0])
    checks = Checks(config, {0: state}, {0: LayerParameters.of(state)})
    due = []
    for step in range(1, 14):
        found = checks.look(step)
        assert not ((found.scores or found.moves) and found.stable)
        if found != CheckFindings():
            due.append(step)
        checks.accept(found.scores)
    assert due == [4, 8, 12]
    assert int(state.freezing["checks"]) == len(due)


def test_autofreeze_says_what_updates_do_not_change_and_what_other_scores_follow_from() -> None:
    config = FreezeConfig(method="autofreeze", warm_up=0, check_every=1)
    state, still = (layer(AutoFreeze(), [1.0], [2.0]) for _ in range(2))
    states = {0: state, 1: still}
    checks = Checks(config, states, {number: LayerParameters.of(each) for number, each in states.items()})
    assert checks.look(1) == CheckFindings(scores={0: UNKNOWN, 1: UNKNOWN})
    checks.accept({0: UNKNOWN, 1: UNKNOWN})
    still.freezing[STABLE].fill_(True)
    assert (checks.stable(0), checks.stable(1)) == (frozenset(), {"weight", "bias"})
    for step, weight, before, now in ((2, 4.0, 0.0, 9.0), (3, 5.0, 9.0, 1.0)):
        set_to(state, [weight], [2.0])
        assert checks.look(step) == CheckFindings(
            scores={1: 0.0}, moves={0: {"bias": (0.0, 0.0), "weight": (before, now)}}
        )
        checks.accept({0: 1.0, 1: 0.0})


def test_without_a_check_nothing_is_stable() -> None:
    assert stable_prefix({}, 80) == 0
    assert math.isinf(UNKNOWN)


def test_each_method_has_its_metric() -> None:
    kinds = {
        method: type(make_metric(FreezeConfig(method=method)))
        for method in (
            "none",
            "timelyfreeze",
            "apf",
            "autofreeze",
            "timelyfreeze+apf",
            "timelyfreeze+autofreeze",
        )
    }
    assert list(kinds.values()) == [type(None), type(None), Apf, AutoFreeze, Apf, AutoFreeze]
