"""Pipelines of a job whose first layers are frozen: fewer ranks each, more of them, by the search and by the paper."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from made_profile import made_profile

from planner.ir import ActionKind
from planner.partition.stage_costs import StageCosts
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.schedule.validate import validate
from planner.search.gain import pays
from planner.search.packing import packed
from planner.search.replan import Replanner
from planner.search.search import ChosenPlan, PlanWish, choose
from planner.simulation.costs import action_costs
from planner.simulation.predict import predict

LAYERS = 12
PARAMETERS = (1000,) * LAYERS
DOMAINS = tuple("abcdefgh")


def profile(ranks: int = 8, **changes: object) -> Profile:
    names = [f"layer{number}" for number in range(LAYERS)]
    return made_profile(names, PARAMETERS, ranks, **changes)  # pyright: ignore[reportArgumentType]


@lru_cache
def chosen(measured: Profile) -> ChosenPlan:
    return choose(measured, PlanWish(ranks=8, schedule="1f1b", microbatches=8, replicas=8, pipelines=1))


def job(frozen: int = 0, *, measured: Profile | None = None, **changes: object) -> Replanner:
    """One pipeline of eight ranks for eight replicas; what is frozen stays so."""
    measured = measured or profile()
    choice = chosen(measured)
    fields = {
        "first": choice.plan,
        "schedule": choice.schedule,
        "parameters": PARAMETERS,
        "copies": 0,
        "profile": measured,
        "frozen": frozen,
        "released": frozen,
        **changes,
    }
    return Replanner(**fields)  # pyright: ignore[reportArgumentType]


def plan_for(made: Replanner, ranks: int = 8) -> Plan:
    plan, schedule = made.plan_for(ranks, epoch=1, version=2, reason="", domains=DOMAINS[:ranks])
    validate(schedule)
    return plan


def step_s(made: Replanner, plan: Plan) -> float:
    return predict(made.profile_on(DOMAINS[: plan.world_size]), plan, schedule_of(plan)).step_s


def test_the_first_plan_applies_while_nothing_else_is_frozen_than_it_was_cut_for() -> None:
    made = job()
    assert plan_for(made).layers == made.first.layers
    assert plan_for(made).pipeline_count == 1
    assert plan_for(replace(made, frozen=4, first_frozen=4)).layers == made.first.layers


def test_layers_that_may_thaw_keep_their_memory() -> None:
    made = job(8)
    domains = DOMAINS[:8]
    kept = replace(made, released=0).profile_on(domains).model.layers
    freed = made.profile_on(domains).model.layers
    assert [layer.summed_bytes for layer in kept] == [4000] * LAYERS
    assert [layer.summed_bytes for layer in freed] == [0] * 8 + [4000] * 4
    assert [layer.exchanged_bytes for layer in kept] == [layer.exchanged_bytes for layer in freed]


def test_a_stage_after_the_first_computes_what_that_finds() -> None:
    costs = StageCosts.of(job(8, kept=6).profile_on(DOMAINS), schedule_of(job().first))
    assert costs.compute_s[12, 0] == pytest.approx(4 * 0.03 + 2 * 0.01)
    assert costs.compute_s[12, 1] == pytest.approx(4 * 0.03 + 7 * 0.01)


def test_the_deeper_the_frozen_prefix_the_faster_the_search_packs() -> None:
    before = step_s(job(), job().first)
    for frozen in range(1, LAYERS):
        made = job(frozen)
        plan = plan_for(made)
        then, unpacked = step_s(made, plan), step_s(made, made.first)
        assert then == plan.predicted_step_s
        assert then <= unpacked * (1 + 1e-9), frozen
        assert then <= before * (1 + 1e-9), frozen
        before = then
        assert plan.replicas == 8
        assert plan.world_size <= 8
    assert plan_for(job(LAYERS - 1)).pipeline_count > 1


def test_a_packed_job_that_is_thawed_has_its_first_plan_again() -> None:
    made = replace(job(9), frozen=0, released=0)
    assert plan_for(made).layers == made.first.layers


def test_a_lost_rank_is_replaced_by_a_plan_for_the_frozen_layers() -> None:
    made = job(9)
    plan = plan_for(made, 7)
    assert plan.world_size <= 7
    even = replace(made, frozen=0, released=0)
    assert step_s(made, plan) <= step_s(made, plan_for(even, 7)) * (1 + 1e-9)


def test_the_papers_algorithm_halves_the_ranks_and_doubles_the_pipelines() -> None:
    seen = {frozen: plan_for(job(frozen, frozen_cost=1 / 6)) for frozen in range(1, LAYERS)}
    for plan in seen.values():
        assert plan.partition == "pipetransformer"
        assert plan.pipeline_count == min(8, 8 // plan.pipeline_ranks)
    ranks = [plan.pipeline_ranks for plan in seen.values()]
    assert ranks == sorted(ranks, reverse=True)
    assert set(ranks) <= {8, 4, 2, 1}
    assert ranks[-1] < 8


def test_the_papers_algorithm_keeps_the_ranks_where_halves_would_take_more_memory() -> None:
    measured = profile()
    heavy = tuple(replace(layer, optimizer_bytes=10**8) for layer in measured.model.layers)
    measured = replace(measured, model=replace(measured.model, layers=heavy))
    assert plan_for(job(6, measured=measured, frozen_cost=1 / 6)).pipeline_ranks == 8


def test_a_requested_number_of_pipelines_holds_while_there_are_ranks_for_it() -> None:
    for count in (1, 2, 4, 8):
        made = job(9, pipelines=count)
        assert plan_for(made).pipeline_count == count
        assert plan_for(replace(made, frozen=0, released=0)).pipeline_count == count
    assert plan_for(job(9, pipelines=8), 3).pipeline_count == 3


def test_a_table_of_the_users_own_is_not_packed_by_the_paper() -> None:
    made = job(6, frozen_cost=1 / 6)
    first = replace(made.first, schedule="csv:mine")
    with pytest.raises(PlanError, match="csv:mine is a table"):
        packed(made.profile_on(DOMAINS), first, 8, frozen=6, frozen_cost=1 / 6)
    plan = plan_for(replace(made, first=first, schedule=replace(made.schedule, name="csv:mine")))
    assert plan.partition != "pipetransformer"


def test_pipelines_that_cannot_be_give_way_to_a_plan_that_can() -> None:
    """Two pipelines of one rank each would have the whole model on a rank, which has no room for it."""
    measured = profile()
    heavy = tuple(replace(layer, optimizer_bytes=10**8) for layer in measured.model.layers)
    measured = replace(measured, model=replace(measured.model, layers=heavy))
    made = job(measured=measured, pipelines=2)
    plan = plan_for(made, 3)
    assert plan.pipeline_count == 1
    assert "2 pipelines cannot be" in plan.reason


def test_layers_whose_outputs_are_kept_cost_the_first_stage_alone_no_forward_pass() -> None:
    made = job(6, kept=6)
    plan = plan_for(made)
    _, stop = plan.layers[0]
    assert stop >= 6, "all of them go to the first stage"
    assert step_s(made, plan) < 0.8 * step_s(job(6), plan_for(job(6)))
    layers = made.profile_on(DOMAINS).model.layers
    assert [layer.forward_s > 0 for layer in layers] == [False] * 6 + [True] * 6
    # The first plan has one or two of them on its first stage, and computes the others.
    costs = action_costs(made.profile_on(DOMAINS), made.first, made.schedule).seconds[ActionKind.FORWARD]
    plain = action_costs(job(6).profile_on(DOMAINS), made.first, made.schedule).seconds[ActionKind.FORWARD]
    assert costs[0] == 0 < plain[0]
    assert costs[1:] == plain[1:]


def test_outputs_of_no_more_layers_are_kept_than_are_frozen() -> None:
    assert job(4, kept=9).profile_on(DOMAINS) == job(4, kept=4).profile_on(DOMAINS)
    assert job(0, kept=9).profile_on(DOMAINS) == job().profile_on(DOMAINS)


def test_where_the_first_plan_was_cut_for_what_is_frozen_it_is_cut_anew_once_that_is_kept() -> None:
    made = job(6, first_frozen=6)
    assert plan_for(made).layers == made.first.layers
    assert plan_for(replace(made, kept=6)).layers != made.first.layers


@pytest.mark.parametrize(
    "prefixes", [(1, 5, 8, 11), pytest.param(range(1, LAYERS), marks=pytest.mark.soak)], ids=str
)
@pytest.mark.parametrize("changes", [{"pipelines": 1}, {"frozen_cost": 1 / 6}, {"pipelines": 1, "copies": 1}])
def test_stages_of_layers_that_stay_frozen_have_no_backward_pass(
    changes: dict[str, Any], prefixes: Sequence[int]
) -> None:
    some = 0
    for frozen in prefixes:
        made = job(frozen, **changes)
        plan, schedule = made.plan_for(8, epoch=1, version=2, reason="", domains=DOMAINS)
        assert plan.frozen == frozen
        assert schedule == schedule_of(plan)
        assert schedule.frozen_stages == sum(stop <= frozen for _, stop in plan.layers)
        some += bool(schedule.frozen_stages)
        on = made.profile_on(DOMAINS[: plan.world_size])
        kept = replace(plan, frozen=0)
        dropping, keeping = predict(on, plan, schedule), predict(on, kept, schedule_of(kept))
        assert plan.predicted_step_s == dropping.step_s
        assert dropping.step_s <= keeping.step_s * (1 + 1e-9)
        assert max(dropping.memory.peak_bytes) <= max(keeping.memory.peak_bytes)
        thawing, _ = replace(made, released=0).plan_for(8, epoch=1, version=2, reason="", domains=DOMAINS)
        assert thawing.frozen == 0
    assert some


def test_a_layout_that_only_drops_what_computes_nothing_is_worth_what_it_saves() -> None:
    made = job(6, pipelines=1)
    plan = plan_for(made)
    assert schedule_of(plan).frozen_stages
    worth_it, why = pays(made.compared(plan, 8, domains=DOMAINS), 1000, 0.0)
    assert (worth_it, why) == (False, "the best layout of 8 ranks is the one that they have")
    kept = replace(plan, frozen=0)
    worth_it, why = pays(made.compared(kept, 8, domains=DOMAINS), 1000, 0.0)
    assert worth_it == (step_s(made, plan) < step_s(made, kept)), why
    assert "the one that they have" not in why


def test_a_job_without_a_profile_drops_them_too() -> None:
    made = replace(job(9), profile=None)
    for ranks in (8, 6, 3):
        plan = plan_for(made, ranks)
        assert plan.frozen == 9
        assert schedule_of(plan).frozen_stages == sum(stop <= 9 for _, stop in plan.layers) > 0
    assert plan_for(replace(made, frozen=0, released=0)).frozen == 0
