"""The least time to accuracy against a fine grid, and what follows from the energy of layers."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_profile import layer, plan
from small_profile import profile as profile_of

from planner.freeze.choice import GAIN
from planner.freeze.decision import FreezeQuestion, decide
from planner.freeze.fractional import (
    energy_shares,
    expected_progress,
    expected_update,
    progress_shares,
    solve_for_accuracy,
)
from planner.freeze.monitoring import Observation
from planner.freeze.program import FreezeProgram, FreezeSolution, StageLayers, layer_ratios
from planner.freezing import AUTO, FreezePlan, Phases, Ratios
from planner.ir import Action, ActionKind, Schedule
from planner.plan import Plan
from planner.schedule.graph import build_graph
from planner.schedule.registry import build, families
from planner.simulation.longest_path import build_network
from planner.simulation.simulate import Costs, simulate
from workers.freezing.plans import FreezePlans
from workers.freezing.ratios import Budgets, Share

STEPS = 10
"""Ratios of the grid are multiples of its inverse."""
LEAST = 0.05
"""Share of a step's progress that is to be left."""
PHASES = Phases(warm_up=0, monitoring=4, ramp=6)


def costs(schedule: Schedule, seed: int) -> tuple[Costs, Costs]:
    """(upper, lower) with random times per action."""
    generator = np.random.default_rng(seed)
    upper: dict[Action, float] = {}
    lower: dict[Action, float] = {}
    for action in build_graph(schedule).actions:
        fixed, weight = generator.uniform(0.2, 2.0, 2).tolist()
        upper[action] = lower[action] = fixed
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            upper[action] = fixed + weight
    return Costs({}, communication_s=0.1, actions=upper), Costs({}, communication_s=0.1, actions=lower)


def solved(
    schedule: Schedule,
    of: Plan,
    seed: int,
    shares: list[float],
    rest_s: float,
    least: float,
    adaptive: bool = False,
) -> tuple[FreezeSolution, Ratios]:
    upper, lower = costs(schedule, seed)
    return solve_for_accuracy(
        schedule,
        of,
        upper,
        lower,
        profile=None,
        shares=shares,
        adaptive=adaptive,
        rest_s=rest_s,
        least_update=least,
    )


def quotient(solution: FreezeSolution, ratios: Ratios, shares: list[float], rest_s: float) -> float:
    return (solution.solved_s + rest_s) / expected_update(ratios, shares)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if seed % 3 == number else [pytest.mark.soak])
        for number, name in enumerate(("gpipe", "1f1b", "zb-h1"))
        for seed in range(100)
    ],
)
def test_no_point_of_a_fine_grid_is_better(name: str, seed: int) -> None:
    generator = np.random.default_rng(1000 + seed)
    schedule, of = build(name, 2, 2), plan(1, 1, schedule=name, microbatches=2)
    weights = generator.uniform(0, 1, 2) ** 3
    shares = (weights / weights.sum()).tolist()
    rest_s, least = float(generator.uniform(0, 5)), float(generator.choice([0.05, 0.5, 0.8]))
    upper, lower = costs(schedule, seed)
    solution, ratios = solved(schedule, of, seed, shares, rest_s, least)
    found = quotient(solution, ratios, shares, rest_s)
    assert expected_update(ratios, shares) >= least - 1e-6

    graph = build_graph(schedule)
    network = build_network(schedule, graph, upper, lower.of_nodes(graph))
    grid = np.array([*product(np.linspace(0, 1, STEPS + 1), repeat=4)]).T
    places = [(stage, microbatch) for stage in range(2) for microbatch in range(2)]
    update = 1.0 - sum(shares[stage] / 2 * grid[number] for number, (stage, _) in enumerate(places))
    seconds = np.tile(np.array(upper.of_nodes(graph))[:, None], grid.shape[1])
    for node, action in enumerate(graph.actions):
        saved = upper.of_action(action) - lower.of_action(action)
        if saved:
            seconds[node] -= saved * grid[places.index((action.stage, action.index))]
    enough = update >= least - 1e-12
    best = ((network.makespans(seconds[:, enough]) + rest_s) / update[enough]).min()
    assert found <= best * (1 + 1e-7)
    # Between the points of the grid little is better: a time changes by at most a step's savings.
    assert found >= best * 0.75


@given(name=st.sampled_from(sorted(families())), seed=st.integers(0, 999), least=st.floats(0.05, 1.0))
@settings(max_examples=30, deadline=None)
def test_layers_of_several_on_a_stage(name: str, seed: int, least: float) -> None:
    """The stages' ratios are the means of their layers', the makespan is what these make, and nothing at all is never
    better."""
    schedule = build(name, 2, 4)
    layers = 3 * schedule.stages
    cut = tuple((3 * stage, 3 * stage + 3) for stage in range(schedule.stages))
    of = replace(
        plan(*[1] * schedule.stages, schedule=name, microbatches=4),
        layers=cut,
        stage_ranks=schedule.rank_of_stage,
    )
    weights = np.random.default_rng(seed).uniform(0, 1, layers) ** 4
    shares = (weights / weights.sum()).tolist()
    solution, ratios = solved(schedule, of, seed, shares, 1.0, least)
    assert all(0 <= ratio <= 1 for row in ratios for ratio in row)
    assert expected_update(ratios, shares) >= least - 1e-6
    assert quotient(solution, ratios, shares, 1.0) <= (solution.unfrozen_s + 1.0) * (1 + 1e-7)
    upper, lower = costs(schedule, seed)
    seconds = {action: upper.of_action(action) for action in build_graph(schedule).actions}
    for stage, microbatch, ratio in solution.ratios:
        own = [ratios[layer][microbatch] for layer in range(*cut[stage])]
        assert ratio == pytest.approx(sum(own) / 3, abs=1e-9)
        for kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            action = Action(kind, stage, microbatch)
            if action in seconds:
                seconds[action] -= ratio * (upper.of_action(action) - lower.of_action(action))
    made = simulate(schedule, replace(upper, actions=seconds)).makespan_s
    assert solution.solved_s == pytest.approx(made, rel=1e-9)
    if least == 1.0:
        assert not any(map(any, ratios))


@given(
    seed=st.integers(0, 999),
    adaptive=st.booleans(),
    budget=st.floats(0.05, 1.0),
    small=st.integers(0, 6),
)
@settings(max_examples=60, deadline=None)
def test_no_hybrid_is_predicted_to_come_to_the_same_loss_sooner(
    seed: int, adaptive: bool, budget: float, small: int
) -> None:
    """Not even where what is stable are the layers of which the least progress comes."""
    schedule = build("1f1b", 2, 4)
    of = replace(plan(1, 1, schedule="1f1b", microbatches=4), layers=((0, 3), (3, 6)))
    weights = np.random.default_rng(seed).uniform(0, 1, 6) ** 4
    shares = (weights / weights.sum()).tolist()
    upper, lower = costs(schedule, seed)
    solution, ratios = solved(schedule, of, seed, shares, 1.0, LEAST, adaptive)
    best = (solution.solved_s + 1.0) / expected_progress(ratios, shares, adaptive=adaptive)

    spent = FreezeProgram(schedule).solve(upper, lower, budget)
    follows = FreezePlan(
        epoch=1, version=1, ratios=layer_ratios(spent.ratios, of), stages=of.layers, start=PHASES.ramp
    )
    stable = sorted(range(6), key=shares.__getitem__)[:small]
    stabilities = [Share(1000 if layer in stable else 0, 1000) for layer in range(6)]
    budgets = Budgets(PHASES, FreezePlans((follows,)), hybrid=True, shares=stabilities)
    spread = tuple(
        tuple(
            share.stable / share.weight * chance.stable + (1.0 - share.stable / share.weight) * chance.others
            for chance in budgets.chances(PHASES.ramp, layer, 4)
        )
        for layer, share in enumerate(stabilities)
    )
    left = expected_progress(spread, shares, adaptive=adaptive)
    allowed = 1.0 + (GAIN if adaptive else 1e-7)
    assert left < LEAST or best <= (spent.solved_s + 1.0) / left * allowed


def test_a_stage_freezes_its_least_useful_layers_first() -> None:
    schedule = build("1f1b", 2, 4)
    of = replace(plan(1, 1, schedule="1f1b", microbatches=4), layers=((0, 2), (2, 4)))
    shares = [0.01, 0.59, 0.39, 0.01]
    for seed in range(20):
        _, ratios = solved(schedule, of, seed, shares, 0.0, 0.3)
        assert sum(map(sum, ratios)) > 1.0
        for useless, useful in ((0, 1), (3, 2)):
            assert all(a > 1 - 1e-6 or b < 1e-6 for a, b in zip(ratios[useless], ratios[useful], strict=True))


def test_what_divides_by_the_size_of_gradients_freezes_much_of_a_layer_before_all_of_it() -> None:
    """No worse than any grid of ratios that layers have in all microbatches, nor than the pieces on their own."""
    schedule = build("1f1b", 2, 4)
    of = replace(plan(1, 1, schedule="1f1b", microbatches=4), layers=((0, 2), (2, 4)))
    shares = [0.2, 0.3, 0.25, 0.25]
    partly = 0
    for seed in range(20):
        upper, lower = costs(schedule, seed)
        solution, ratios = solved(schedule, of, seed, shares, 0.0, 0.1, adaptive=True)
        found = solution.solved_s / expected_progress(ratios, shares, adaptive=True)
        assert found <= solution.unfrozen_s * (1 + 1e-9)
        partly += sum(1e-3 < ratio < 1 - 1e-3 for row in ratios for ratio in row)
        for grid in product((0.0, 0.5, 0.75, 1.0), repeat=4):
            given: Ratios = tuple((ratio,) * 4 for ratio in grid)
            seconds = {
                action: upper.of_action(action)
                - (upper.of_action(action) - lower.of_action(action))
                * sum(grid[2 * action.stage : 2 * action.stage + 2])
                / 2
                for action in build_graph(schedule).actions
            }
            made_s = simulate(schedule, replace(upper, actions=seconds)).makespan_s
            left = expected_progress(given, shares, adaptive=True)
            assert left < 0.1 or found <= made_s / left * (1 + 1e-7)
    assert partly > 50


def test_shares_of_progress() -> None:
    of, energies = plan(1, 1, schedule="1f1b", microbatches=2), (9.0, 1.0)
    assert progress_shares(energies, of, None, adaptive=False) == (0.9, 0.1)
    assert progress_shares(energies, of, None, adaptive=True) == pytest.approx((0.75, 0.25))
    ratios = ((0.75, 0.0), (1.0, 0.0))
    assert expected_progress(ratios, (0.75, 0.25), adaptive=True) == pytest.approx(0.75 * 0.75 + 0.25 * 0.5)
    assert expected_progress(ratios, (0.75, 0.25), adaptive=False) == expected_update(ratios, (0.75, 0.25))


def test_shares_of_energy() -> None:
    of = plan(1, 1, schedule="1f1b", microbatches=2)
    assert energy_shares((3.0, 1.0), of, None) == (0.75, 0.25)
    assert energy_shares((), of, None) == (0.5, 0.5)
    profile = profile_of(layer("one", parameters=3), layer("two", parameters=1))
    assert energy_shares((), of, profile) == (0.75, 0.25)
    # What is frozen as a whole makes no progress, with the program's ratios or without.
    assert energy_shares((3.0, 1.0), of, profile.with_prefix(1)) == (0.0, 1.0)
    assert energy_shares((3.0, 0.0), of, profile.with_prefix(1)) == (0.0, 1.0)
    assert energy_shares((), of, profile.with_prefix(1)) == (0.0, 1.0)
    assert expected_update(((1.0, 0.5), (0.0, 0.0)), (0.75, 0.25)) == pytest.approx(0.75 * 0.25 + 0.25)


def decided(energies: tuple[float, ...], least: float = 0.5):
    """The decision of a job of two ranks with a layer each and F = I = W, all of whose energies are told."""
    schedule, of = build("1f1b", 2, 4), plan(1, 1, schedule="1f1b", microbatches=4)
    seen: list[Observation] = []
    for step in range(1, 5):
        longest = Costs.uniform(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0 if step <= 2 else 0.0)
        made = simulate(schedule, longest)
        for rank, line in enumerate(made.timeline):
            spans = tuple((str(timed.action), timed.start_s, timed.end_s) for timed in line)
            told = energies if rank == 0 and step <= 2 else ()
            seen.append(Observation(step=step, rank=rank, step_s=made.makespan_s, spans=spans, energies=told))
    question = FreezeQuestion(plan=of, schedule=schedule, phases=PHASES, r_max=AUTO, least_update=least)
    return decide(question, seen)


def test_what_brings_little_is_frozen_and_what_brings_much_is_not() -> None:
    one = decided((1.0, 99.0), least=0.01)
    assert one.p_eff is not None
    # The others of the first rank's weight gradients end before its turn comes.
    assert one.ratios == ((0.0, 0.0, 0.0, 1.0), (0.0,) * 4)
    assert one.kappa < one.p_eff
    assert one.kappa / one.p_eff < 1.0
    even = decided((1.0, 1.0), least=0.01)
    assert even.kappa / (even.p_eff or 0.0) <= 1.0


def test_a_layer_whose_gradient_nobody_knows_yet_is_trained() -> None:
    """It was frozen as a whole until now: what freezing it costs is unknown, not nothing."""
    assert decided((0.0, 1.0), least=0.01).ratios[0] == (0.0,) * 4


def test_nothing_is_frozen_where_all_of_it_counts() -> None:
    held = decided((1.0, 1.0), least=1.0)
    assert not any(map(any, held.ratios))
    assert (held.kappa, held.p_eff) == (1.0, 1.0)


def test_without_a_share_of_updates_there_is_no_program() -> None:
    with pytest.raises(ValueError, match="least_update is 0: it is the least share of a step's progress"):
        decided((1.0, 1.0), least=0)


def test_layers_that_take_no_time_are_named() -> None:
    schedule = build("1f1b", 2, 4)
    with pytest.raises(ValueError, match=r"1f1b: no layer of a stage .* Turn freezing off, or profile again"):
        FreezeProgram(schedule).solve_for_accuracy(
            *costs(schedule, 1), [StageLayers(()), StageLayers(())], rest_s=0.0, least_update=0.5
        )
