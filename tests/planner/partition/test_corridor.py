"""Programs that look only where a cut near the optimum can lie find the same cuts as over all layer ranges."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from benchmarks.parts.random_pipelines import random_profile
from planner.partition import bottleneck, dynpipe, memory
from planner.partition.corridor import corridors, window
from planner.partition.minmax import smallest_largest
from planner.partition.stage_costs import StageCosts
from planner.plan import PlanError
from planner.schedule.registry import build, families


def costs_of(seed: int) -> StageCosts:
    """Up to 60 layers in up to 12 stages; half of them are short of memory."""
    rng = Random(seed)
    family = families()[rng.choice(list(families()))]
    ranks = rng.randint(1, 12 // family.default_chunks)
    layers = rng.randint(max(2, family.stages(ranks, family.default_chunks)), 60)
    room = rng.choice([10**12, 60_000_000 * rng.randint(1, 4)])
    profile = random_profile(rng, layers, ranks, memory_bytes=room)
    return StageCosts.of(profile, build(family.name, ranks, ranks * rng.randint(1, 3)))


def answer_of(program, costs: StageCosts, limited: bool) -> object:
    try:
        return program.partition(costs, limited=limited)
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(40))
def test_programs_find_what_they_find_without_a_corridor(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(seed)
    cases = [(program, limited) for program in (bottleneck, dynpipe) for limited in (False, True)]
    found = [answer_of(program, costs, limited) for program, limited in cases]
    balanced = memory.partition(costs)

    def everything(layers: int, stages: int, least: object):
        yield float("inf"), [window(layers, stages, stage) for stage in range(stages)]

    for module in ("minmax", "dynpipe"):
        monkeypatch.setattr(f"planner.partition.{module}.corridors", everything)
    assert found == [answer_of(program, costs, limited) for program, limited in cases]
    assert balanced == memory.partition(costs)


def test_a_corridor_of_many_layers_is_narrow() -> None:
    costs = StageCosts.of(random_profile(Random(7), 400, 20), build("1f1b", 20, 20))
    _, windows = next(corridors(costs.layers, costs.stages, costs.least_s))
    ranges = sum((stops.stop - stops.start) * (firsts.stop - firsts.start) for stops, firsts in windows)
    assert ranges < 400 * 400 / 20
    found = smallest_largest(costs.layers, costs.stages, costs.time_s, costs.least_s)
    assert found == smallest_largest(costs.layers, costs.stages, costs.time_s)


def test_layers_without_time_have_a_cut() -> None:
    nothing = np.zeros((3, 6))
    assert smallest_largest(5, 3, lambda stage, at: np.zeros((6, 6))[at], nothing) is not None
