"""The freeze program against hand-solved windows, a dense program and a grid search, and its guarantees."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import table
from small_profile import plan

from benchmarks.parts.reference_freeze_program import reference_solve
from planner.freeze.program import FreezeProgram, FreezeSolution, layer_ratios, solve
from planner.ir import Action, ActionKind, Schedule
from planner.schedule.graph import build_graph
from planner.schedule.registry import build, families
from planner.simulation.simulate import Costs, simulate

UPPER = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)
LOWER = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=0)
NEAR = 1e-6
"""Relative tolerance."""


def total(solution: FreezeSolution) -> float:
    return sum(ratio for _, _, ratio in solution.ratios)


def ratios(solution: FreezeSolution) -> dict[tuple[int, int], float]:
    return {(stage, microbatch): round(ratio, 6) for stage, microbatch, ratio in solution.ratios}


def random_costs(schedule: Schedule, seed: int, *, even: bool = False) -> tuple[Costs, Costs]:
    """(upper, lower) costs with random times per action, or per kind and stage if `even`."""
    generator = np.random.default_rng(seed)
    upper: dict[Action, float] = {}
    lower: dict[Action, float] = {}
    sampled: dict[tuple[ActionKind, int], tuple[float, float]] = {}
    for action in build_graph(schedule).actions:
        fixed, weight = generator.uniform(0.5, 1.5, 2).tolist()
        if even:
            fixed, weight = sampled.setdefault((action.kind, action.stage), (fixed, weight))
        if action.kind is ActionKind.WEIGHT_GRAD:
            upper[action], lower[action] = weight, 0.0
        elif action.kind is ActionKind.BACKWARD:
            upper[action], lower[action] = fixed + weight, fixed
        else:
            upper[action] = lower[action] = fixed
    return Costs({}, communication_s=0.25, actions=upper), Costs({}, communication_s=0.25, actions=lower)


def with_ratios(solution: FreezeSolution, upper: Costs, lower: Costs, schedule: Schedule) -> Costs:
    """The costs of actions under the ratios of `solution`."""
    seconds = {action: upper.of_action(action) for action in build_graph(schedule).actions}
    for stage, microbatch, ratio in solution.ratios:
        for kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            action = Action(kind, stage, microbatch)
            if action in seconds:
                seconds[action] -= ratio * (upper.of_action(action) - lower.of_action(action))
    return replace(upper, actions=seconds)


@pytest.mark.parametrize(("name", "mean_ratio"), [("gpipe", 0.8), ("1f1b", 0.675)])
def test_four_ranks_eight_microbatches(name: str, mean_ratio: float):
    """NOTES.md: 33 becomes 23.6."""
    solution = solve(build(name, 4, 8), UPPER, LOWER, 0.8)
    assert solution.unfrozen_s == 33
    assert solution.all_frozen_s == 22
    assert solution.solved_s == pytest.approx(23.6, rel=NEAR)
    assert total(solution) / 32 == pytest.approx(mean_ratio, rel=NEAR)


# Two ranks, two microbatches, F = I = W = 1. With a ratio r of (stage, microbatch) as rSM:
#   gpipe        9 - r10 - min(r11, r00) - r01
#   1f1b         9 - r10 - r11 - r01                        (r11 <= 1 + r00 always)
#   interleaved  15 - (r30 + r31) - min(r10, r21) - min(r00, r11) - r01
#   zb-h1        max(7 - r01, 7 - r10 - r11, 6)
#   zbv          14 - (r20 + r10 + r21) - r01, while stage 3 and 0 keep ahead: r30 = 0 is enough
# and the sum of a stage's ratios is at most 2 r_max.
@pytest.mark.parametrize(
    ("name", "r_max", "solved_s", "freezing", "known"),
    [
        ("gpipe", 0.25, 8.0, 1.0, {(0, 0): 0.0, (0, 1): 0.5, (1, 0): 0.5, (1, 1): 0.0}),
        ("gpipe", 0.5, 7.0, 2.0, {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 0.0}),
        ("gpipe", 1.0, 6.0, 4.0, {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 1.0}),
        ("1f1b", 0.25, 8.0, 1.0, {(0, 0): 0.0, (0, 1): 0.5}),
        ("1f1b", 0.5, 7.0, 2.0, {(0, 0): 0.0, (0, 1): 1.0}),
        ("1f1b", 1.0, 6.0, 3.0, {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 1.0}),
        ("interleaved", 0.25, 13.5, 2.0, {(0, 0): 0.0, (0, 1): 0.5, (2, 0): 0.0, (2, 1): 0.5}),
        ("interleaved", 0.5, 12.0, 4.0, {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 1.0, (2, 1): 1.0}),
        ("zb-h1", 0.25, 6.5, 1.0, {(0, 0): 0.0, (0, 1): 0.5}),
        ("zb-h1", 0.5, 6.0, 2.0, {(0, 0): 0.0, (0, 1): 1.0}),
        ("zb-h1", 1.0, 6.0, 2.0, {(0, 0): 0.0, (0, 1): 1.0}),
        ("zbv", 0.25, 12.5, 1.5, {(0, 0): 0.0, (0, 1): 0.5, (1, 0): 0.5, (1, 1): 0.0, (3, 0): 0.0}),
    ],
)
def test_two_ranks_two_microbatches_by_hand(
    name: str, r_max: float, solved_s: float, freezing: float, known: dict[tuple[int, int], float]
):
    solution = solve(build(name, 2, 2), UPPER, LOWER, r_max)
    assert solution.solved_s == pytest.approx(solved_s, rel=NEAR)
    assert total(solution) == pytest.approx(freezing, rel=NEAR)
    for place, ratio in known.items():
        assert ratios(solution)[place] == pytest.approx(ratio, abs=NEAR)


def test_a_budget_is_worth_what_the_next_unit_of_it_saves():
    """1f1b by hand: 9 - (r10 + r11) - r01, where a stage's ratios add up to 2 r_max."""
    solution = solve(build("1f1b", 2, 2), UPPER, LOWER, 0.25)
    assert solution.duals == pytest.approx((2.0, 2.0))
    # zb-h1 at 0.5 already takes no longer than with everything frozen.
    assert solve(build("zb-h1", 2, 2), UPPER, LOWER, 0.5).duals == (0.0, 0.0)


@given(name=st.sampled_from(sorted(families())), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_duals_are_the_slopes_of_the_makespan(name: str, seed: int):
    """A larger budget saves at most what the duals say; a small step within one basis saves exactly that."""
    schedule = build(name, 2, 4)
    upper, lower = random_costs(schedule, seed)
    here = solve(schedule, upper, lower, 0.4)
    there = solve(schedule, upper, lower, 0.4001)
    back = solve(schedule, upper, lower, 0.3999)
    slope = sum(here.duals) * 1e-4
    room = 3e-8 * here.unfrozen_s
    assert here.solved_s - there.solved_s <= slope + room
    assert back.solved_s - here.solved_s >= slope - room


def test_start_times_and_critical_actions():
    schedule = build("1f1b", 2, 2)
    solution = solve(schedule, UPPER, LOWER, 0.0)
    assert solution.ratios == ((0, 0, 0.0), (0, 1, 0.0), (1, 0, 0.0), (1, 1, 0.0))
    simulation = simulate(schedule, UPPER)
    assert solution.start_s == simulation.start_s
    assert solution.solved_s == solution.unfrozen_s == simulation.makespan_s
    assert [str(action) for action in solution.critical] == ["0F0", "0B1", "1F0", "1B0", "1F1", "1B1"]


def test_a_frozen_prefix_has_nothing_to_decide():
    schedule = table("0F0 0F1\n1F0 1B0 1F1 1B1", 2, 2, frozen_stages=1)
    solution = solve(schedule, UPPER, LOWER, 0.5)
    assert solution.solved_s == pytest.approx(6.0, rel=NEAR)
    assert solution.mean_per_stage == pytest.approx((0.0, 0.5), abs=NEAR)
    assert solution.duals == pytest.approx((0.0, 2.0))
    table_of_layers = layer_ratios(solution.ratios, plan(2, 1))
    assert table_of_layers[:2] == ((1.0, 1.0), (1.0, 1.0))
    assert sum(table_of_layers[2]) == pytest.approx(1.0, abs=NEAR)


def test_every_layer_of_a_stage_has_its_ratio():
    solution = solve(build("gpipe", 2, 2), UPPER, LOWER, 0.5)
    rows = layer_ratios(solution.ratios, plan(1, 2, schedule="gpipe"))
    assert [[round(ratio, 6) for ratio in row] for row in rows] == [[0, 1], [1, 0], [1, 0]]


def test_actions_that_freezing_does_not_shorten_stay_and_take_no_budget():
    """0B0 is no shorter when frozen, so the mean of stage 0 is that of 0B1 alone."""
    schedule = build("1f1b", 2, 2)
    lower = replace(LOWER, actions={Action(ActionKind.BACKWARD, 0, 0): 2.5})
    solution = solve(schedule, UPPER, lower, 0.5)
    assert ratios(solution)[0, 0] == 0
    assert ratios(solution)[0, 1] == pytest.approx(0.5, abs=NEAR)
    assert solution.mean_per_stage[0] == pytest.approx(0.5, abs=NEAR)
    assert solution.all_frozen_s == 6


@given(
    name=st.sampled_from(sorted(families())),
    ranks=st.integers(1, 4),
    rounds=st.integers(1, 3),
    r_max=st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]),
    even=st.booleans(),
    seed=st.integers(0, 9999),
)
@settings(max_examples=60, deadline=None)
def test_it_finds_the_optimum_of_the_dense_program(
    name: str, ranks: int, rounds: int, r_max: float, even: bool, seed: int
):
    schedule = build(name, ranks, ranks * rounds)
    upper, lower = random_costs(schedule, seed, even=even)
    solution = solve(schedule, upper, lower, r_max)
    makespan_s, freezing = reference_solve(schedule, upper, lower, r_max)
    assert solution.solved_s == pytest.approx(makespan_s, rel=NEAR)
    assert total(solution) == pytest.approx(freezing, rel=NEAR, abs=NEAR)


def test_the_least_freezing_counts_also_where_weight_gradients_differ_by_thousands():
    """Here the coarse tie-break and the makespan alone give half a ratio more than the least."""
    schedule = build("1f1b", 4, 6)
    input_s, weight_s = (5.0, 4.0, 5.0, 4.0), (2.0, 5000.0, 1.0, 5000.0)
    whole_s = tuple(a + b for a, b in zip(input_s, weight_s, strict=True))
    forward_s = (1.0, 4.0, 1.0, 2.0)
    upper = Costs({ActionKind.FORWARD: forward_s, ActionKind.BACKWARD: whole_s})
    lower = Costs({ActionKind.FORWARD: forward_s, ActionKind.BACKWARD: input_s})
    solution = solve(schedule, upper, lower, 0.5)
    makespan_s, freezing = reference_solve(schedule, upper, lower, 0.5)
    assert solution.solved_s == pytest.approx(makespan_s, rel=NEAR) == 15058
    assert total(solution) == pytest.approx(freezing, abs=1e-3) == 9.0


@given(
    name=st.sampled_from(sorted(families())),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 3),
    r_max=st.floats(0, 1),
    seed=st.integers(0, 9999),
)
@settings(max_examples=60, deadline=None)
def test_its_guarantees_hold(name: str, ranks: int, rounds: int, r_max: float, seed: int):
    schedule = build(name, ranks, ranks * rounds)
    upper, lower = random_costs(schedule, seed)
    solution = solve(schedule, upper, lower, r_max)
    assert all(0 <= ratio <= 1 for _, _, ratio in solution.ratios)
    assert len(solution.mean_per_stage) == len(solution.duals) == schedule.stages
    for stage, mean in enumerate(solution.mean_per_stage):
        mine = [ratio for of, _, ratio in solution.ratios if of == stage]
        assert mean == pytest.approx(sum(mine) / schedule.microbatches)
        assert mean <= r_max + NEAR
    assert min(solution.duals) >= 0
    assert solution.unfrozen_s == pytest.approx(simulate(schedule, upper).makespan_s, rel=1e-12)
    assert solution.all_frozen_s == pytest.approx(simulate(schedule, lower).makespan_s, rel=1e-12)
    slack = 1 + 1e-12
    assert solution.all_frozen_s <= solution.solved_s * slack
    assert solution.solved_s <= solution.unfrozen_s * slack
    frozen = simulate(schedule, with_ratios(solution, upper, lower, schedule))
    assert solution.solved_s == pytest.approx(frozen.makespan_s, rel=1e-12)
    assert solution.start_s == pytest.approx(frozen.start_s, rel=1e-9, abs=1e-9)
    more = solve(schedule, upper, lower, min(1.0, r_max + 0.1))
    assert more.solved_s <= solution.solved_s * (1 + NEAR)


@given(name=st.sampled_from(sorted(families())), ranks=st.integers(2, 4), seed=st.integers(0, 9999))
@settings(max_examples=40, deadline=None)
def test_it_freezes_nothing_without_a_gain(name: str, ranks: int, seed: int):
    """Actions off the critical path are not frozen, and freezing any frozen action less would by itself
    lengthen the window."""
    schedule = build(name, ranks, 2 * ranks)
    upper, lower = random_costs(schedule, seed)
    solution = solve(schedule, upper, lower, 0.6)
    critical = set(solution.critical)
    seconds = with_ratios(solution, upper, lower, schedule)
    for stage, microbatch, ratio in solution.ratios:
        if ratio < 1e-4:
            continue
        kind = ActionKind.WEIGHT_GRAD if families()[name].splits_backward else ActionKind.BACKWARD
        action = Action(kind, stage, microbatch)
        assert action in critical, f"{action} is frozen by {ratio} and not critical"
        longer = {**seconds.actions, action: seconds.of_action(action) + 1e-3}
        assert simulate(schedule, replace(seconds, actions=longer)).makespan_s > solution.solved_s + 9e-4


@pytest.mark.parametrize("name", sorted(families()))
@pytest.mark.parametrize("seed", [1, 2])
def test_no_point_of_a_grid_is_better(name: str, seed: int):
    schedule = build(name, 2, 2)
    upper, lower = random_costs(schedule, seed)
    solution = solve(schedule, upper, lower, 0.5)
    places = [(stage, microbatch) for stage, microbatch, _ in solution.ratios]
    # A stage's two ratios add up to 1 at most.
    pairs = [pair for pair in product((0.0, 0.25, 0.5, 0.75, 1.0), repeat=2) if sum(pair) <= 1]
    stages = sorted({stage for stage, _ in places})
    best = float("inf")
    choices = pairs if len(stages) == 2 else [(0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0), (0.0, 0.5)]
    for chosen in product(choices, repeat=len(stages)):
        shares = tuple(
            (stage, m, pair[m]) for stage, pair in zip(stages, chosen, strict=True) for m in range(2)
        )
        point = replace(solution, ratios=shares)
        best = min(best, simulate(schedule, with_ratios(point, upper, lower, schedule)).makespan_s)
    assert solution.solved_s <= best * (1 + NEAR)
    # The solution is at most one grid step better.
    assert solution.solved_s >= best - 0.25 * 1.5 * len(places)


@pytest.mark.parametrize("name", sorted(families()))
def test_a_repeated_solve_equals_a_first_solve(name: str):
    schedule = build(name, 3, 6)
    program = FreezeProgram(schedule)
    for seed, r_max in ((1, 0.8), (2, 0.8), (2, 0.3), (3, 1.0), (3, 0.0), (4, 0.6)):
        upper, lower = random_costs(schedule, seed)
        again, fresh = program.solve(upper, lower, r_max), solve(schedule, upper, lower, r_max)
        assert again.solved_s == pytest.approx(fresh.solved_s, rel=NEAR)
        assert total(again) == pytest.approx(total(fresh), rel=NEAR, abs=NEAR)


def test_times_of_any_size_give_the_same_ratios():
    schedule = build("1f1b", 3, 6)
    upper, lower = random_costs(schedule, 5)
    usual = solve(schedule, upper, lower, 0.6)
    for factor in (1e-6, 1e4):

        def times(costs: Costs, by: float = factor) -> Costs:
            return Costs(
                {}, costs.communication_s * by, {action: s * by for action, s in costs.actions.items()}
            )

        scaled = solve(schedule, times(upper), times(lower), 0.6)
        assert scaled.solved_s == pytest.approx(usual.solved_s * factor, rel=NEAR)
        assert total(scaled) == pytest.approx(total(usual), rel=NEAR)


@pytest.mark.parametrize("r_max", [-0.1, 1.1, float("nan")])
def test_r_max_outside_its_range_is_refused(r_max: float):
    with pytest.raises(ValueError, match=r"r_max is .*must lie in \[0, 1\]"):
        solve(build("gpipe", 2, 2), UPPER, LOWER, r_max)


def test_a_schedule_without_weight_gradients_is_refused():
    forward_only = table("0F0 0F1\n1F0 1F1", 2, 2, frozen_stages=2)
    with pytest.raises(ValueError, match="no weight gradients to skip: it has neither B nor W"):
        solve(forward_only, UPPER, LOWER, 0.5)


def test_freezing_that_saves_no_time_is_refused():
    with pytest.raises(ValueError, match="freezing saves no time"):
        solve(build("1f1b", 2, 2), UPPER, UPPER, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_s": -1.0}, r"0F0 takes -1.0 s with nothing frozen"),
        ({"forward_s": float("nan")}, "0F0 takes nan s"),
        ({"input_grad_s": float("inf")}, "0B0 takes inf s"),
    ],
)
def test_times_that_cannot_be_are_refused(changes: dict[str, Any], message: str):
    upper = Costs.uniform(**{"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, **changes})
    with pytest.raises(ValueError, match=message):
        solve(build("1f1b", 2, 2), upper, LOWER, 0.5)


def test_a_missing_time_is_named():
    with pytest.raises(ValueError, match="no cost for 0B0"):
        solve(build("1f1b", 2, 2), Costs({ActionKind.FORWARD: 1.0}), LOWER, 0.5)


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb-h1"])
def test_a_solve_after_messages_have_changed_is_that_of_a_new_program(family: str) -> None:
    schedule = build(family, 3, 6)
    program = FreezeProgram(schedule)
    for communication_s in (0.0, 0.7, 0.0):
        upper, lower = (
            Costs.uniform(
                forward_s=1, input_grad_s=1, weight_grad_s=weight_grad_s, communication_s=communication_s
            )
            for weight_grad_s in (1.0, 0.0)
        )
        again, fresh = program.solve(upper, lower, 0.5), solve(schedule, upper, lower, 0.5)
        assert again.unfrozen_s == fresh.unfrozen_s
        assert again.solved_s == pytest.approx(fresh.solved_s, rel=1e-7)
