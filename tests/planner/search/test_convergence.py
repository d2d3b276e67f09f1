"""DynPipe's Theorem 1 against hand-computed numbers."""

from dataclasses import replace

import pytest

from planner.search.convergence import (
    Convergence,
    ConvergenceError,
    CurvatureSample,
    Estimates,
    estimate,
    second_moment,
    smoothness,
)

JOB = Convergence(loss=4.0, learning_rate=0.5, smoothness=1.0, second_moment=2.0, target=16.0)


def test_updates_grow_with_the_stages_of_an_asynchronous_schedule():
    # 2 eta^2 S^3 L^2 xi^2 = S^3; T = 8 / (0.5 (16 - S^3)).
    assert JOB.staleness_error(2) == 8.0
    assert JOB.updates(1, synchronous=False) == 2  # 16 / 15, whole updates.
    assert JOB.updates(2, synchronous=False) == 2
    assert replace(JOB, target=8.5).updates(2, synchronous=False) == 32


def test_updates_of_a_synchronous_schedule_do_not_depend_on_the_stages():
    assert {JOB.updates(stages, synchronous=True) for stages in (1, 2, 8, 64)} == {1}
    assert replace(JOB, target=1.0).updates(64, synchronous=True) == 16


def test_the_error_after_that_many_updates_is_the_target():
    job = replace(JOB, target=8.5)
    assert job.error(32, 2) == 8.5
    assert job.error(32, 2, variance=3.0, batch=4) == 8.5 + 1.5


@pytest.mark.parametrize(
    ("target", "advice"), [(8.0, "at most 1 stage,"), (7.9, "at most 1 stage,"), (1.0, "Use a lower")]
)
def test_a_target_that_staleness_alone_exceeds_is_refused(target: float, advice: str):
    with pytest.raises(ConvergenceError, match=r"out of reach with 2 asynchronous stages.* = 8") as error:
        replace(JOB, target=target).updates(2, synchronous=False)
    assert advice in str(error.value)


def test_the_theorem_needs_a_small_learning_rate():
    with pytest.raises(ConvergenceError, match=r"eta L <= 1.*give 2: lower the learning rate to 0.5 at most"):
        replace(JOB, learning_rate=1.0, smoothness=2.0)


@pytest.mark.parametrize("name", ["loss", "learning_rate", "smoothness", "second_moment", "target"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_numbers_that_mean_nothing_are_refused(name: str, value: float):
    with pytest.raises(ConvergenceError, match=name):
        replace(JOB, **{name: value})


def test_estimates_from_samples():
    assert smoothness([1.0, 6.0, 5.0], [2.0, 3.0, 0.0]) == 2.0
    assert second_moment([1.0, 2.0, 2.0]) == 3.0
    with pytest.raises(ConvergenceError, match="changed the weights"):
        smoothness([1.0], [0.0])
    with pytest.raises(ConvergenceError, match="sampled gradient"):
        second_moment([])


def test_samples_of_the_running_job_give_both_constants():
    found = estimate(
        [
            CurvatureSample(gradient_change=1.0, weight_change=2.0, gradient=1.0),
            CurvatureSample(gradient_change=6.0, weight_change=3.0, gradient=3.0),
        ]
    )
    assert found == Estimates(smoothness=2.0, second_moment=5.0, samples=2)
