"""From a plan to its schedule, by family or table, with an R where a stage has a layer that recomputes."""

from dataclasses import replace

from planner.schedule.expand import recomputing_stages, schedule_of
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build
from planner.search.unmeasured import unmeasured_plan


def test_a_stage_recomputes_if_it_holds_a_layer_that_does():
    assert recomputing_stages(((0, 2), (2, 3), (3, 6)), (1, 4)) == {0, 2}
    assert recomputing_stages(((0, 2), (2, 3)), ()) == frozenset()


def test_the_schedule_of_a_plan_is_its_family_s_with_its_recomputations():
    base = build("interleaved", 2, 4, 2)
    plan = unmeasured_plan(base, [1] * 5, replicas=2, recompute=(1,))
    assert (plan.chunks, plan.stage_ranks, plan.world_size) == (2, (0, 1, 0, 1), 4)
    assert (plan.layers, plan.partition) == (((0, 1), (1, 2), (2, 3), (3, 5)), "parameter")
    assert schedule_of(plan) == add_recompute(base, {1})
    assert schedule_of(replace(plan, recompute=())) == base


def test_a_table_of_the_user_s_own_takes_the_place_of_the_family():
    table = replace(build("1f1b", 2, 2), name="csv:own.csv")
    plan = unmeasured_plan(table, [1, 1, 1], counts=(2, 1), replicas=1, recompute=(2,))
    assert (plan.schedule, plan.partition, plan.layers) == ("csv:own.csv", "explicit", ((0, 2), (2, 3)))
    assert schedule_of(plan, table) == add_recompute(table, {1})
