"""Rules of the frozen prefix on given norms: how many layers each step freezes."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from workers.config import FreezeConfig
from workers.freezing.prefix.rule import CommitSeen, PrefixRule
from workers.freezing.prefix.rules import first_prefix, rule_of
from workers.protocol.frozen_prefix import FrozenPrefix

TWELVE = 14
"""Layers of a model with twelve between the first and the last."""


def pipetransformer(rule: str = "paper", **keys: object) -> FreezeConfig:
    given = {"alpha": 1 / 3, "warm_up": 0, "check_every": 1, **keys}
    return FreezeConfig.model_validate({"method": "pipetransformer", "rule": rule, **given})


def rule(config: FreezeConfig, layers: int = TWELVE) -> PrefixRule:
    found = rule_of(config, layers)
    assert found is not None
    return found


def falling(layers: int = TWELVE) -> list[float]:
    """Norms that are the smaller the later the layer: gradients that hold nothing back."""
    return [float(layers - number) for number in range(layers)]


def after(config: FreezeConfig, norms: Sequence[Sequence[float]], layers: int = TWELVE) -> list[FrozenPrefix]:
    """The prefix after each step, whose layers' gradients have these norms."""
    its, prefix, found = rule(config, layers), first_prefix(config, layers), list[FrozenPrefix]()
    for step, of_step in enumerate(norms, 1):
        prefix = its.after(prefix, CommitSeen(step=step, began=step - 1, along=step, norms=of_step))
        found.append(prefix)
    return found


@pytest.mark.parametrize(
    ("alpha", "bounds"),
    [
        (1 / 3, [4, 6.67, 8.44, 9.63]),  # the values of the reading notes
        (1 / 2, [6, 9, 10.5, 11]),
        (2 / 5, [4.8, 7.68, 9.41, 10.44]),
    ],
)
def test_the_bound_of_eq_1_is_a_real_number_and_is_rounded_down_where_it_applies(
    alpha: float, bounds: list[float]
) -> None:
    found = after(pipetransformer(alpha=alpha), [falling()] * 4)
    assert [each.bound for each in found] == pytest.approx(bounds, abs=0.005)
    # The first layer freezes with its neighbour.
    assert [each.layers for each in found] == [math.floor(bound) + 1 for bound in bounds]


def test_one_of_the_layers_between_first_and_last_is_always_trained() -> None:
    found = after(pipetransformer(alpha=0.9), [falling()] * 20)
    assert found[-1] == FrozenPrefix(layers=12, bound=11.0)


def test_layers_before_the_one_with_the_smallest_gradient_may_freeze() -> None:
    norms = falling()
    norms[1 + 2] = 0.01  # the third of the twelve
    first, second = after(pipetransformer(), [norms, norms])
    assert first == FrozenPrefix(layers=3, bound=2.0)
    assert second == first, "it is the first still trained: nothing more freezes"
    grown = after(pipetransformer(), [norms, norms, falling()])[-1]
    assert grown.bound == pytest.approx(2 + 10 / 3)
    smallest_first = [0.001, 0.1, *falling()[2:]]
    assert after(pipetransformer(), [smallest_first])[-1].layers == 0, (
        "the model's first layer does not count"
    )
    equal = after(pipetransformer(), [[1.0] * TWELVE])[-1]
    assert equal.layers == 0, "of equal ones the first counts"


def test_checks_come_every_so_many_steps_after_the_warm_up_and_not_at_skipped_steps() -> None:
    config = pipetransformer(warm_up=2, check_every=3)
    found = after(config, [falling()] * 9)
    assert [each.layers for each in found] == [0, 0, 0, 0, 5, 5, 5, 7, 7]
    prefix = FrozenPrefix(layers=5, bound=4.0)
    assert (
        rule(config).after(
            prefix, CommitSeen(step=8, began=7, along=8, norms=[math.nan] * TWELVE, skipped=True)
        )
        == prefix
    )


def test_the_authors_rule_freezes_what_changes_least_from_check_to_check() -> None:
    config = pipetransformer("authors", check_every=2)
    steady = [1.0] * TWELVE
    lively = [*[1.0] * 9, *[2.0] * 5]
    found = after(config, [steady, steady, lively, lively])
    assert [each.layers for each in found] == [0, 0, 0, 5], "the bound of alpha holds here too"
    assert found[1].sums_before == (2.0,) * TWELVE
    assert found[3].sums_before == tuple(2 * each for each in lively)
    # The second of the layers between first and last changes most: the one before it freezes.
    one = [1.0, 1.0, 5.0, *[1.0] * 11]
    assert after(config, [steady, steady, one, one])[-1].layers == 2
    moved = replace(found[3], sums=())
    assert (
        rule(config).after(moved, CommitSeen(step=6, began=5, along=6, norms=steady, skipped=True)).layers
        == 5
    )


def test_freezing_by_hand_follows_the_steps_of_the_spec() -> None:
    config = FreezeConfig(method="prefix", schedule=((3, 2), (5, 4), (8, 0)))
    assert first_prefix(config, TWELVE).layers == 0
    assert [each.layers for each in after(config, [falling()] * 8)] == [0, 2, 2, 4, 4, 4, 0, 0]
    at_once = FreezeConfig(method="prefix", prefix=6)
    assert first_prefix(at_once, TWELVE) == FrozenPrefix(layers=6)


def test_what_autofreeze_found_stable_stays_frozen_and_the_last_layer_is_trained() -> None:
    its = rule(FreezeConfig(method="autofreeze", warm_up=0))
    prefix = its.after(its.first(), CommitSeen(step=1, began=0, along=1, norms=falling(), stable=3))
    assert prefix.layers == 3
    assert its.after(prefix, CommitSeen(step=2, began=1, along=2, norms=falling())).layers == 3
    assert (
        its.after(prefix, CommitSeen(step=3, began=2, along=3, norms=falling(), stable=TWELVE)).layers == 13
    )


def test_a_prefix_thaws_for_good_once_the_rate_is_low() -> None:
    config = FreezeConfig(method="prefix", schedule=((2, 3), (6, 5)), thaw="rate")
    its, prefix = rule(config), first_prefix(config, TWELVE)
    layers: list[int] = []
    for step, rate in enumerate((0.05, 1.0, 0.5, 0.1, 0.05, 1.0, 1.0), 1):
        prefix = its.after(
            prefix, CommitSeen(step=step, began=step - 1, along=step, norms=falling(), rate=rate)
        )
        layers.append(prefix.layers)
    assert layers == [3, 3, 3, 0, 0, 0, 0]
    assert (prefix.since, prefix.thawed) == (2, True)


@pytest.mark.parametrize(
    ("losses", "thawed"),
    [
        ([(2, 5.0), (4, 4.0), (6, 3.0)], False),
        ([(2, 5.0), (4, 4.0), (6, 4.0)], True),
        ([(2, 5.0), (4, 4.0), (6, math.nan)], True),
        ([(2, 3.0), (3, 4.0), (6, 2.0)], False),  # what came before the freezing does not count
        ([(4, 4.0)], False),
        ([], False),
    ],
)
def test_a_prefix_thaws_once_validation_stops_improving(
    losses: list[tuple[int, float]], thawed: bool
) -> None:
    its = rule(FreezeConfig(method="prefix", schedule=((4, 3),), thaw="plateau"))
    prefix = its.after(its.first(), CommitSeen(step=3, began=2, along=3, norms=falling()))
    assert (prefix.layers, prefix.since) == (3, 4)
    assert (
        its.after(prefix, CommitSeen(step=7, began=6, along=7, norms=falling(), validations=losses)).thawed
        == thawed
    )


@pytest.mark.parametrize("method", ["none", "timelyfreeze", "apf", "timelyfreeze+autofreeze"])
def test_other_methods_have_no_prefix(method: str) -> None:
    assert rule_of(FreezeConfig.model_validate({"method": method}), TWELVE) is None


def test_a_prefix_is_read_as_it_was_written_and_nothing_else_is() -> None:
    prefix = FrozenPrefix(layers=5, bound=4.5, sums=(1.0, 2.0), sums_before=(0.5, 0.25), since=3)
    assert FrozenPrefix.from_json(json.loads(json.dumps(prefix.to_json()))) == prefix
    told = prefix.to_json()
    for wrong in (None, {}, {**told, "layers": -1}, {**told, "sums": ["1"]}, {**told, "more": 1}):
        with pytest.raises(ValueError, match="wrong prefix"):
            FrozenPrefix.from_json(wrong)
