"""Step time when parameters are frozen at random: a Monte Carlo estimate over the Bernoulli masks.

Freeze ratios are expectations. Sampled masks spread an action's time around its mean. Where actions wait for each
other the later one counts, so the mean step is longer than a step of mean times (E[max] > max E). Measured steps are
compared with this estimate.
"""

from __future__ import annotations

import numpy as np

from planner.freezing import Ratios
from planner.ir import FREEZABLE, Schedule
from planner.plan import Plan
from planner.profile import LayerProfile, Profile
from planner.schedule.graph import build_graph
from planner.simulation.costs import bounds, check_fit, pipeline_slowdowns
from planner.simulation.longest_path import Floats, build_network
from planner.simulation.predict import PipelineRun, Prediction, predict


def expected_step_s(
    profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios, samples: int, seed: int
) -> float:
    """Mean of `step_seconds`."""
    return float(step_seconds(profile, plan, schedule, ratios, samples, seed).mean())


def step_seconds(
    profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios, samples: int, seed: int
) -> Floats:
    """float[samples]: seconds of each sampled step. The slowest pipeline's windows count, then what follows them.

    Each matrix of a layer skips each microbatch independently, with its freeze ratio as the probability.
    Weight-gradient time that belongs to no matrix counts with its expectation.

    Args:
        ratios: `ratios[layer][microbatch]`.
        seed: of the generator; equal seeds give equal steps.

    Raises:
        ValueError: `samples` is below 1; plan, schedule, profile and ratios do not fit together.
    """
    if samples < 1:
        raise ValueError(f"{samples} samples, at least 1 is needed")
    check_fit(profile, plan, schedule.stages, ratios, schedule.microbatches)
    generator = np.random.default_rng(seed)
    expected = predict(profile, plan, schedule, ratios)
    if plan.shares:
        of_pipeline = np.stack([_makespans(expected, run, samples, generator) for run in expected.runs])
        return of_pipeline.max(axis=0) + (expected.step_s - expected.windows_s)
    makespans = _makespans(expected, expected.slowest, samples * plan.replicas, generator)
    # Consecutive windows of one pipeline overlap: no rank waits for the others between them.
    overlap_s = plan.windows * expected.simulation.makespan_s - expected.windows_s
    of_replica = makespans.reshape(samples, plan.replicas)
    of_pipeline = np.stack(
        [of_replica[:, first :: plan.pipeline_count].sum(axis=1) for first in range(plan.pipeline_count)]
    )
    return of_pipeline.max(axis=0) - overlap_s + (expected.step_s - expected.windows_s)


def _makespans(
    expected: Prediction, run: PipelineRun, windows: int, generator: np.random.Generator
) -> Floats:
    """float[windows]: makespans of `windows` windows of `run`."""
    profile, plan, ratios = expected.profile, expected.plan, run.ratios
    assert ratios is not None
    schedule = run.window.schedule
    upper, lower = bounds(profile, plan, schedule, pipeline=run.pipeline)
    graph = build_graph(schedule)
    shortest = lower.of_nodes(graph)
    seconds = np.repeat(np.array(shortest, dtype=np.float64)[:, None], windows, axis=1)
    slowdowns = pipeline_slowdowns(profile.cluster, plan.pipeline_ranks, run.pipeline or 0)
    for kind, stage, nodes in graph.by_kind_and_stage:
        if kind not in FREEZABLE:
            continue
        slowdown = slowdowns[plan.stage_ranks[stage]]
        for layer in range(*plan.layers[stage]):
            for node in nodes:
                ratio = ratios[layer][graph.actions[node].index]
                seconds[node] += slowdown * _sampled_s(profile.model.layers[layer], ratio, windows, generator)
    return build_network(schedule, graph, upper, shortest).makespans(seconds)


def _sampled_s(layer: LayerProfile, ratio: float, windows: int, generator: np.random.Generator) -> Floats:
    """float[windows]: seconds of the layer's weight gradients for one microbatch."""
    matrix_s: Floats = np.array([matrix.weight_grad_s for matrix in layer.matrices], dtype=np.float64)
    computed = generator.random((windows, len(matrix_s))) >= ratio
    rest_s = max(0.0, layer.weight_grad_s - float(matrix_s.sum()))
    sampled_s: Floats = computed @ matrix_s
    return sampled_s + (1.0 - ratio) * rest_s
