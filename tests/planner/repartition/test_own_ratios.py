"""Plans count with the freeze ratios that they would get, not with those that are in force for another cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import pytest
import small_profile
from small_pipelines import Pipeline, pipeline

from benchmarks.parts.brute_force import all_cuts
from planner.freeze.decision import FreezeQuestion, decide, profiled_ratios
from planner.freezing import Phases, Ratios
from planner.plan import Plan
from planner.repartition import repartition
from planner.repartition.repartition import MOST_PROGRAMS, FoundPlan, affordable_programs, best
from planner.schedule.expand import schedule_after, schedule_of
from planner.schedule.registry import build
from planner.search.replan import Replanner
from planner.simulation.predict import Prediction, predict

R_MAX = 0.8
CLOSE = 1.02


@dataclass(frozen=True)
class Freezing:
    """A job that freezes, some of whose ranks have become slow since."""

    job: Pipeline

    @cached_property
    def in_force(self) -> Ratios:
        """The solution for the present cut, at the speeds of the profile."""
        before = replace(self.job, slowdowns=(None,) * len(self.job.slowdowns))
        return profiled_ratios(before.profile, self.job.now, schedule_of(self.job.now), R_MAX)

    def found(self, r_max: float | None, *, reorder: bool = True) -> FoundPlan:
        job = self.job
        return best(
            job.replanner,
            job.now,
            job.domains,
            job.slowdowns,
            ratios=self.in_force,
            r_max=r_max,
            reorder=reorder,
        )

    def solved_after_move(self, plan: Plan) -> Ratios:
        """What the job's freeze program says once the ranks follow `plan`."""
        job = self.job
        question = FreezeQuestion(
            plan=plan,
            schedule=schedule_after(job.replanner.schedule, plan),
            phases=Phases(warm_up=0, monitoring=2, ramp=2),
            r_max=R_MAX,
            profile=job.replanner.profile_on(job.domains, job.slowdowns),
        )
        return decide(question, ()).ratios

    def own(self, plan: Plan) -> Prediction:
        """The prediction with the plan's own ratios."""
        profile, schedule = self.job.profile, schedule_of(plan)
        return predict(profile, plan, schedule, profiled_ratios(profile, plan, schedule, R_MAX))

    def least_s(self) -> float:
        """Of every cut in the present order of the ranks, each with its own ratios."""
        job = self.job
        plans = (
            job.replanner.with_standbys(replace(job.now, layers=cut), job.domains)
            for cut in all_cuts(job.now.layers[-1][1], job.now.stages)
        )
        return min(self.own(plan).step_s for plan in plans)


def balanced(seed: int, schedule: str) -> Pipeline:
    """Ten layers with little or much to freeze on three ranks that were equally fast, and now are not."""
    rng, domains = Random(seed), ("a", "b", "c")
    profile = small_profile.profile(
        *(
            small_profile.layer(
                f"layer{number}",
                forward_s=rng.uniform(0.2, 2),
                input_grad_s=rng.uniform(0.2, 2),
                weight_grad_s=rng.choice([0.1, 1, 6]),
            )
            for number in range(10)
        ),
        ranks=3,
        device=replace(small_profile.DEVICE, memory_bytes=10**9),
    )
    even = small_profile.plan(4, 3, 3, microbatches=6, schedule=schedule)
    replanner = Replanner(
        first=even, schedule=schedule_of(even), parameters=(10,) * 10, copies=0, profile=profile
    )
    now = best(replanner, even, domains, reorder=False).best.plan
    return Pipeline(replanner, now, domains, tuple(rng.choice([1.0, 1.0, 1.8, 3.2]) for _ in domains))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("seed", range(4, 9))
def test_within_two_percent_of_all_cuts_with_their_own_ratios(seed: int, schedule: str) -> None:
    freezing = Freezing(balanced(seed, schedule))
    found = freezing.found(R_MAX, reorder=False)
    assert found.own_ratios
    assert found.best.step_s <= CLOSE * freezing.least_s()


def test_ratios_of_their_own_favour_another_cut_than_those_in_force() -> None:
    freezing = Freezing(balanced(7, "1f1b"))
    kept, joint = freezing.found(None, reorder=False), freezing.found(R_MAX, reorder=False)
    least_s = freezing.least_s()
    assert joint.best.step_s <= CLOSE * least_s
    assert freezing.own(kept.best.plan).step_s > 1.1 * least_s
    assert kept.best.step_s < 0.97 * kept.now.step_s, "by the ratios in force the job would move"


@pytest.mark.parametrize("seed", range(8))
def test_the_program_that_is_solved_after_the_move_says_the_same(seed: int) -> None:
    freezing = Freezing(pipeline(seed))
    found = freezing.found(R_MAX)
    for prediction in (found.now, *found.choices):
        assert prediction.step_s == freezing.own(prediction.plan).step_s
    for prediction in (found.now, found.best):
        assert prediction.ratios == freezing.solved_after_move(prediction.plan)
    assert [(each.plan, each.ratios) for each in freezing.found(R_MAX).choices] == [
        (each.plan, each.ratios) for each in found.choices
    ]


def test_where_the_programs_would_take_too_long_all_plans_count_with_the_ratios_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = [affordable_programs(build("1f1b", ranks, 4 * ranks)) for ranks in (4, 16, 32)]
    assert counts[0] == MOST_PROGRAMS > counts[1] > 2 > counts[2]
    monkeypatch.setattr(repartition, "MOST_SOLVING_S", 0.0)
    freezing = Freezing(pipeline(0))
    kept = freezing.found(R_MAX)
    assert not kept.own_ratios
    assert kept.now.ratios == freezing.in_force
    assert {choice.ratios for choice in kept.choices} == {freezing.in_force}


def test_where_freezing_saves_nothing_what_is_frozen_stays() -> None:
    profile = small_profile.profile(
        *(small_profile.layer(f"layer{number}", weight_grad_s=0.0) for number in range(6))
    )
    freezing = pipeline(0)
    now = small_profile.plan(3, 3)
    replanner = replace(
        freezing.replanner,
        first=now,
        schedule=schedule_of(now),
        profile=profile,
        copies=0,
        parameters=(10,) * 6,
    )
    ratios = ((0.5, 0.25),) * 6
    found = best(replanner, now, "ab", [1.0, 3.0], ratios=ratios, r_max=R_MAX)
    assert {prediction.ratios for prediction in (found.now, *found.choices)} == {ratios}
