"""Steps whose matrices are frozen at random."""

from dataclasses import replace

import numpy as np
import pytest
from small_profile import layer, plan, profile

from planner.profile import Link, Matrix
from planner.schedule.registry import build
from planner.simulation.monte_carlo import expected_step_s, step_seconds
from planner.simulation.predict import predict

MATRICES = (
    Matrix(name="a", parameters=4, weight_grad_s=3.0),
    Matrix(name="b", parameters=2, weight_grad_s=1.0),
)
TWO = profile(layer(matrices=MATRICES), layer(matrices=MATRICES), commit_s=0.125)


def ratios(value: float, layers: int = 2, microbatches: int = 2) -> tuple[tuple[float, ...], ...]:
    return ((value,) * microbatches,) * layers


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_without_chance_a_step_is_the_predicted_one(name: str, ratio: float):
    link = Link(latency_s=0.5, bytes_per_s=2.0, sender_s=0.25, receiver_s=0.125)
    two = profile(layer(matrices=MATRICES), layer(matrices=MATRICES), link=link, commit_s=0.125)
    quick, other = two.cluster.devices
    two = replace(two, cluster=replace(two.cluster, devices=(quick, replace(other, slowdown=1.5))))
    schedule = build(name, 2, 2)
    steps = step_seconds(two, plan(1, 1, schedule=name), schedule, ratios(ratio), 3, seed=0)
    predicted = predict(two, plan(1, 1, schedule=name), schedule, ratios(ratio))
    assert steps == pytest.approx([predicted.step_s] * 3, rel=1e-12)


def test_on_one_rank_the_mean_is_the_expectation_and_each_matrix_is_sampled_by_itself():
    one = profile(layer(matrices=MATRICES), ranks=1)
    schedule = build("gpipe", 1, 2)
    steps = step_seconds(one, plan(1, schedule="gpipe"), schedule, ((0.25, 0.5),), 20_000, seed=1)
    # Subtract forward and input gradient twice, and the update.
    weight_s = steps - (2 * 3 + 0.5)
    assert set(np.round(weight_s, 9)) == {0, 1, 2, 3, 4, 5, 6, 7, 8}
    variance = (9 + 1) * (0.25 * 0.75 + 0.5 * 0.5)
    assert weight_s.mean() == pytest.approx(4 * 0.75 + 4 * 0.5, abs=4 * (variance / 20_000) ** 0.5)
    assert weight_s.var() == pytest.approx(variance, rel=0.05)


def test_ranks_that_wait_for_each_other_take_longer_than_expected_times_do():
    schedule = build("1f1b", 2, 8)
    wide = plan(1, 1, microbatches=8)
    frozen = ratios(0.5, microbatches=8)
    expected = predict(TWO, wide, schedule, frozen).step_s
    mean = expected_step_s(TWO, wide, schedule, frozen, 4000, seed=2)
    assert mean > expected * 1.02
    # A stage of many small matrices stays closer to its expectation.
    many = tuple(Matrix(name=str(i), parameters=1, weight_grad_s=1 / 16) for i in range(64))
    fine = profile(layer(matrices=many), layer(matrices=many), commit_s=0.125)
    assert expected < expected_step_s(fine, wide, schedule, frozen, 500, seed=2) < mean


def test_replicas_are_sampled_independently_and_the_last_one_counts():
    schedule = build("1f1b", 2, 2)
    alone = expected_step_s(TWO, plan(1, 1), schedule, ratios(0.5), 2000, seed=3)
    four = expected_step_s(TWO, plan(1, 1, replicas=4), schedule, ratios(0.5), 2000, seed=3)
    assert four > alone * 1.02


def test_time_that_belongs_to_no_matrix_is_taken_at_its_expectation():
    one = profile(layer(weight_grad_s=5.0, matrices=MATRICES[:1]), ranks=1)
    steps = step_seconds(one, plan(1, schedule="gpipe"), build("gpipe", 1, 1), ((0.25,),), 200, seed=4)
    # Matrix a takes 3 of the 5 s; the other 2 shrink to 1.5.
    assert set(np.round(steps - 3.5, 9)) == {1.5, 4.5}


def test_equal_seeds_give_equal_steps():
    schedule = build("1f1b", 2, 2)
    runs = [step_seconds(TWO, plan(1, 1), schedule, ratios(0.5), 50, seed) for seed in (5, 5, 6)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_what_does_not_fit_is_refused():
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match="0 samples, at least 1"):
        step_seconds(TWO, plan(1, 1), schedule, ratios(0.5), 0, seed=0)
    with pytest.raises(ValueError, match=r"freeze ratios must have a row per layer .* of 2 layers"):
        step_seconds(TWO, plan(1, 1), schedule, ratios(0.5, layers=1), 1, seed=0)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_without_chance_replicas_in_fewer_pipelines_take_what_is_predicted(pipelines: int, ratio: float):
    schedule, shared = build("1f1b", 2, 2), plan(1, 1, replicas=3, pipelines=pipelines, standbys=((1,), (0,)))
    steps = step_seconds(TWO, shared, schedule, ratios(ratio), 2, seed=0)
    predicted_s = predict(TWO, shared, schedule, ratios(ratio)).step_s
    assert steps == pytest.approx([predicted_s] * 2, rel=1e-12)
