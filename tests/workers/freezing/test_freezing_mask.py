"""Masks: independent draws whose expected share of the weight is the ratio, the same on any rank."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.parts.rank_threads import Hub, LocalChannel
from planner.freezing import AUTO, REFERENCE_AT, REFERENCE_EVERY, Budget, FreezePlan, Phases
from workers.commit.commit import CommitDecision
from workers.config import FreezeConfig, OptimizerConfig
from workers.freezing.freezer import Extent, Freezer, begin_statistics
from workers.freezing.mask import NOTHING, Chance, LayerParameters, Mask, draw, topped_up_or_thinned
from workers.freezing.plans import FreezePlans
from workers.freezing.ratios import ALWAYS, NEVER, Budgets, Share, phases_of
from workers.freezing.stability import STABLE
from workers.protocol.errors import JobError
from workers.protocol.reports import FreezeReport, FrozenAction
from workers.reproducibility import rng
from workers.state.layer_state import LayerState
from workers.state.optim import make_optimizer

DRAWS = 1000


def block(seed: int = 0) -> LayerState:
    torch.manual_seed(seed)
    module = nn.ModuleDict(
        {
            "norm": nn.LayerNorm(8),
            "q": nn.Linear(8, 8),
            "up": nn.Linear(8, 32),
            "down": nn.Linear(32, 8, bias=False),
            "fixed": nn.Linear(8, 8),
        }
    )
    for parameter in module["fixed"].parameters():
        parameter.requires_grad_(False)
    return LayerState.of(3, "block", module, make_optimizer(OptimizerConfig(), 1))


def masks(stable: frozenset[str], chance: Chance) -> list:
    held = LayerParameters.of(block())
    return [draw(held, stable, chance, seed=5, step=step, microbatch=2) for step in range(DRAWS)]


def test_weights_are_the_matrices_scalars_and_what_the_model_holds_fixed_is_left_alone() -> None:
    held = LayerParameters.of(block())
    assert held.names == (
        "down.weight",
        "norm.bias",
        "norm.weight",
        "q.bias",
        "q.weight",
        "up.bias",
        "up.weight",
    )
    assert held.scalars == (256, 8, 8, 8, 64, 32, 256)
    assert held.weights == (256, 0, 0, 0, 64, 0, 256)
    assert held.weight({"q.weight", "q.bias"}) == 64
    vectors = LayerParameters.of(
        LayerState.of(0, "norm", nn.LayerNorm(4), make_optimizer(OptimizerConfig(), 1))
    )
    assert vectors.weights == (4, 4)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.83])
def test_expected_share_of_weight_is_the_ratio_and_each_parameter_draws_for_itself(ratio: float) -> None:
    held = LayerParameters.of(block())
    drawn = masks(frozenset(), Chance(ratio, ratio))
    assert all(mask.planned == pytest.approx(ratio) for mask in drawn)
    # Four standard errors; the share's variance is that of independent draws, by weight.
    spread = math.sqrt(ratio * (1 - ratio))
    by_weight = math.sqrt(sum(w * w for w in held.weights)) / sum(held.weights)
    share = sum(mask.actual for mask in drawn) / DRAWS
    assert share == pytest.approx(ratio, abs=4 * spread * by_weight / math.sqrt(DRAWS))
    hits = {name: sum(name in mask.frozen for mask in drawn) / DRAWS for name in held.names}
    for name in held.names:
        assert hits[name] == pytest.approx(ratio, abs=4 * spread / math.sqrt(DRAWS)), name
    for i, one in enumerate(held.names):
        for other in held.names[i + 1 :]:
            together = sum({one, other} <= mask.frozen for mask in drawn) / DRAWS
            assert together == pytest.approx(hits[one] * hits[other], abs=4 * 0.5 / math.sqrt(DRAWS)), (
                one,
                other,
            )


def test_what_a_mask_says_of_itself() -> None:
    held = LayerParameters.of(block())
    for mask in masks(frozenset({"q.weight"}), Chance(0.5, 0.25)):
        assert mask.actual == held.weight(mask.frozen) / 576
        assert mask.parameters == sum(held.scalars[held.names.index(name)] for name in mask.frozen)
        assert mask.planned == pytest.approx((0.5 * 64 + 0.25 * 512) / 576)


def test_never_and_always_are_exact() -> None:
    held = LayerParameters.of(block())
    assert set(masks(frozenset(), NEVER)) == {NOTHING}
    assert {mask.frozen for mask in masks(frozenset(), ALWAYS)} == {frozenset(held.names)}
    assert {mask.actual for mask in masks(frozenset(), ALWAYS)} == {1.0}
    stable = frozenset({"norm.bias", "up.weight"})
    assert {mask.frozen for mask in masks(stable, Chance(1.0, 0.0))} == {stable}


def test_each_part_of_the_key_changes_the_draw_and_nothing_else_does() -> None:
    first = rng.uniforms(64, 5, "freeze", 7, 2, "block")
    assert first == rng.uniforms(64, 5, "freeze", 7, 2, "block")
    assert first[:10] == rng.uniforms(10, 5, "freeze", 7, 2, "block")
    assert all(0.0 <= u < 1.0 for u in first)
    others = [(6, 7, 2, "block"), (5, 8, 2, "block"), (5, 7, 3, "block"), (5, 7, 2, "other")]
    for seed, *parts in others:
        assert not set(first) & set(rng.uniforms(64, seed, "freeze", *parts))


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "stable", [frozenset(), frozenset({"q.weight", "down.weight"}), frozenset({"q.weight"})]
)
def test_algorithm_2_keeps_the_expected_share(ratio: float, stable: frozenset[str]) -> None:
    held = LayerParameters.of(block())
    share = held.weight(stable) / 576
    chance = topped_up_or_thinned(ratio, share)
    assert chance.stable * share + chance.others * (1 - share) == pytest.approx(ratio, abs=1e-12)
    assert chance.stable >= chance.others
    assert share <= ratio or chance.others == 0.0
    drawn = masks(stable, chance)
    assert sum(mask.actual for mask in drawn) / DRAWS == pytest.approx(ratio, abs=4 * 0.33 / math.sqrt(DRAWS))


def test_all_stable_and_all_to_be_frozen() -> None:
    assert topped_up_or_thinned(1.0, 1.0) == Chance(1.0, 0.0)
    assert topped_up_or_thinned(1.0, 0.3) == ALWAYS
    assert topped_up_or_thinned(0.25, 1.0) == Chance(0.25, 0.0)


def test_phases_and_ramp_decide_what_a_plan_means() -> None:
    phases = Phases(warm_up=2, monitoring=6, ramp=10)
    plan = FreezePlan(epoch=1, version=1, ratios=((0.8, 0.4), (1.0, 0.0)), start=8)
    budgets = Budgets(phases, FreezePlans((plan,)), hybrid=False)
    expected = {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 1.0, 6: 1.0, 7: 0.0, 8: 0.4, 9: 0.6, 10: 0.8, 50: 0.8}
    for step, ratio in expected.items():
        first, second = budgets.chances(step, 0, 2)
        assert first == Chance(pytest.approx(ratio), pytest.approx(ratio)), step
        assert second.others == pytest.approx(ratio if step <= 7 else ratio / 2)
    assert budgets.chances(50, 1, 2) == (ALWAYS, NEVER)


def test_a_hybrid_spreads_a_stages_budget_over_its_layers_by_what_is_stable() -> None:
    phases = Phases(warm_up=0, monitoring=2, ramp=2)
    plan = FreezePlan(
        epoch=1, version=1, ratios=((0.5,), (0.5,), (0.5,), (0.5,)), stages=((0, 3), (3, 4)), start=3
    )
    shares = [Share(100, 100), Share(0, 200), Share(0, 100), Share(30, 100)]
    budgets = Budgets(phases, FreezePlans((plan,)), hybrid=True, shares=shares)
    # Half of the first stage's 400 must freeze: the 100 stable ones and a third of the other 300.
    for layer in range(3):
        assert budgets.chances(3, layer, 1) == (Chance(1.0, pytest.approx(1 / 3)),)
    assert budgets.chances(3, 3, 1) == (Chance(1.0, pytest.approx(0.2 / 0.7)),)
    shares[1].stable = 200
    assert budgets.chances(3, 0, 1) == (Chance(pytest.approx(2 / 3), 0.0),)
    assert budgets.chances(2, 0, 1) == (ALWAYS,)
    # Without stages every layer has its own budget, as with r_max = auto.
    bare = FreezePlan(epoch=1, version=1, ratios=plan.ratios, start=3)
    for alone in (
        Budgets(phases, FreezePlans((bare,)), hybrid=True, shares=shares),
        Budgets(phases, FreezePlans((plan,)), hybrid=True, by_layer=True, shares=shares),
    ):
        assert alone.chances(3, 0, 1) == (Chance(0.5, 0.0),)
        assert alone.chances(3, 2, 1) == (Chance(1.0, 0.5),)


def test_phases_that_were_not_resolved_are_refused() -> None:
    assert phases_of(FreezeConfig()) is None
    assert phases_of(FreezeConfig(method="apf", warm_up=3)) is None
    for method in ("apf", "timelyfreeze", "timelyfreeze+apf"):
        with pytest.raises(JobError, match=r"freeze\.warm_up is not resolved"):
            phases_of(FreezeConfig(method=method))
    with pytest.raises(JobError, match=r"freeze\.monitoring or freeze\.ramp is not resolved"):
        phases_of(FreezeConfig(method="timelyfreeze", warm_up=3))
    with pytest.raises(JobError, match=r"\[freeze\]: phases must come in order"):
        phases_of(FreezeConfig(method="timelyfreeze", warm_up=3, monitoring=3, ramp=9))


def test_measured_times_change_what_is_told_of_a_mask_and_no_draw() -> None:
    held = LayerParameters.of(block())
    timed = held.weighed((("q.weight", 900), ("down.weight", 100), ("unknown", 5)))
    assert timed.weights == (100, 0, 0, 0, 900, 0, 0)
    for step in range(100):
        key = {"seed": 5, "step": step, "microbatch": 2}
        plain, mask = (draw(one, frozenset(), Chance(0.5, 0.5), **key) for one in (held, timed))
        assert mask.frozen == plain.frozen
        assert mask.parameters == plain.parameters
        assert mask.actual == timed.weight(mask.frozen) / 1000
    # A layer whose gradients take no time is drawn too, but reported in scalars.
    idle = held.weighed(())
    mask = draw(idle, frozenset(), Chance(0.5, 0.5), seed=5, step=1, microbatch=2)
    assert mask.frozen
    assert mask.actual == sum(held.scalars[held.names.index(n)] for n in mask.frozen) / sum(held.scalars)


class Lookup(nn.Module):
    """A module with most of its stage's scalars and almost none of its time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)


TIMES = (
    (("table.weight", 20_000),),
    (("q.weight", 180_000), ("up.weight", 500_000), ("down.weight", 300_000)),
)
TIMED = FreezePlan(epoch=1, version=1, ratios=((0.4,), (0.4,)), stages=((0, 2),), weights=TIMES, start=3)


def freezer(*plans: FreezePlan, stable: Mapping[int, set[str]], r_max: Budget = 0.8) -> Freezer:
    """The freezer of one rank with two layers and one microbatch; all phases are over from step 3 on."""
    config = FreezeConfig(
        method="timelyfreeze+apf", r_max=r_max, warm_up=0, monitoring=2, ramp=2, check_every=10**6
    )
    optimizer = make_optimizer(OptimizerConfig(), 1)
    states = {0: LayerState.of(0, "lookup", Lookup(), optimizer), 1: block()}
    for layer, state in states.items():
        begin_statistics(config, state)
        names = LayerParameters.of(state).names
        state.freezing[STABLE] = torch.tensor([name in stable.get(layer, ()) for name in names])
    extent = Extent(seed=5, rank=0, microbatches=1, replicas=1, layers=2, stages={0: (0, 1)})
    parameters = {layer: LayerParameters.of(state) for layer, state in states.items()}
    made = Freezer(config, extent, states, parameters, FreezePlans(plans), step=0)
    made.meet(LocalChannel(Hub(1), 0))
    return made


def frozen_steps(made: Freezer, steps: Iterable[int]) -> Iterator[tuple[dict[int, Mask], FrozenAction]]:
    """The masks of each step, and the report about them."""
    for step in steps:
        made.begin(step)
        drawn = {layer: made.mask(layer, 0) for layer in (0, 1)}
        (told,) = made.commit(
            CommitDecision(
                step=step,
                loss=0.0,
                grad_norm=0.0,
                scale=1.0,
                lr=0.01,
                skipped=True,
                requests=frozenset(),
                busy_s=0.0,
            )
        )
        assert isinstance(told, FreezeReport)
        yield drawn, told.actions[0]


@pytest.mark.parametrize(
    "stable", [{}, {0: {"table.weight"}}, {1: {"q.weight", "norm.bias"}}, {1: {"up.weight", "down.weight"}}]
)
def test_a_hybrid_freezes_as_much_measured_time_as_was_planned(stable: Mapping[int, set[str]]) -> None:
    times = {(layer, name): time for layer, row in enumerate(TIMES) for name, time in row}
    shares = []
    for drawn, told in frozen_steps(freezer(TIMED, stable=stable), range(3, 3 + DRAWS)):
        assert told.planned == pytest.approx(0.4)
        shares.append(sum(times.get((layer, n), 0) for layer, m in drawn.items() for n in m.frozen) / 1e6)
        assert told.actual == pytest.approx(shares[-1])
    # Four standard errors; a draw's share deviates by no more than that of 0, 1 at even odds.
    assert sum(shares) / DRAWS == pytest.approx(0.4, abs=4 * 0.5 / math.sqrt(DRAWS))


def test_where_the_job_leaves_it_to_us_a_hybrid_spends_what_was_solved_for_each_layer_there() -> None:
    unlike = replace(TIMED, ratios=((0.9,), (0.1,)))
    for r_max, table, rest in ((AUTO, 0.9, 0.1), (0.8, 0.116, 0.116)):
        made = freezer(unlike, stable={}, r_max=r_max)
        made.begin(3)
        assert made._chances[0][0].others == pytest.approx(table)
        assert made._chances[1][0].others == pytest.approx(rest)


def test_a_step_to_compare_with_freezes_nothing_and_counts_as_such() -> None:
    whole = [step for step in range(3, 60) if step % REFERENCE_EVERY == REFERENCE_AT]
    for r_max, expected in ((AUTO, whole), (0.8, [])):
        made = freezer(TIMED, stable={}, r_max=r_max)
        assert [step for step in range(3, 60) if not made.may_freeze(step)] == expected
        for step in range(3, 60):
            made.begin(step)
            assert (made._chances[1] == (NEVER,)) == (step in expected)


def test_without_times_a_hybrid_counts_scalars() -> None:
    untimed = replace(TIMED, weights=())
    table = 800 / (800 + 576)
    shares = []
    for drawn, told in frozen_steps(freezer(untimed, stable={0: {"table.weight"}}), range(3, 203)):
        assert told.planned == pytest.approx(0.4)
        assert told.actual == pytest.approx(table * bool(drawn[0].frozen))
        assert not drawn[1].frozen
        shares.append(told.actual)
    assert sum(shares) / 200 == pytest.approx(0.4, abs=4 * 0.5 / math.sqrt(200))


def test_a_plan_that_weighs_otherwise_counts_from_its_first_step() -> None:
    """The stable parameters are known without another check in between."""
    other = replace(TIMED, version=2, start=5, weights=((("table.weight", 1_000_000),), TIMES[1]))
    made = freezer(TIMED, other, stable={0: {"table.weight"}})
    others = []
    for step in (3, 5):
        made.begin(step)
        others.append([chance.others for chance in made._chances[1]])
    # First 380,000 of the other 980,000 are added; then the stable million exceeds the required 792,000.
    assert others == [[pytest.approx(0.38 / 0.98)], [0.0]]
    assert made._chances[0][0].stable == pytest.approx(0.792)


def test_what_weighs_nothing_keeps_its_own_ratio() -> None:
    idle = replace(TIMED, stages=((0, 1), (1, 2)), weights=((("table.weight", 0),), TIMES[1]))
    made = freezer(idle, stable={})
    made.begin(3)
    assert made._chances[0] == (Chance(0.4, 0.4),)
