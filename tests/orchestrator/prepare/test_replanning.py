"""A job's plan for its remaining ranks: same family or the nearest, memory, replicas, standbys, and when a
newcomer pays off."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_profile import made_profile
from resolving import resolve_spec, settle_spec

from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.planning import first_plan, replanner_of
from orchestrator.spec.job_spec import JobConfig, PipelineConfig, Spec
from planner.ir import ActionKind
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.schedule import table_format
from planner.schedule.expand import schedule_of
from planner.schedule.registry import build, families
from planner.schedule.validate import validate
from planner.search.gain import pays
from planner.search.replan import Replanner
from planner.search.search import PlanWish, choose
from planner.simulation.predict import predict
from workers.config import ElasticConfig, EmulatedConfig

LAYERS = 12
WEIGHTS = (0.2, *[1.0] * (LAYERS - 2), 1.5)
FOUND = ModelOutline(
    layers=tuple(f"layer{number}" for number in range(LAYERS)),
    parameters=(1000,) * LAYERS,
    vocabulary=256,
    language=True,
    emulated=EmulatedConfig(),
)


def profile(ranks: int, **changes: Any) -> Profile:
    return made_profile(FOUND.layers, FOUND.parameters, ranks, weights=WEIGHTS, **changes)


def job(
    *,
    ranks: int = 4,
    measured: bool = True,
    memory_bytes: int | None = None,
    elastic: ElasticConfig | None = None,
    **pipeline: Any,
) -> Replanner:
    """The replanner of a job: it partitions by `dynpipe` with a profile and by `parameter` without one."""
    numbers = {
        "ranks": ranks,
        "microbatches": 8,
        "microbatch_size": 2,
        "partition": "dynpipe" if measured else "parameter",
        **pipeline,
    }
    spec = Spec(
        job=JobConfig(name="a"),
        pipeline=PipelineConfig.model_validate(numbers),
        elastic=elastic or ElasticConfig(),
    )
    if memory_bytes is not None:
        spec = spec.model_copy(
            update={"cluster": spec.cluster.model_copy(update={"memory_per_rank_bytes": memory_bytes})}
        )
    settled = settle_spec(spec, FOUND, {})
    given = profile(ranks) if measured else None
    plan = None if given is None else first_plan(settled, given).plan
    return replanner_of(replace(resolve_spec(spec, FOUND, {}, epoch=1, plan=plan), profile=given))


def replan(made: Replanner, ranks: int, domains: str | None = None) -> Plan:
    """Replan for `ranks` ranks. `domains` has a letter per rank; by default each rank has its own domain."""
    where = list(domains or "abcdefghijklmnop"[:ranks])
    plan, schedule = made.plan_for(ranks, epoch=7, version=3, reason="rank 1 was lost", domains=where)
    assert (plan.epoch, plan.version) == (7, 3)
    assert plan.reason.startswith("rank 1 was lost: ")
    assert plan.world_size <= ranks
    assert (plan.microbatches, plan.replicas) == (made.first.microbatches, made.first.replicas)
    assert plan.recompute == made.first.recompute
    validate(schedule)
    assert schedule == schedule_of(plan)
    return plan


def test_the_same_family_on_those_that_are_left() -> None:
    made = job()
    plan = replan(made, 3)
    assert (plan.schedule, plan.pipeline_ranks, plan.pipeline_count) == ("1f1b", 3, 1)
    assert plan.partition == "dynpipe"
    best = choose(profile(3), PlanWish(ranks=3, schedule="1f1b", microbatches=8)).prediction.step_s
    there = predict(profile(3), replace(plan, standbys=()), schedule_of(plan)).step_s
    assert there <= best / 0.97


def test_asked_again_it_says_the_same_and_the_first_plan_comes_back() -> None:
    made = job()
    assert replan(made, 3) == replan(made, 3)
    again = replan(made, 4, "aaaa")
    assert again.layers == made.first.layers
    assert again.standbys == made.first.standbys
    assert "as it began, on 4 ranks" in again.reason
    # A job may be asked to have more ranks than it began with.
    assert replan(made, 6, "aaaaaa").world_size == 6


def test_it_travels() -> None:
    made = job()
    assert replan(pickle.loads(pickle.dumps(made)), 3) == replan(made, 3)


def test_another_family_where_the_own_does_not_fit_and_the_own_again_where_it_does() -> None:
    made = job(schedule="interleaved")
    three = replan(made, 3)
    assert three.schedule != "interleaved"
    assert three.pipeline_ranks == 3
    why = "as interleaved on 3 ranks needs a multiple of 3 microbatches, and there are 8"
    assert f"{three.schedule}, {why}" in three.reason
    assert replan(made, 2).schedule == "interleaved"


def test_a_list_of_layers_gives_way_to_a_program() -> None:
    counts = (1, 1, 1, 9)
    assert job(partition=counts).first.partition == "explicit"
    plan = replan(job(partition=counts), 3)
    assert plan.partition == "dynpipe"
    assert plan == replan(job(), 3)
    assert replan(job(partition=counts, measured=False), 3).layers == ((0, 4), (4, 8), (8, 12))


def test_without_a_profile_the_cut_is_by_parameters() -> None:
    plan = replan(job(measured=False), 3)
    assert plan.layers == ((0, 4), (4, 8), (8, 12))
    assert (plan.partition, plan.predicted_step_s) == ("parameter", None)


def test_every_layer_has_a_standby_elsewhere_unless_the_job_has_none() -> None:
    domains = "aabbc"
    plan = replan(job(ranks=8, measured=False), 5, domains)
    for layer, (place,) in enumerate(plan.standbys):
        assert domains[place] != domains[plan.stage_ranks[plan.stage_of_layer(layer)]]
    for kind in ("checkpoint", "none"):
        assert replan(job(elastic=ElasticConfig(redundancy=kind)), 3).standbys == ()
    assert replan(job(), 1).standbys == ((),) * LAYERS


def test_domains_decide_who_stands_by() -> None:
    made = job(ranks=8, measured=False)
    apart, together = replan(made, 4, "abab"), replan(made, 4, "aabb")
    assert apart.layers == together.layers
    assert apart.standbys != together.standbys
    assert made.with_standbys(apart, "aabb").standbys == together.standbys


def test_domains_decide_nothing_else_where_links_are_alike() -> None:
    made = job(ranks=8)
    plans = [replan(made, 6, domains) for domains in ("aabbcc", "abcabc", "abbccd", "aaaaaa")]
    assert len({plan.layers for plan in plans}) == 1
    assert len({plan.standbys for plan in plans}) > 2
    for plan, domains in zip(plans, ("aabbcc", "abcabc", "abbccd", "aaaaaa"), strict=True):
        assert made.with_standbys(plan, domains) == plan
        assert plan.predicted_step_s == predict(profile(6), plan, schedule_of(plan)).step_s


def test_memory_limits_hold_with_standbys() -> None:
    # Each parameter takes 4 bytes of weights, 4 of gradients and 8 of optimizer state, and its copy as much
    # again.
    enough = 2 * 16_000 * 4 + 13_000
    plan = replan(job(memory_bytes=enough), 3)
    assert predict(profile(3, memory_bytes=enough), plan, schedule_of(plan)).fits
    wrong = r"no plan for 2 ranks: .*nothing fits the memory.* for copies of .*; or elastic.redundancy = \"checkpoint"
    with pytest.raises(PlanError, match=wrong):
        replan(job(memory_bytes=enough), 2)
    # Without copies two ranks are enough.
    alone = job(memory_bytes=enough, elastic=ElasticConfig(redundancy="checkpoint"))
    assert replan(alone, 2).world_size == 2


def test_a_family_that_does_not_fit_the_memory_gives_way() -> None:
    # GPipe keeps the activations of all eight microbatches, 1F1B of as many as there are ranks.
    made = job(schedule="gpipe", elastic=ElasticConfig(redundancy="checkpoint"))
    least = {
        name: min(
            max(predict(profile(2), plan, build(name, 2, 8)).memory.peak_bytes)
            for first in range(1, LAYERS)
            for plan in [replace(replan(made, 2), layers=((0, first), (first, LAYERS)))]
        )
        for name in ("gpipe", "1f1b")
    }
    assert least["1f1b"] < least["gpipe"]
    limit = (least["1f1b"] + least["gpipe"]) // 2
    tight = replace(made, profile=profile(4, memory_bytes=limit))
    plan = replan(tight, 2)
    assert plan.schedule != "gpipe"
    assert "as gpipe does not fit the memory" in plan.reason


@pytest.mark.parametrize("measured", [True, False])
def test_replicas_share_fewer_pipelines(measured: bool) -> None:
    made = job(ranks=4, replicas=2, measured=measured)
    assert made.first.pipeline_count == 2
    three = replan(made, 3)
    # One pipeline of three ranks beats two of one rank.
    assert (three.pipeline_count, three.pipeline_ranks) == (1, 3)
    assert "3 ranks in 1 pipeline for 2 replicas" in three.reason
    assert replan(made, 1).world_size == 1
    assert replan(job(ranks=6, replicas=2, measured=measured), 4).pipeline_count in (1, 2)


@pytest.mark.parametrize("measured", [True, False])
def test_what_is_of_no_use_stays_out(measured: bool) -> None:
    # With few microbatches one pipeline of five ranks would mostly wait.
    plan = replan(job(ranks=6, replicas=2, microbatches=2, measured=measured), 5)
    assert (plan.pipeline_count, plan.pipeline_ranks) == (2, 2)
    assert "1 rank to spare" in plan.reason


def test_a_table_of_the_users_own_gives_way_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(table_format.dump(build("1f1b", 4, 8)))
    made = job(schedule=f"csv:{path}", recompute=(0, 5))
    assert made.first.schedule == f"csv:{path}"
    # The controller may run on another machine, which does not have the table.
    path.unlink()
    plan, _ = made.plan_for(3, epoch=1, version=2, reason="", domains="abc")
    assert plan.schedule in families()
    assert "as its table is for 4 ranks, and there are 3" in plan.reason
    again, schedule = made.plan_for(4, epoch=1, version=3, reason="", domains="abcd")
    assert (again.layers, schedule) == (made.first.layers, made.schedule)
    assert pays(made.compared(plan, 4), 100, 0.0)[0]


def test_recomputed_layers_stay() -> None:
    made = job(recompute=(0, 5))
    plan, schedule = made.plan_for(3, epoch=1, version=2, reason="", domains="abc")
    assert plan.recompute == (0, 5)
    again = {
        action.stage
        for program in schedule.programs
        for action in program
        if action.kind is ActionKind.RECOMPUTE
    }
    assert again == {plan.stage_of_layer(0), plan.stage_of_layer(5)}


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_any_family_on_any_number_of_ranks(family: str, ranks: int) -> None:
    plan = replan(job(ranks=4, schedule=family, measured=False), min(ranks, 4))
    assert plan.layers[-1][1] == LAYERS


def test_nobody_left_has_no_plan() -> None:
    with pytest.raises(PlanError, match="no plan for 0 ranks"):
        job().plan_for(0, epoch=1, version=1, reason="", domains="")
    with pytest.raises(ValueError, match="3 ranks, and 2 domains"):
        job().plan_for(3, epoch=1, version=1, reason="", domains="ab")


def test_a_newcomer_pays_if_what_is_left_is_long_enough() -> None:
    made = job()
    now = replan(made, 3)
    before_s = predict(profile(3), replace(now, standbys=now.standbys), schedule_of(now)).step_s
    after_s = made.first.predicted_step_s
    assert after_s is not None
    saved_s = before_s - after_s
    assert saved_s > 0
    worth_it, reason = pays(made.compared(now, 4), 100, 99 * saved_s)
    assert worth_it, reason
    assert "with 4 ranks instead of 3 a step takes" in reason
    worth_it, reason = pays(made.compared(now, 4), 100, 101 * saved_s)
    assert not worth_it
    assert "over 100 steps that saves" in reason
    # A step that takes twice as long as predicted saves twice as much.
    assert pays(made.compared(now, 4), 100, 101 * saved_s, step_s=2 * before_s)[0]
    assert not pays(made.compared(made.first, 4), 1000, 0.0)[0]


def test_without_a_profile_only_a_measured_step_can_be_weighed() -> None:
    made = job(measured=False)
    now = replan(made, 3)
    worth_it, reason = pays(made.compared(now, 4), 10, 5.0)
    assert worth_it
    assert "no step has been measured" in reason
    # (8 + 3) / 4 over (8 + 2) / 3 is 0.825, so a step of 1 s becomes 0.175 s shorter.
    assert pays(made.compared(now, 4), 10, 1.7, step_s=1.0)[0]
    assert not pays(made.compared(now, 4), 10, 1.8, step_s=1.0)[0]


def cut(made: Replanner, slowdowns: list[float | None] | None, domains: str = "abcd") -> Plan:
    plan, schedule = made.plan_for(
        len(domains), epoch=1, version=2, reason="", domains=domains, slowdowns=slowdowns
    )
    validate(schedule)
    return plan


def test_equal_speeds_change_no_plan() -> None:
    assert cut(job(), [1.0] * 4) == replace(
        cut(job(), None), predicted_step_s=cut(job(), [1.0] * 4).predicted_step_s
    )
    everywhere_slow = cut(job(), [2.0] * 4)
    assert everywhere_slow.layers == job().first.layers
    assert everywhere_slow.predicted_step_s == pytest.approx(
        2 * (job().first.predicted_step_s or 0), rel=0.05
    )


@pytest.mark.each_choice
@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_slow_rank_gets_fewer_layers(slow: int, schedule: str) -> None:
    made = job(schedule=schedule)
    speeds: list[float | None] = [3.0 if rank == slow else None for rank in range(4)]
    plan = cut(made, speeds)
    # A plan may also leave the last rank to spare.
    counts = [*plan.layers_per_stage, 0][:4]
    assert counts[slow] < min(count for rank, count in enumerate(counts) if rank != slow)
    as_it_was = predict(made.profile_on("abcd", speeds), made.first, made.schedule).step_s
    assert plan.predicted_step_s is not None
    assert plan.predicted_step_s < 0.7 * as_it_was


def test_a_slow_rank_is_remembered_when_another_one_fails() -> None:
    made = job()
    three = cut(made, [1.0, 3.0, 1.0], "abc")
    assert three.layers_per_stage[1] < min(three.layers_per_stage[0], three.layers_per_stage[2])
    assert cut(made, None, "abc").layers_per_stage[1] > three.layers_per_stage[1]
    assert cut(made, [1.0, 3.0, 1.0], "abc") == three


def test_a_pipeline_rank_is_as_slow_as_its_slowest_replica() -> None:
    made = job(ranks=6, replicas=2)
    first, second = ([3.0, *[1.0] * 5], [*[1.0] * 3, 3.0, *[1.0] * 2])
    there, here = cut(made, first, "abcdef"), cut(made, second, "abcdef")
    assert there.layers == here.layers
    assert there.layers_per_stage[0] < min(there.layers_per_stage[1:])
    assert there.predicted_step_s == here.predicted_step_s


def test_a_job_cut_by_parameters_is_cut_by_times_once_ranks_differ() -> None:
    made = job(partition="parameter", memory_bytes=10**9)
    made = replace(made, profile=profile(4), first=replace(made.first, partition="parameter"))
    counts = cut(made, [1.0, 3.0, 1.0], "abc").layers_per_stage
    assert counts[1] < min(counts[0], counts[2])
    assert "cut by parameter" in cut(made, None, "abc").reason


def test_speeds_that_nearly_agree_share_a_plan_and_answers_are_bounded() -> None:
    made = job()
    assert cut(made, [1.0, 2.0, 1.0, 1.0]) == cut(made, [1.002, 2.01, 0.999, 1.0])
    assert len(made._known) == 1
    replicated = replace(made, first=replace(made.first, version=7))
    assert replicated._known == {}


def test_a_newcomer_pays_where_the_present_ranks_are_slow() -> None:
    made = job(ranks=4)
    now = cut(made, [3.0, 3.0, 3.0], "abc")
    assert pays(made.compared(now, 4, domains="abcd", slowdowns=[3.0, 3.0, 3.0, 1.0]), 100, 0.0)[0]
    with pytest.raises(ValueError, match="4 domains, and 3 slowdowns"):
        made.compared(now, 4, domains="abcd", slowdowns=[3.0, 3.0, 3.0])
