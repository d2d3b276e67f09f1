"""Other cuts of a running pipeline: given ones, the planner's best, and what a step of them would take."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import small_profile

from planner.plan import PlanError
from planner.schedule.expand import schedule_of
from planner.search import recut
from planner.search.replan import Replanner
from planner.simulation.predict import predict

LAYERS = 8
NOW = small_profile.plan(6, 1, 1, microbatches=8, partition="explicit", standbys=((2,),) * LAYERS)
DOMAINS = "abc"


def made(*, memory_bytes: int = 1_000_000) -> Replanner:
    device = replace(small_profile.DEVICE, memory_bytes=memory_bytes)
    layers = [small_profile.layer(f"layer{number}") for number in range(LAYERS)]
    return Replanner(
        first=NOW,
        schedule=schedule_of(NOW),
        parameters=(10,) * LAYERS,
        copies=0,
        profile=small_profile.profile(*layers, ranks=3, device=device),
    )


def test_given_counts_change_the_cut_alone() -> None:
    plan = recut.with_counts(NOW, (2, 2, 4))
    assert plan == replace(NOW, layers=((0, 2), (2, 4), (4, 8)))


@pytest.mark.parametrize("counts", [(4, 4), (2, 2, 2), (8, 0, 0), (3, 3, 3), ()])
def test_counts_that_are_no_cut_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError):
        recut.with_counts(NOW, counts)


@pytest.mark.parametrize("slowdowns", [None, (3.0, 1.0, 1.0), (1.0, None, 2.0)])
def test_no_cut_is_faster_than_the_best(slowdowns: tuple[float | None, ...] | None) -> None:
    replanner = made()
    best, candidates = recut.best(replanner, NOW, DOMAINS, slowdowns)
    assert candidates
    assert best == replace(NOW, layers=best.layers, partition=best.partition)
    found = recut.predicted(replanner, best, DOMAINS, slowdowns)
    assert found is not None
    for first, second in itertools.combinations(range(1, LAYERS), 2):
        cut = recut.with_counts(NOW, (first, second - first, LAYERS - second))
        other = recut.predicted(replanner, cut, DOMAINS, slowdowns)
        assert other is not None
        assert found.step_s <= 1.02 * other.step_s


def test_a_step_is_predicted_for_the_speeds_that_are_known() -> None:
    replanner = made()
    for slowdowns in (None, (2.0, 1.0, 1.0)):
        found = recut.predicted(replanner, NOW, DOMAINS, slowdowns)
        assert found is not None
        profile = replanner.profile_on(DOMAINS, slowdowns)
        assert found.step_s == predict(profile, NOW, schedule_of(NOW)).step_s


def test_without_a_profile_layers_are_cut_by_parameters_and_nothing_is_predicted() -> None:
    replanner = replace(made(), profile=None, parameters=(70, *(10,) * 7))
    best, candidates = recut.best(replanner, NOW, DOMAINS)
    assert (best.partition, candidates) == ("parameter", ())
    assert best.layers_per_stage == (1, 3, 4)
    assert recut.predicted(replanner, NOW, DOMAINS) is None


def test_where_no_cut_fits_the_memory_it_is_said() -> None:
    with pytest.raises(PlanError, match="memory"):
        recut.best(made(memory_bytes=100), NOW, DOMAINS)
