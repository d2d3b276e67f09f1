"""The judge of many candidates says what the predictor says of each; no step is shorter than its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from small_pipelines import pipeline

from planner.profile import LayerProfile
from planner.repartition.judge import Judge
from planner.repartition.problem import RepartitionProblem
from planner.repartition.slowdowns import Known
from planner.simulation.predict import predict


@pytest.mark.parametrize(("frozen", "kept"), [(False, 0), (True, 0), (False, 2), (False, 9)])
@pytest.mark.parametrize("seed", range(12))
def test_steps_are_the_predictors_and_bounds_are_below(seed: int, frozen: bool, kept: int) -> None:
    job = pipeline(seed)
    rng = np.random.default_rng(seed)
    layers = len(job.profile.model.layers) - 1
    profile = job.profile.with_prefix(min(kept, layers), 0, min(kept, layers))
    ratios = None
    if frozen:
        shares = rng.uniform(0, 1, (len(profile.model.layers), job.now.microbatches))
        ratios = tuple(map(tuple, shares.tolist()))
    known = Known(tuple(device.slowdown for device in profile.cluster.devices))
    problem = RepartitionProblem(profile, job.now, job.problem.schedule, known, ratios)
    judge, candidates = Judge(problem), job.candidates()
    candidates = candidates.select(rng.choice(len(candidates), min(20, len(candidates)), replace=False))
    steps_s, bounds_s = judge.step_s(candidates), judge.bound_s(candidates)
    assert (bounds_s <= steps_s * (1 + 1e-9)).all()
    assert bounds_s.mean() > 0.6 * steps_s.mean()
    for cut, order, step_s in zip(candidates.cuts, candidates.orders, steps_s, strict=True):
        plan = replace(problem.plan(cut, order.tolist(), ""), standbys=())
        expected = predict(profile, plan, problem.schedule_of(plan), ratios)
        assert step_s == pytest.approx(expected.step_s, rel=1e-9)


TWO_PIPELINES = [seed for seed in range(40) if pipeline(seed).now.pipeline_count == 2][:4]


@pytest.mark.parametrize(
    ("shard", "precision", "frozen"),
    [
        ("optimizer", "float32", False),
        ("optimizer", "bfloat16", False),
        ("gradients", "float32", False),
        ("gradients", "bfloat16", True),
    ],
)
@pytest.mark.parametrize("seed", TWO_PIPELINES)
def test_the_predictors_steps_with_states_shared_out(
    seed: int, shard: Literal["optimizer", "gradients"], precision: str, frozen: bool
) -> None:
    job = pipeline(seed)
    rng = np.random.default_rng(0)

    def cut(layer: LayerProfile) -> LayerProfile:
        sizes = rng.integers(1, 50, 3)
        trained = (*map(int, sizes), layer.parameters - int(sizes.sum()))
        return replace(layer, trained=trained, cast_bytes=2 * layer.parameters - 64)

    model = job.profile.model
    layers = [cut(layer) for layer in model.layers]
    # The second shard has most of these layers.
    layers[::2] = [replace(layer, update_s=1.0) for layer in layers[::2]]
    model = replace(model, layers=tuple(layers), precision=precision)
    profile = replace(job.profile, model=model)
    known = Known(tuple(device.slowdown for device in profile.cluster.devices))
    now, ratios = replace(job.now, shard=shard), None
    if frozen:
        shares = rng.uniform(0, 1, (len(layers), now.microbatches))
        ratios = tuple(map(tuple, shares.tolist()))
    problem, candidates = (
        RepartitionProblem(profile, now, job.problem.schedule, known, ratios),
        job.candidates(),
    )
    candidates = candidates.select(rng.choice(len(candidates), min(10, len(candidates)), replace=False))
    judge = Judge(problem)
    steps_s, bounds_s = judge.step_s(candidates), judge.bound_s(candidates)
    assert (bounds_s <= steps_s * (1 + 1e-9)).all()
    assert bounds_s.mean() > 0.5 * steps_s.mean()
    for cut_, order, step_s in zip(candidates.cuts, candidates.orders, steps_s, strict=True):
        plan = replace(problem.plan(cut_, order.tolist(), ""), standbys=())
        expected = predict(profile, plan, problem.schedule_of(plan), ratios)
        assert step_s == pytest.approx(expected.step_s, rel=1e-9)


def test_a_bound_is_near_the_step_where_many_microbatches_pass() -> None:
    job = pipeline(next(seed for seed in range(100) if pipeline(seed).now.schedule == "1f1b"))
    now = replace(job.now, microbatches=64)
    job = replace(job, now=now)
    judge, candidates = Judge(job.problem), job.candidates()
    assert judge.bound_s(candidates).mean() > 0.9 * judge.step_s(candidates).mean()


def test_no_candidates_have_no_bounds_where_slowdowns_depend_on_layers() -> None:
    job = pipeline(0)
    problem = RepartitionProblem(
        job.profile, job.now, job.problem.schedule, lambda loads: [1.0] * len(loads), None
    )
    none = job.candidates().select(np.array([], dtype=int))
    assert Judge(problem).bound_s(none).shape == (0,)
