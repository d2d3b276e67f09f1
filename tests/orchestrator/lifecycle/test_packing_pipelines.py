"""Layers that are frozen or thawed while a job trains: another layout is weighed once, and formed if it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import Job, order_of, plan_of, position, recovered, switch_report, train

from orchestrator.events.types import LayoutWeighed
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.lifecycle.effects import Ask, LogRegroup, MakePlan, PlanAhead, Switch, Weigh
from orchestrator.lifecycle.recovery import PACKED
from orchestrator.lifecycle.states import Order
from orchestrator.lifecycle.stimuli import Departed, PlannedAhead, Positioned, Reported, Weighed
from planner.arrivals import copied_ahead
from planner.plan import Plan
from planner.schedule.registry import build
from workers.config import ElasticConfig
from workers.protocol.carried import Carried
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.orders import CheckpointRef, Request
from workers.protocol.reports import ActivationsKept, Parted, PrefixFrozen, StandbyReport

ORDER = order_of(4, layers=8, packs=True, elastic=ElasticConfig(wait_s=60, grow=False))
ORDER = replace(ORDER, plan=replace(ORDER.plan, replicas=2, pipelines=1))
THEN = plan_of(2, 8, replicas=2, pipelines=2)
FROZEN = PrefixFrozen(step=5, layers=4, bound=3.0, norms=(1.0,) * 8, names=("a", "b", "c", "d"))
REGROUP = Ask(Request.REGROUP, 0)


def weighed(job: Job) -> list[Weigh]:
    return [effect for effect in job.without_logs if isinstance(effect, Weigh)]


def training(order: Order = ORDER) -> Job:
    return train(Job(order))


def test_a_frozen_prefix_has_another_layout_weighed_once() -> None:
    job = training().take(Reported(FROZEN), Reported(FROZEN))
    (asked,) = weighed(job)
    assert asked.ranks == (0, 1, 2, 3)
    assert asked.now == ORDER.plan
    assert asked.prefix == 5
    job.take(Weighed(False, "nothing is saved", asked.round, asked.prefix))
    assert weighed(job) == [asked]
    assert LayoutWeighed(prefix=5, pays=False, reason="nothing is saved") in job.logged
    job.take(Reported(replace(FROZEN, step=9, layers=5)))
    assert [each.prefix for each in weighed(job)] == [5, 9]


def test_a_prefix_that_moves_while_a_layout_is_weighed_is_weighed_too() -> None:
    job = training().take(Reported(FROZEN))
    (asked,) = weighed(job)
    job.take(Reported(replace(FROZEN, step=6, layers=5)))
    job.take(Weighed(False, "", asked.round, asked.prefix))
    assert weighed(job)[-1].prefix == 6
    job.take(Weighed(False, "", asked.round, 6))
    assert [each.prefix for each in weighed(job)] == [5, 6, 6]


def test_layouts_are_weighed_again_once_outputs_of_frozen_layers_are_kept() -> None:
    job = training().take(Reported(FROZEN))
    job.take(Weighed(False, "", weighed(job)[-1].round, 5))
    told = ActivationsKept(step=6, rank=0, layers=4, read_s=0.001, computed_s=0.01)
    job.take(Reported(replace(told, why_not="it draws")), Reported(replace(told, held_out=True)))
    assert len(weighed(job)) == 1
    job.take(Reported(told))
    assert [each.prefix for each in weighed(job)] == [5, 5]
    job.take(Weighed(False, "", weighed(job)[-1].round, 5))
    job.take(Reported(replace(told, rank=2)), Reported(replace(told, step=9, layers=5)))
    assert len(weighed(job)) == 2


def test_what_is_kept_before_the_prefix_is_told_of_waits_for_it() -> None:
    told = ActivationsKept(step=5, rank=0, layers=4, read_s=0.001, computed_s=0.01)
    job = training().take(Reported(told))
    assert weighed(job) == []
    job.take(Reported(FROZEN))
    assert [each.prefix for each in weighed(job)] == [5]


@pytest.mark.parametrize("packs", [True, False])
def test_a_job_whose_layout_stays_weighs_nothing(packs: bool) -> None:
    job = training(replace(ORDER, packs=packs)).take(Reported(FROZEN))
    assert bool(weighed(job)) == packs


def answered(job: Job, then: Plan = THEN) -> PlannedAhead:
    ahead = [effect for effect in job.without_logs if isinstance(effect, PlanAhead)][-1]
    copying = copied_ahead(ahead.now, ahead.members, then, ahead.lineup)
    return PlannedAhead(ahead.number, then, build("1f1b", then.pipeline_ranks, 2, 1), copying)


def test_a_layout_that_pays_is_copied_ahead_and_formed_by_the_same_ranks() -> None:
    job = training().take(Reported(FROZEN))
    job.take(Weighed(True, "it pays", weighed(job)[-1].round, 5))
    ahead = next(effect for effect in job.without_logs if isinstance(effect, PlanAhead))
    assert (ahead.lineup, ahead.reason) == ((0, 1, 2, 3), PACKED)
    assert REGROUP not in job.without_logs
    job.take(answered(job))
    copying = next(effect.plan for effect in reversed(job.without_logs) if isinstance(effect, Switch))
    assert copying.layers == ORDER.plan.layers
    job.take(*(Reported(switch_report(place, copying)) for place in range(4)))
    for place in range(4):
        if layers := copying.standbys_of(place):
            told = StandbyReport(step=2, rank=place, layers=layers, bytes=0, seconds=0.0)
            job.take(Reported(told))
    assert job.without_logs[-1] == REGROUP
    number = job.has.progress.round + 1
    job.take(*(Departed(Parted(rank=rank, step=6), number - 1) for rank in range(4)))
    held = {0: (0, 1, 2, 3), 1: (2, 3, 4, 5, 6, 7), 2: (0, 1, 2, 3, 4, 5), 3: (4, 5, 6, 7)}
    job.take(*(Positioned(position(rank, 6, of), number) for rank, of in held.items()))
    recovered(job, THEN, (0, 1, 2, 3))
    formed = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (formed.cause, formed.lost, formed.joined) == ("pack", (), ())
    assert PACKED in formed.reason
    assert job.has.progress.plan.pipeline_count == 2
    assert len(weighed(job)) == 1


def test_ranks_that_packing_frees_stay_for_the_next_layout() -> None:
    job = training().take(Reported(FROZEN))
    job.take(Weighed(True, "", weighed(job)[-1].round, 5))
    one = plan_of(2, 8, replicas=2, pipelines=1)
    job.take(replace(answered(job, one), copying=None, why="no room for copies"))
    number = job.has.progress.round + 1
    job.take(*(Departed(Parted(rank=rank, step=6), number - 1) for rank in range(4)))
    job.take(*(Positioned(position(rank, 6, (2 * rank, 2 * rank + 1)), number) for rank in range(4)))
    recovered(job, one, (0, 1))
    assert job.has.membership.members == (0, 1)
    assert job.has.membership.idle == {2, 3}
    job.take(Reported(replace(FROZEN, step=9, layers=6)))
    assert weighed(job)[-1].ranks == (0, 1, 2, 3)


def test_a_resumed_job_weighs_the_prefix_that_it_resumes_with() -> None:
    start = CheckpointRef(path="/8", step=8)
    history = FreezeHistory(prefixes=(FROZEN, replace(FROZEN, step=20, layers=6)))
    job = training(replace(ORDER, checkpoints=(start,), freezing=history))
    assert [each.prefix for each in weighed(job)] == [5]
    before = training(replace(ORDER, checkpoints=(replace(start, step=3),), freezing=history))
    assert not weighed(before)


def frozen_now(layers: int) -> Carried:
    return Carried(prefix=FrozenPrefix(layers=layers))


def at_six(job: Job, carried: Carried, *, thawed: bool) -> Job:
    """All ranks leave after step 6, and tell where they stand."""
    number = job.has.progress.round
    job.take(*(Departed(Parted(rank=rank, step=6, thawed=thawed), number) for rank in range(4)))
    where = (position(rank, 6, (2 * rank, 2 * rank + 1), carried=carried) for rank in range(4))
    return job.take(*(Positioned(each, number + 1) for each in where))


def test_ranks_that_leave_as_layers_thaw_get_a_plan_that_trains_them() -> None:
    job = training(replace(ORDER, plan=replace(ORDER.plan, frozen=4)))
    at_six(job, frozen_now(2), thawed=True)
    recovered(job, ORDER.plan, (0, 1, 2, 3))
    made = [effect.recovery_plan for effect in job.without_logs if isinstance(effect, MakePlan)][-1]
    assert made.carried == frozen_now(2)
    formed = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (formed.cause, formed.step, formed.lost) == ("pack", 6, ())
    assert PACKED in formed.reason
    assert job.has.progress.failures == 0


@pytest.mark.parametrize(("layers", "taken"), [(3, False), (4, True)])
def test_a_layout_that_was_made_ahead_is_dropped_if_layers_have_thawed_since(
    layers: int, taken: bool
) -> None:
    job = training().take(Reported(FROZEN))
    job.take(Weighed(True, "", weighed(job)[-1].round, 5))
    then = replace(THEN, frozen=4)
    job.take(replace(answered(job, then), copying=None, why="no room for copies"))
    before = len([effect for effect in job.without_logs if isinstance(effect, MakePlan)])
    at_six(job, frozen_now(layers), thawed=False)
    recovered(job, ORDER.plan, (0, 1, 2, 3))
    made = len([effect for effect in job.without_logs if isinstance(effect, MakePlan)]) - before
    assert made == (not taken)
    assert (job.has.progress.plan.frozen == 4) == taken
