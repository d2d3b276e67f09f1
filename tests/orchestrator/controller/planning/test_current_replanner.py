"""A job's plans are made for the copies that are kept now, and none that is out of date."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from process_hosts import ElasticJob
from ray_jobs import resolved
from small_replanner import FIRST, TIGHT, profiled, replanner
from tiny_jobs import tiny

from orchestrator.controller.planning.current_replanner import CurrentReplanner
from orchestrator.controller.planning.precomputed_plans import PrecomputedPlans
from orchestrator.lifecycle.effects import MakePlan, PlanAhead
from orchestrator.lifecycle.recovery import RecoveryPlan
from orchestrator.lifecycle.stimuli import PlanReady, Unplannable
from planner.adapt.speeds import RankSlowdowns
from planner.plan import Plan, PlanError
from planner.search.replan import Replanner
from planner.shards import Piece
from workers.actor import Home


def plan_for_one(planning: CurrentReplanner) -> Plan:
    return planning.replanner.plan_for(1, epoch=1, version=2, reason="", domains=["a"])[0]


def test_what_was_planned_before_a_change_does_not_hold_after_it() -> None:
    changes: list[str] = []
    planning = CurrentReplanner(replanner(profiled()), lambda: changes.append("again"))
    assert plan_for_one(planning).world_size == 1
    before = planning.replanner
    planning.set_freezing(method="apf")
    with pytest.raises(PlanError, match="no plan for 1 rank"):
        plan_for_one(planning)
    # A thread that plans with the earlier one goes on with it.
    assert before.plan_for(1, epoch=1, version=2, reason="", domains=["a"])[0].world_size == 1
    planning.set_freezing(method="none")
    assert plan_for_one(planning).world_size == 1
    assert len(changes) == 2


def test_plans_count_on_the_layers_that_are_frozen_now() -> None:
    changes: list[str] = []
    planning = CurrentReplanner(replanner(profiled()), lambda: changes.append("again"))
    before = planning.replanner.profile_on(["a", "b"])
    planning.set_freezing(frozen=(2, 0, 0))
    assert planning.replanner.profile_on(["a", "b"]).model == before.with_prefix(2).model
    assert planning.of((0, 1)).frozen == 2
    planning.set_freezing(method="apf")
    assert planning.replanner.frozen == 2
    planning.set_freezing(frozen=(2, 0, 2))
    of = planning.replanner.profile_on(["a", "b"]).model.layers
    assert [layer.kept_s for layer in of[:2]] == [layer.forward_s for layer in before.model.layers[:2]]
    planning.set_freezing(frozen=(0, 0, 0))
    planning.set_freezing(frozen=(0, 0, 0))
    planning.set_pipelines(pipelines=1)
    assert planning.replanner.pipelines == 1
    planning.set_pipelines(pipelines=0)
    assert planning.replanner.pipelines is None
    assert len(changes) == 6


def test_what_changes_nothing_keeps_the_plans() -> None:
    changes: list[str] = []
    for profile in (profiled(), None):
        planning = CurrentReplanner(replanner(profile), lambda: changes.append("again"))
        before = planning.replanner
        planning.set_freezing(method="none")
        planning.set_freezing(method="timelyfreeze")
        assert planning.replanner is before
    assert not changes


def test_a_recovery_is_planned_with_what_holds_by_then() -> None:
    planning = CurrentReplanner(replanner(profiled()))
    plans = PrecomputedPlans(planning)
    loss = RecoveryPlan(cause="loss", reason="rank 1 failed", lineup=(0,), step=4)
    effect = MakePlan(recovery_plan=loss, first=None, domains={0: "a"}, epoch=1, version=2, round=1)

    async def recover() -> None:
        await plans.look_ahead({0: "a", 1: "b"})
        assert isinstance(await plans.make(effect), PlanReady)
        planning.set_freezing(method="apf")
        assert isinstance(await plans.make(effect), Unplannable)

    asyncio.run(recover())


def test_plans_ahead_end_with_the_membership_that_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a rank is lost, and once the others are planned for, the machine has something better to do."""
    planning = CurrentReplanner(replanner(profiled()))
    plans = PrecomputedPlans(planning)
    domains = {0: "a", 1: "a", 2: "b", 3: "c", 4: "c"}
    loss = RecoveryPlan(cause="loss", reason="rank 4 failed", lineup=(0, 1, 2, 3), step=4)
    effect = MakePlan(recovery_plan=loss, first=None, domains=domains, epoch=1, version=2, round=1)
    there = dict(domains)
    made: list[str] = []

    async def look() -> list[str]:
        made.clear()
        await plans.look_ahead(domains, lambda: there)
        return [*made]

    def plan_for(self: Replanner, ranks: int, *, reason: str, **told: object) -> tuple[Plan, None]:
        made.append(reason or "ahead")
        if len(made) == 2 and not reason:
            meanwhile()
        return FIRST, None

    def lose_one() -> None:
        there.pop(4, None)

    def plan_for_the_others() -> None:
        asyncio.run_coroutine_threadsafe(plans.make(effect), loop).result()

    monkeypatch.setattr(Replanner, "plan_for", plan_for)
    loop, meanwhile = asyncio.new_event_loop(), lambda: None
    try:
        assert loop.run_until_complete(look()) == ["ahead"] * 5
        meanwhile = lose_one
        assert loop.run_until_complete(look()) == ["ahead"] * 2
        there.update(domains)
        meanwhile = plan_for_the_others
        assert loop.run_until_complete(look()) == ["ahead", "ahead", "rank 4 failed"]
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("memory_bytes", [TIGHT, 10**9])
def test_layers_whose_copies_are_in_host_memory_are_built_ahead_where_they_fit(
    on_host: bool, memory_bytes: int
) -> None:
    plans = PrecomputedPlans(CurrentReplanner(replanner(profiled(memory_bytes))), on_host=on_host)
    domains = {0: "a", 1: "b"}
    effect = PlanAhead(now=FIRST, members=(0, 1), lineup=(0,), domains=domains, reason="", number=1)
    ahead = asyncio.run(plans.plan_ahead(effect))
    assert ahead.copying is not None
    fits = memory_bytes > TIGHT
    assert ahead.building == ({0: (Piece(2), Piece(3))} if on_host and fits else {})
    assert bool(ahead.why) == (on_host and not fits)


def test_a_change_while_ranks_train_has_plans_made_ahead_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, tuple[float | None, ...]]] = []
    monkeypatch.setattr(
        Replanner, "plan_for", lambda self, ranks, **told: made.append((ranks, told["slowdowns"]))
    )

    async def change() -> None:
        job = ElasticJob(resolved(tiny(tmp_path, "ahead", pipeline={"ranks": 2})))
        planning = job.runtime.planning
        planning.set_speeds(
            known=RankSlowdowns(((0, 1.5), (1, 1.5)))
        )  # before they train there is nothing to look ahead to
        await asyncio.sleep(0.05)
        assert made == []
        for rank, node in enumerate(("a", "b")):
            job.runtime.living.homes[rank] = Home(node=node, host="h", pid=1)
            job.runtime.living.training[rank] = asyncio.get_running_loop().create_future()
        planning.set_speeds(known=RankSlowdowns(((0, 2.0), (1, 2.0))))
        planning.set_speeds(known=RankSlowdowns(((0, 3.0), (1, 3.0))))
        await asyncio.sleep(0.1)
        await job.loop.close()
        # None by speeds that did not hold any more. One for each look: whatever fails, what is left is alike.
        assert made == [(1, (3.0,))] * 2

    asyncio.run(change())
