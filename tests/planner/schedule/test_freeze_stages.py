"""Stages without backward passes: what goes, what stays in its order, and that every family can run it."""

import itertools
from dataclasses import replace

import pytest
from schedule_text import lines, text

from planner.ir import ActionKind, Schedule
from planner.plan import Plan
from planner.schedule.expand import frozen_stages, schedule_after, schedule_of, schedule_of_pipeline
from planner.schedule.passes import add_recompute, freeze_stages, repeat, with_stage_ranks
from planner.schedule.registry import build, families
from planner.schedule.validate import ScheduleError, validate
from planner.search.unmeasured import unmeasured_plan
from planner.simulation.simulate import Costs, simulate

FORWARD = ActionKind.FORWARD
GRID = [
    (name, ranks, microbatches, chunks)
    for name, family in sorted(families().items())
    for ranks, rounds in itertools.product((1, 2, 3, 4), (1, 2, 3))
    for chunks in {family.default_chunks, family.default_chunks + (family.most_chunks is None)}
    for microbatches in {ranks * rounds, *(() if family.whole_rounds else (ranks * rounds + 1,))}
]


def test_backward_passes_and_recomputes_of_the_first_stages_go():
    split = add_recompute(build("zb-h1", 3, 2), [0, 2])
    assert text(freeze_stages(split, 2)) == lines("""
        0F0 0F1
        1F0 1F1
        2F0 2R0 2I0 2F1 2R1 2I1 2W0 2W1
    """)
    assert text(freeze_stages(build("1f1b", 2, 2), 1)) == lines("""
        0F0 0F1
        1F0 1B0 1F1 1B1
    """)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), GRID)
def test_every_family_runs_without_the_backward_passes_of_any_number_of_stages(
    name: str, ranks: int, microbatches: int, chunks: int
):
    whole = build(name, ranks, microbatches, chunks)
    costs = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1, communication_s=0.25)
    before_s, back_s = simulate(whole, costs).makespan_s, 2.0
    for stages in range(whole.stages + 1):
        frozen = freeze_stages(whole, stages)
        validate(frozen)
        assert frozen.frozen_stages == stages
        for program, full in zip(frozen.programs, whole.programs, strict=True):
            assert program == tuple(a for a in full if a.kind is FORWARD or a.stage >= stages)
        assert frozen.rank_of_stage == whole.rank_of_stage
        assert frozen.splits_backward == (whole.splits_backward and stages < whole.stages)
        ran = simulate(frozen, costs)
        assert ran.makespan_s <= before_s, "no rank waits for more than before"
        assert sum(ran.busy_s) == microbatches * (whole.stages + (whole.stages - stages) * back_s)
        before_s = ran.makespan_s


@pytest.mark.parametrize("name", sorted(families()))
def test_the_other_passes_go_with_it(name: str):
    whole = build(name, 3, 6)
    for stages in range(whole.stages + 1):
        frozen = freeze_stages(whole, stages)
        assert freeze_stages(repeat(whole, 2), stages) == repeat(frozen, 2)
        again = range(whole.stages)
        assert freeze_stages(add_recompute(whole, again), stages) == add_recompute(frozen, again)
        turned = tuple((rank + 1) % 3 for rank in map(whole.rank_of_stage.get, range(whole.stages)))
        assert freeze_stages(with_stage_ranks(whole, turned), stages) == with_stage_ranks(frozen, turned)
        assert all(freeze_stages(frozen, fewer) is frozen for fewer in range(stages + 1))


@pytest.mark.parametrize("stages", [-1, 3])
def test_more_stages_than_there_are_is_refused(stages: int):
    with pytest.raises(ScheduleError, match=f"cannot freeze the first {stages} stages, it has 2"):
        freeze_stages(build("1f1b", 2, 2), stages)


def plan_of(schedule: Schedule, *counts: int, frozen: int = 0, recompute: tuple[int, ...] = ()) -> Plan:
    plan = unmeasured_plan(schedule, [1] * sum(counts), counts=counts, replicas=2, recompute=recompute)
    return replace(plan, frozen=frozen)


def test_a_plan_leaves_out_the_backward_passes_of_the_stages_that_its_frozen_layers_fill():
    whole = build("zb-h1", 3, 4)
    found = [schedule_of(plan_of(whole, 2, 3, 1, frozen=frozen)).frozen_stages for frozen in range(6)]
    assert found == [0, 0, 1, 1, 1, 2]
    recomputing = plan_of(whole, 2, 3, 1, frozen=4, recompute=(0, 2))
    assert schedule_of(recomputing) == add_recompute(freeze_stages(whole, 1), {0, 1})


def test_a_later_plan_has_the_backward_passes_again_that_it_needs():
    first = plan_of(build("1f1b", 2, 4), 2, 2, frozen=2)
    running = schedule_of(first)
    assert running.frozen_stages == 1
    for then, stages in (
        (plan_of(build("1f1b", 2, 4), 2, 2), 0),
        (plan_of(build("1f1b", 2, 4), 3, 1, frozen=2), 0),
        (plan_of(build("1f1b", 2, 4), 1, 3, frozen=2), 1),
        (plan_of(build("zbv", 2, 4), 1, 1, 1, 1, frozen=2), 2),
    ):
        assert schedule_after(running, then) == schedule_of(then)
        assert schedule_after(running, then).frozen_stages == stages
    uneven = replace(first, shares=(5, 3))
    for pipeline, share in enumerate((5, 3)):
        own = schedule_of_pipeline(uneven, schedule_of(uneven), pipeline)
        assert own == freeze_stages(build("1f1b", 2, share), 1)


def test_a_table_of_the_users_own_keeps_its_backward_passes():
    table = replace(build("1f1b", 2, 2), name="csv:own.csv")
    plan = plan_of(table, 2, 2, frozen=3)
    assert frozen_stages(plan.schedule, plan.layers, plan.frozen) == 0
    assert schedule_of(plan, table) == table
    assert schedule_after(table, plan) == table
