"""What a step takes when parameters are frozen by chance: Monte Carlo over the Bernoulli draws.

Ratios are expectations. The draws spread an action's time around its expected one, and where actions wait for each
other the later one counts, so a step lasts longer than one of expected times does (E[max] > max E). This is what
measured steps are held against.
"""

from __future__ import annotations

import numpy as np

from planner.freezing import Ratios
from planner.ir import FREEZABLE, Schedule
from planner.plan import Plan
from planner.profile import LayerProfile, Profile
from planner.schedule.graph import build_graph
from planner.simulation.costs import bounds, check_fit
from planner.simulation.longest_path import Floats, build_network
from planner.simulation.predict import predict


def expected_step_s(
    profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios, draws: int, seed: int
) -> float:
    """Mean of `step_seconds`."""
    return float(step_seconds(profile, plan, schedule, ratios, draws, seed).mean())


def step_seconds(
    profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios, draws: int, seed: int
) -> Floats:
    """float[draws]: what `draws` steps take: the pipeline whose windows last longest, then all that comes after them.

    Each matrix of a layer is left out of each microbatch with the probability that is its ratio, by itself. Time of
    weight gradients that belongs to no matrix is taken at its expectation.

    Args:
        ratios: `ratios[layer][microbatch]`.
        seed: of the generator; equal seeds give equal steps.

    Raises:
        ValueError: `draws` is below 1; plan, schedule, profile and ratios do not fit together.
    """
    if draws < 1:
        raise ValueError(f"{draws} draws, at least 1 is needed")
    check_fit(profile, plan, schedule.stages, ratios, schedule.microbatches)
    upper, lower = bounds(profile, plan, schedule)
    graph = build_graph(schedule)
    shortest = lower.of_nodes(graph)
    generator = np.random.default_rng(seed)
    windows = draws * plan.replicas
    seconds = np.repeat(np.array(shortest, dtype=np.float64)[:, None], windows, axis=1)
    for kind, stage, nodes in graph.alike:
        if kind not in FREEZABLE:
            continue
        slowdown = profile.cluster.devices[plan.stage_ranks[stage]].slowdown
        for layer in range(*plan.layers[stage]):
            for node in nodes:
                ratio = ratios[layer][graph.actions[node].index]
                seconds[node] += slowdown * _drawn_s(profile.model.layers[layer], ratio, windows, generator)
    makespans = build_network(schedule, graph, upper, shortest).makespans(seconds)
    expected = predict(profile, plan, schedule, ratios)
    # Windows of one pipeline overlap: no rank waits for the others between them.
    overlap_s = plan.windows * expected.simulation.makespan_s - expected.windows_s
    of_replica = makespans.reshape(draws, plan.replicas)
    of_pipeline = np.stack(
        [of_replica[:, first :: plan.pipeline_count].sum(axis=1) for first in range(plan.pipeline_count)]
    )
    return of_pipeline.max(axis=0) - overlap_s + (expected.step_s - expected.windows_s)


def _drawn_s(layer: LayerProfile, ratio: float, windows: int, generator: np.random.Generator) -> Floats:
    """float[windows]: the layer's weight gradients of one microbatch."""
    matrix_s: Floats = np.array([matrix.weight_grad_s for matrix in layer.matrices], dtype=np.float64)
    computed = generator.random((windows, len(matrix_s))) >= ratio
    rest_s = max(0.0, layer.weight_grad_s - float(matrix_s.sum()))
    drawn_s: Floats = computed @ matrix_s
    return drawn_s + (1.0 - ratio) * rest_s
