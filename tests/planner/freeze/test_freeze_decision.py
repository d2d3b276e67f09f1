"""From monitored steps to ratios per layer: the paper's reference case, and a fallback on the profile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import pi, sqrt
from random import Random

import pytest

from planner.freeze.decision import FreezeQuestion, decide
from planner.freeze.monitoring import MonitoringError, Observation
from planner.freezing import AUTO, Phases
from planner.plan import Plan
from planner.profile import Cluster, DeviceProfile, LayerProfile, Link, Matrix, ModelProfile, Profile
from planner.schedule import registry
from planner.simulation.costs import bounds as profiled_bounds
from planner.simulation.simulate import Costs, simulate

PHASES = Phases(warm_up=0, monitoring=4, ramp=6)
RANKS, MICROBATCHES = 4, 8
SCHEDULE = registry.build("1f1b", RANKS, MICROBATCHES, None)
PLAN = Plan(
    epoch=1,
    version=1,
    reason="test",
    layers=((0, 2), (2, 3), (3, 4), (4, 6)),
    stage_ranks=(0, 1, 2, 3),
    schedule="1f1b",
    chunks=1,
    microbatches=MICROBATCHES,
    replicas=1,
)
QUESTION = FreezeQuestion(plan=PLAN, schedule=SCHEDULE, phases=PHASES, r_max=0.8)


def observed(step: int, costs: Costs, outside_s: float = 0.0) -> list[Observation]:
    laid_out = simulate(SCHEDULE, costs)
    return [
        Observation(
            step=step,
            rank=rank,
            step_s=laid_out.makespan_s + outside_s,
            spans=tuple((str(timed.action), timed.start_s, timed.end_s) for timed in line),
        )
        for rank, line in enumerate(laid_out.timeline)
    ]


def monitored(outside_s: float = 0.0) -> list[Observation]:
    upper = Costs.uniform(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    lower = Costs.uniform(forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.0)
    return [seen for step in range(1, 5) for seen in observed(step, upper if step <= 2 else lower, outside_s)]


def test_the_papers_anchor() -> None:
    decision = decide(QUESTION, monitored())
    assert decision.solution.unfrozen_s == pytest.approx(33.0)
    assert decision.solution.solved_s == pytest.approx(23.6)
    assert decision.kappa == pytest.approx(23.6 / 33.0)
    assert decision.spread is None
    ratios = {(stage, microbatch): ratio for stage, microbatch, ratio in decision.solution.ratios}
    for layer, row in enumerate(decision.ratios):
        stage = PLAN.stage_of_layer(layer)
        assert row == tuple(ratios[stage, microbatch] for microbatch in range(MICROBATCHES))


def test_freezing_does_not_shorten_the_time_outside_the_window() -> None:
    decision = decide(QUESTION, monitored(outside_s=7.0))
    assert decision.bounds.outside_s == pytest.approx(7.0)
    assert decision.bounds.upper_step_s == pytest.approx(40.0)
    assert decision.kappa == pytest.approx(30.6 / 40.0)


def test_the_order_of_observations_does_not_change_the_decision() -> None:
    assert decide(QUESTION, reversed(monitored())).ratios == decide(QUESTION, monitored()).ratios


def profile() -> Profile:
    layer = LayerProfile(
        name="layer",
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        update_s=0.25,
        parameters=1,
        parameter_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=8,
        activation_bytes=4,
        input_bytes=4,
        weight_grad_hold_bytes=4,
        boundary_bytes=4,
        boundary_grad_bytes=4,
    )
    device = DeviceProfile(kind="cpu", name="test", memory_bytes=1000)
    return Profile(
        model=ModelProfile(layers=(layer,) * 6, microbatch_size=1, precision="float32", threads=1),
        cluster=Cluster.uniform(device, RANKS, Link(latency_s=0.0, bytes_per_s=1e9), commit_s=0.125),
        key="",
        source="test",
    )


def test_message_costs_come_from_the_profile() -> None:
    slow = Link(latency_s=0.5, bytes_per_s=1e9, sender_s=0.125, receiver_s=0.25)
    given = profile()
    cluster = Cluster.uniform(given.cluster.devices[0], RANKS, slow)
    decision = decide(replace(QUESTION, profile=replace(given, cluster=cluster)), monitored())
    assert decision.bounds.upper.messages is not None
    assert decision.bounds.upper.messages.links == cluster.links
    assert decision.bounds.upper.seconds == decide(QUESTION, monitored()).bounds.upper.seconds
    assert decision.solution.unfrozen_s == pytest.approx(simulate(SCHEDULE, decision.bounds.upper).makespan_s)
    assert decision.solution.unfrozen_s > 33.0


def test_samples_make_a_step_longer_than_its_expectation() -> None:
    given = profile()
    whole = (Matrix(name="weight", parameters=1, weight_grad_s=1.0),)
    layers = tuple(replace(layer, matrices=whole) for layer in given.model.layers)
    coarse = replace(given, model=replace(given.model, layers=layers))
    decision = decide(replace(QUESTION, profile=coarse), monitored())
    smooth = decide(replace(QUESTION, profile=given), monitored())
    assert smooth.ratios == decision.ratios
    assert smooth.spread == pytest.approx(1.0)
    assert decision.spread is not None
    assert decision.spread > 1.0
    assert decision.kappa == pytest.approx(decision.spread * smooth.kappa)
    assert decision.expected_step_s == pytest.approx(decision.kappa * decision.unfrozen_step_s)
    # With these ratios the samples happen to be 0.1 % too short; more samples would not be.
    assert decide(replace(QUESTION, profile=coarse, r_max=0.1), monitored()).spread == 1.0


def test_the_profile_replaces_a_half_that_was_not_observed() -> None:
    seen = [each for each in monitored() if each.step > 2]
    with pytest.raises(MonitoringError, match=r"steps 1 to 2 \(upper bound\)"):
        decide(QUESTION, seen)
    decision = decide(replace(QUESTION, profile=profile()), seen)
    upper, lower = profiled_bounds(profile(), PLAN, SCHEDULE)
    assert decision.solution.unfrozen_s == pytest.approx(simulate(SCHEDULE, upper).makespan_s)
    assert decision.solution.all_frozen_s == pytest.approx(simulate(SCHEDULE, lower).makespan_s)
    # The rank with two layers has the longest update.
    assert decision.bounds.outside_s == pytest.approx(0.625)
    assert decision.bounds.upper_step_s is None


def test_a_profile_may_have_fewer_devices_than_the_plan() -> None:
    given = profile()
    link = Link(latency_s=0.25, bytes_per_s=1e9)
    fewer = replace(given, cluster=Cluster.uniform(given.cluster.devices[0], 2, link, commit_s=0.125))
    decision = decide(replace(QUESTION, profile=fewer), monitored())
    # Measured times count; the profile supplies only the cost of messages, which is the same for every link.
    whole = replace(given, cluster=Cluster.uniform(given.cluster.devices[0], RANKS, link, commit_s=0.125))
    assert decision == decide(replace(QUESTION, profile=whole), monitored())
    assert decision.solution.unfrozen_s > 33.0


@pytest.mark.parametrize("seed", range(12))
def test_where_nothing_is_random_nothing_gets_longer_by_chance(seed: int) -> None:
    """Nor does rounding lengthen a step, although samples and expectations add up in different orders."""
    random, given = Random(seed), profile()
    layers = []
    for layer in given.model.layers:
        parts = [random.random() for _ in range(3)]
        layers.append(
            replace(
                layer,
                forward_s=random.random(),
                input_grad_s=random.random(),
                weight_grad_s=sum(parts),
                matrices=tuple(
                    Matrix(name=str(n), parameters=1, weight_grad_s=part) for n, part in enumerate(parts)
                ),
            )
        )
    uneven = replace(given, model=replace(given.model, layers=tuple(layers)))
    decision = decide(replace(QUESTION, profile=uneven, r_max=0.0), monitored())
    assert (decision.spread, decision.kappa) == (1.0, 1.0)


def test_weights_are_the_profiles_nanoseconds_matrix_by_matrix() -> None:
    given = profile()
    block, *others = given.model.layers
    uneven = replace(
        block,
        matrices=(
            Matrix(name="up", parameters=1, weight_grad_s=0.75),
            Matrix(name="down", parameters=9, weight_grad_s=0.25 + 4e-10),
        ),
    )
    whole = (Matrix(name="weight", parameters=1, weight_grad_s=1.0),)
    idle = replace(block, weight_grad_s=0.0)
    layers = (uneven, *(replace(layer, matrices=whole) for layer in others[:-1]), idle)
    known = replace(given, model=replace(given.model, layers=layers))
    decision = decide(replace(QUESTION, profile=known), monitored())
    assert decision.weights == (
        (("up", 750_000_000), ("down", 250_000_000)),
        *((("weight", 1_000_000_000),),) * 4,
        (),
    )
    assert decide(QUESTION, monitored()).weights == ()
    # The profile assigns these layers' time to no matrix, so their shares are unknown.
    assert decide(replace(QUESTION, profile=given), monitored()).weights == ()


def sharing_cores(*all_frozen_s: float) -> list[Observation]:
    """Monitored steps of which those with everything frozen take so long, though their actions are short."""
    return [
        seen if seen.step <= 2 else replace(seen, step_s=all_frozen_s[seen.step - 3]) for seen in monitored()
    ]


@pytest.mark.parametrize(
    ("all_frozen_s", "confirmed"),
    [((40.0, 40.0), 0.0), ((33.0, 33.0), 0.0), ((27.5, 27.5), 0.5), ((22.0, 22.0), 1.0), ((11.0, 11.0), 1.0)],
)
def test_savings_count_as_far_as_monitored_steps_show_them(
    all_frozen_s: tuple[float, float], confirmed: float
) -> None:
    decision = decide(QUESTION, sharing_cores(*all_frozen_s))
    assert decision.confirmed == pytest.approx(confirmed)
    assert decision.ratios == decide(QUESTION, monitored()).ratios, "someone gave the budget"
    assert decision.kappa == pytest.approx(1.0 - confirmed * (33.0 - 23.6) / 33.0)


def test_one_standard_error_more_than_what_was_measured_may_be_there() -> None:
    decision = decide(QUESTION, sharing_cores(32.0, 34.0))
    # The median absolute deviation of 1 s, as that of a normal distribution, for a median of two.
    error_s = 1.4826 * sqrt(pi / 2 / 2)
    assert decision.confirmed == pytest.approx(error_s / 11.0)


def test_one_step_in_each_half_tells_nothing_of_what_is_saved() -> None:
    one = replace(QUESTION, phases=replace(QUESTION.phases, monitoring=QUESTION.phases.warm_up + 2))
    seen = [replace(each, step_s=33.0) for each in monitored() if each.step in (2, 3)]
    seen = [replace(each, step=QUESTION.phases.warm_up + each.step - 1) for each in seen]
    decision = decide(one, seen)
    assert decision.bounds.lower_step_s == 33.0
    assert decision.confirmed == 1.0


@pytest.mark.parametrize("confirmed", [1.0, 0.25, 0.0])
def test_without_monitored_steps_what_others_have_shown_counts(confirmed: float) -> None:
    asked = replace(QUESTION, profile=profile(), confirmed=confirmed)
    decision = decide(asked, ())
    assert decision.confirmed == confirmed
    assert decide(asked, monitored()).confirmed == pytest.approx(1.0)
    assert decide(replace(asked, r_max=AUTO), ()).confirmed == confirmed


def test_the_least_time_to_accuracy_counts_confirmed_savings_alone() -> None:
    auto = replace(QUESTION, r_max=AUTO)
    found = [decide(auto, sharing_cores(each, each)) for each in (22.0, 27.5, 32.0, 33.0)]
    frozen = [sum(map(sum, each.ratios)) for each in found]
    assert frozen[0] > frozen[-1] == 0.0
    assert frozen == sorted(frozen, reverse=True)
    assert found[-1].progress == 1.0
    for each, more in pairwise(found):
        assert each.progress is not None
        # Ratios that were chosen for larger savings are no better.
        other = more.progress or 0.0
        saved_s = each.confirmed * (more.solution.unfrozen_s - more.solution.solved_s)
        assert each.kappa / each.progress <= (1.0 - saved_s / 33.0) / other + 1e-9
