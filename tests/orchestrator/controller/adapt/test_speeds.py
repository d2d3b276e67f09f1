"""What a controller does with observed step times: it learns, tells, decides, remembers, and ignores what makes no
sense."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bare_controller import PARAMETERS, controller_of, told
from planner_beside import PlannerBeside

from orchestrator.controller.actor import Controller
from orchestrator.controller.adapt.adaptation import SOONEST_STEPS, Adaptation, live_start
from orchestrator.controller.requests.freezing_in_force import GRACE_STEPS
from orchestrator.events.types import (
    Adapted,
    FreezeChanged,
    Issued,
    LayersTimed,
    Record,
    SpeedsChanged,
    Warned,
)
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.migration import Migration, RequestedMove
from orchestrator.lifecycle.states import JobData, Training
from orchestrator.lifecycle.stimuli import Solved
from planner.adapt import live
from planner.adapt.past import Past
from planner.adapt.policy import MoveDecision
from planner.adapt.speeds import RankSlowdowns
from planner.freezing import FreezeOverrides, FreezePlan, Phases
from planner.observed import StageTime, StepTimes
from planner.plan import Plan
from planner.repartition import repartition
from planner.repartition.repartition import FoundPlan
from planner.schedule.expand import schedule_after
from workers.protocol.errors import JobError
from workers.protocol.reports import FreezeStarted, MemoryLow

PASS_S = 0.01
"""Of each pass of each layer in the profile made by hand."""
MOVES = MoveDecision(
    plan=Plan(
        epoch=1,
        version=1,
        reason="",
        layers=((0, 1), (1, 6)),
        stage_ranks=(0, 1),
        schedule="1f1b",
        chunks=1,
        microbatches=4,
        replicas=1,
    ),
    reason="it pays",
    now_s=0.4,
    then_s=0.2,
)
MEASURED: dict[str, Any] = {"adapt": {"policy": "measured"}}
FREEZE = {"method": "timelyfreeze", "r_max": 0.5, "warm_up": 2, "monitoring": 6, "ramp": 10}
FOREST_MISSING = {
    "forest": [
        'adapt.policy = "forest" has no interference model here: the planner goes by measured slowdowns'
    ],
    "measured": [],
}
"""Policy -> what a controller without an interference model warns of."""


def times(controller: Controller, place: int, step: int, factor: float) -> StepTimes:
    """Of a step in which the rank at `place` took `factor` times as long as the profile says."""
    state = controller._loop.state
    assert isinstance(state, Training)
    plan, members = state.job.progress.plan, state.job.membership.members
    layers = plan.layers_per_stage[place]
    return StepTimes(
        rank=members[place],
        place=place,
        step=step,
        plan=(plan.epoch, plan.version),
        times=(StageTime(kind="F", stage=place, seconds=4 * PASS_S * layers * factor, count=4),),
        frozen=False,
    )


async def see(controller: Controller, steps: Sequence[int], *factors: float) -> None:
    for step in steps:
        for place, factor in enumerate(factors):
            controller._adaptation.observe([times(controller, place, step, factor)])
            await controller._adaptation.idle()


async def decided_on(controller: Controller) -> None:
    """Wait for the decision under way, if there is one."""
    if controller._adaptation._deciding is not None:
        await controller._adaptation._deciding


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Controller], Any], **sections: Any
) -> None:
    async def inside() -> None:
        async with controller_of(folder, monkeypatch, memory_bytes=10**9, **sections) as (_, controller):
            outcome = check(controller)
            if asyncio.iscoroutine(outcome):
                await outcome

    asyncio.run(inside())


def test_speeds_are_told_once_they_are_complete_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller) -> None:
        await see(controller, range(1, 4), 1.0, 1.0)
        assert not [event for event in told(controller) if isinstance(event, SpeedsChanged)]
        await see(controller, range(4, 10), 1.0, 1.02)
        (first,) = [event for event in told(controller) if isinstance(event, SpeedsChanged)]
        assert (first.changes, [rank for rank, _ in first.slowdowns]) == ((), [0, 1])
        await see(controller, range(10, 13), 1.0, 2.5)
        (second,) = [event for event in told(controller) if isinstance(event, SpeedsChanged)]
        assert second.changes[0].startswith("rank 1 is 2.4")
        assert controller._runtime.planning.known.of((0, 1)) == (pytest.approx(1.0), pytest.approx(2.5))

    run(tmp_path, monkeypatch, check, **MEASURED)


def test_a_decision_waits_for_all_that_ranks_say_of_the_step_in_which_one_became_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller) -> None:
        monkeypatch.setattr(controller._adaptation, "_migrate", nothing_moves)
        await see(controller, range(1, 10), 1.0, 1.0)
        await decided_on(controller)
        told(controller)
        for place in (0, 1, 0, 1):
            step = 10 + len(said) // 2
            controller._adaptation.observe([times(controller, place, step, 2.5)])
            await controller._adaptation.idle()
            await decided_on(controller)
            said.append([event for event in told(controller) if isinstance(event, Adapted)])
        # Both are slow: nothing moves from one to the other.
        assert said[:3] == [[], [], []]
        (adapted,) = said[3]
        assert not adapted.moves
        assert "no cut saves 3%" in adapted.reason
        # A rank that says nothing of that step is not waited for any longer.
        await see(controller, [12, 13], 1.0)
        assert controller._adaptation._deciding is None
        await see(controller, [14], 1.0)
        await decided_on(controller)
        assert [event.moves for event in told(controller) if isinstance(event, Adapted)] == [True]

    said: list[list[Adapted]] = []
    run(tmp_path, monkeypatch, check, **MEASURED)


def test_off_or_without_training_ranks_nothing_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller) -> None:
        await see(controller, range(1, 9), 1.0, 2.0)
        assert told(controller) == []
        assert controller._runtime.planning.known == RankSlowdowns()

    run(tmp_path, monkeypatch, check)


def test_garbage_is_ignored_and_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(controller: Controller) -> None:
        await see(controller, [1], 1.0, 1.0)
        for step in range(2, 20):
            odd = times(controller, 0, step, 1.0)
            nan = replace(odd, times=(replace(odd.times[0], seconds=math.nan),))
            controller._adaptation.observe([nan, replace(odd, rank=1), replace(odd, plan=(0, 99))])
        await controller._adaptation.idle()
        warned = [event.text for event in told(controller) if isinstance(event, Warned)]
        assert len(warned) == 3
        assert "the times of rank 0 in step 2 are ignored: F of stage 0 took nan s" in warned[0]
        assert "rank 1 does not hold place 0" in warned[1]
        assert "rank 0 reports on plan 0.99, which is not in force" in warned[2]
        assert controller._runtime.planning.known == RankSlowdowns()

    run(tmp_path, monkeypatch, check, **MEASURED)


def test_a_decision_waits_for_the_move_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrated: list[Plan] = []

    async def migrate(plan: Plan, decided_for: JobData, mode: object) -> str:
        migrated.append(plan)
        return ""

    async def check(controller: Controller) -> None:
        monkeypatch.setattr(controller._adaptation, "_migrate", migrate)
        state = controller._loop.state
        assert isinstance(state, Training)
        plan = state.job.progress.plan
        move = RequestedMove(plan=plan, schedule=state.job.progress.schedule, mode="live", asked_s=0.0)
        migration = Migration(move=move, path=(plan,), began=0, now=plan)
        busy = replace(state.job, intents=replace(state.job.intents, migration=migration))
        controller._loop.state = replace(state, job=busy)
        await see(controller, range(1, 9), 1.0, 3.0)
        assert not [event for event in told(controller) if isinstance(event, Adapted)]
        controller._loop.state = state
        await see(controller, [9], 1.0, 3.0)
        await decided_on(controller)
        (decided,) = [event for event in told(controller) if isinstance(event, Adapted)]
        assert decided.now_s > decided.then_s
        assert decided.moves
        assert [plan.layers_per_stage for plan in migrated] == [decided.layers]

    run(tmp_path, monkeypatch, check, **MEASURED)


def test_the_cut_stays_while_steps_are_monitored_for_freezing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze = {"method": "timelyfreeze", "r_max": 0.8, "warm_up": 2, "monitoring": 6, "ramp": 10}

    async def check(controller: Controller) -> None:
        monkeypatch.setattr(controller._adaptation, "_migrate", nothing_moves)
        await see(controller, range(1, 12), 1.0, 3.0)
        said = told(controller)
        assert [event for event in said if isinstance(event, SpeedsChanged)]
        assert not [event for event in said if isinstance(event, Adapted)]
        controller._view.step = 6 + GRACE_STEPS
        await see(controller, [12], 1.0, 3.0)
        await decided_on(controller)
        assert [event for event in told(controller) if isinstance(event, Adapted)]
        # A request begins to monitor again.
        control = FreezeOverrides(
            method="timelyfreeze", r_max=0.5, phases=Phases(warm_up=0, monitoring=8, ramp=12)
        )
        plan = FreezePlan(epoch=1, version=9, ratios=(), control=control)
        request = FreezeChanged(from_step=9, method="timelyfreeze", r_max=0.5, by="a test", plan=plan, id="a")
        controller._view.fold(Record(time_s=1.0, event=request))
        await see(controller, range(13, 20), 1.0, 1.0)
        assert controller._adaptation._due
        assert controller._adaptation._deciding is None

    run(tmp_path, monkeypatch, check, freeze=freeze, job={"steps": 100}, **MEASURED)


async def nothing_moves(plan: Plan, decided_for: JobData, mode: object) -> str:
    return ""


def test_a_decision_for_a_job_that_has_changed_moves_nothing_and_is_taken_again_some_steps_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller) -> None:
        state = controller._loop.state
        assert isinstance(state, Training)
        job = state.job
        smaller = replace(job, membership=replace(job.membership, members=(0,), alive=frozenset({0})))
        controller._loop.state = replace(state, job=smaller)
        with pytest.raises(JobError, match="the job's plan or its ranks have changed meanwhile"):
            await controller._reshaping.migrate(job.progress.plan, job)
        other = replace(job.progress.plan, layers=((0, 1), (1, job.progress.plan.layers[-1][1])))
        controller._loop.state = replace(state, job=replace(job, progress=replace(job.progress, plan=other)))
        with pytest.raises(JobError, match="have changed meanwhile"):
            await controller._reshaping.migrate(job.progress.plan, job)

        async def refuses(plan: Plan, decided_for: JobData, mode: object) -> str:
            raise JobError("the job's plan or its ranks have changed meanwhile")

        controller._loop.state = state
        monkeypatch.setattr(controller._adaptation, "_migrate", refuses)
        monkeypatch.setattr(live, "decide", lambda *given, **more: MOVES)
        await see(controller, range(1, 9), 1.0, 3.0)
        await decided_on(controller)
        (decided,) = [event for event in told(controller) if isinstance(event, Adapted)]
        assert (decided.moves, decided.reason) == (
            False,
            "it pays; but the job's plan or its ranks have changed meanwhile",
        )
        await see(controller, range(9, 20), 1.0, 3.0)
        await decided_on(controller)
        assert not [event for event in told(controller) if isinstance(event, Adapted)]
        later = replace(job.progress, step=job.progress.step + SOONEST_STEPS)
        controller._loop.state = replace(state, job=replace(job, progress=later))
        await see(controller, [20], 1.0, 3.0)
        await decided_on(controller)
        assert [event for event in told(controller) if isinstance(event, Adapted)]

    run(tmp_path, monkeypatch, check, **MEASURED)


def test_a_bug_in_a_decision_costs_the_adaptation_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object, **more: object) -> MoveDecision:
        raise ValueError("a bug")

    async def check(controller: Controller) -> None:
        monkeypatch.setattr(live, "decide", fails)
        await see(controller, range(1, 9), 1.0, 3.0)
        await decided_on(controller)
        said = told(controller)
        assert [event.text for event in said if isinstance(event, Warned)] == [
            "the adaptation failed (ValueError: a bug): the job trains on with its cut"
        ]
        await see(controller, range(9, 20), 1.0, 1.0)
        assert told(controller) == []
        assert isinstance(controller._loop.state, Training)

    run(tmp_path, monkeypatch, check, **MEASURED)


def test_with_epochs_the_plan_changes_only_at_their_ends_and_training_stops_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[int, object]] = []

    async def check(controller: Controller) -> None:
        state = controller._loop.state
        assert isinstance(state, Training)

        async def migrate(plan: Plan, decided_for: JobData, mode: object) -> str:
            moved.append((decided_for.progress.step, mode))
            return ""

        monkeypatch.setattr(controller._adaptation, "_migrate", migrate)
        monkeypatch.setattr(live, "decide", lambda *given, **more: MOVES)
        for step in range(1, 70):
            progress = replace(state.job.progress, step=step)
            controller._loop.state = replace(state, job=replace(state.job, progress=progress))
            await see(controller, [step], 1.0, 3.0 if step > 25 else 1.0)
            await decided_on(controller)

    run(tmp_path, monkeypatch, check, adapt={"policy": "epoch", "epoch_steps": 20}, job={"steps": 100})
    assert moved == [(20, "stop"), (40, "stop")]


def test_other_speeds_have_the_freeze_program_solved_again_if_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller) -> None:
        state = controller._loop.state
        assert isinstance(state, Training)
        plan = state.job.progress.plan
        half = FreezePlan(
            epoch=1, version=1, ratios=((0.5,) * plan.microbatches,) * plan.layers[-1][1], start=7
        )
        controller._view.step = 20
        controller._view.fold(Record(time_s=1.0, event=FreezeStarted(plan=half)))
        stays = replace(MOVES, plan=None)
        monkeypatch.setattr(live, "decide", lambda *given, **more: stays)
        solved: list[Solved] = []

        async def post_and_wait(stimulus: object) -> None:
            assert isinstance(stimulus, Solved)
            solved.append(stimulus)

        monkeypatch.setattr(controller._loop, "post_and_wait", post_and_wait)
        await see(controller, range(1, 9), 1.0, 3.0)
        await decided_on(controller)
        solving = controller._freezing._solving
        assert solving is not None
        await solving
        (one,) = solved
        new = one.solution.plan
        assert (new.version, new.stages, new.control) == (1, plan.layers, None)
        slow_rank = 1
        frozen = [sum(new.ratios[layer]) for layer in range(plan.layers[-1][1])]
        # The slow rank's stage is what the step waits for.
        first, stop = plan.layers[slow_rank]
        assert sum(frozen[first:stop]) > 0
        assert one.solution.unfrozen_s > one.solution.solved_s

    run(tmp_path, monkeypatch, check, freeze=FREEZE, job={"steps": 100}, **MEASURED)


def test_other_times_of_layers_have_a_move_decided_on_and_the_freeze_program_solved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[int] = []

    def skewed(controller: Controller, place: int, step: int) -> StepTimes:
        """At the speed that the profile expects, but with more of the time in the forwards."""
        even = times(controller, place, step, 1.0)
        (forward,) = even.times
        backward = replace(forward, kind="B", seconds=1.5 * forward.seconds)
        return replace(even, times=(replace(forward, seconds=1.5 * forward.seconds), backward))

    async def check(controller: Controller) -> None:
        controller._view.step = 20
        stays = replace(MOVES, plan=None)
        monkeypatch.setattr(live, "decide", lambda *given, **more: stays)
        monkeypatch.setattr(controller._adaptation, "_solve_again", lambda: solved.append(1))
        await see(controller, range(1, 9), 1.0, 1.0)
        await decided_on(controller)
        assert len(solved) == 1
        told(controller)
        for step in range(9, 13):
            for place in (0, 1):
                controller._adaptation.observe([skewed(controller, place, step)])
                await controller._adaptation.idle()
        await decided_on(controller)
        said = told(controller)
        assert [event for event in said if isinstance(event, LayersTimed)]
        assert not [event for event in said if isinstance(event, SpeedsChanged)]
        assert [event for event in said if isinstance(event, Adapted)]
        assert len(solved) > 1

    run(tmp_path, monkeypatch, check, freeze=FREEZE, job={"steps": 100}, **MEASURED)


def test_after_layers_have_moved_in_haste_for_want_of_memory_a_move_is_decided_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relieved: list[Plan] = []

    async def relieve(plan: Plan, decided_for: JobData) -> str:
        relieved.append(plan)
        return ""

    async def check(controller: Controller) -> None:
        state = controller._loop.state
        assert isinstance(state, Training)
        plan = state.job.progress.plan
        monkeypatch.setattr(controller._memory, "_migrate", relieve)
        monkeypatch.setattr(controller._adaptation, "_migrate", nothing_moves)
        await see(controller, range(1, 10), 1.0, 1.0)
        await decided_on(controller)
        told(controller)
        await see(controller, [10], 1.0, 1.0)
        assert controller._adaptation._deciding is None
        low = MemoryLow(
            rank=1,
            place=1,
            plan=plan.key,
            step=11,
            left_bytes=0,
            reserve_bytes=PARAMETERS,
            seen_s=1.0,
        )
        controller._record(Issued(plan=plan))
        controller._record(low)
        moving = controller._memory._moving
        assert moving is not None
        await moving
        assert [one.stage_ranks for one in relieved] == [plan.stage_ranks]
        await see(controller, [11], 1.0, 1.0)
        await decided_on(controller)
        assert [event for event in told(controller) if isinstance(event, Adapted)]

    alone = {"elastic": {"redundancy": "checkpoint"}, "model": {"layers": 8}}
    run(tmp_path, monkeypatch, check, **alone, **MEASURED)


def test_without_the_model_that_the_policy_asks_for_the_job_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller) -> None:
        assert controller._setup.forest is None
        controller._adaptation.run()
        await asyncio.sleep(0)
        warned = [event.text for event in told(controller) if isinstance(event, Warned)]
        assert warned == FOREST_MISSING[policy]

    for policy in FOREST_MISSING:
        run(tmp_path / policy, monkeypatch, check, adapt={"policy": policy})


def test_the_program_solved_after_a_move_says_what_the_move_was_decided_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[FoundPlan] = []
    moved: list[Plan] = []
    search = repartition.best

    def best(*given: Any, **more: Any) -> FoundPlan:
        searched.append(search(*given, **more))
        return searched[-1]

    async def migrate(plan: Plan, decided_for: JobData, mode: object) -> str:
        moved.append(plan)
        return ""

    async def check(controller: Controller) -> None:
        state = controller._loop.state
        assert isinstance(state, Training)
        monkeypatch.setattr(repartition, "best", best)
        monkeypatch.setattr(controller._adaptation, "_migrate", migrate)
        plan = state.job.progress.plan
        half = FreezePlan(
            epoch=1, version=1, ratios=((0.5,) * plan.microbatches,) * plan.layers[-1][1], start=7
        )
        controller._view.step = 20
        controller._view.fold(Record(time_s=1.0, event=FreezeStarted(plan=half)))
        await see(controller, range(1, 9), 1.0, 3.0)
        await decided_on(controller)
        (after,), (found,) = moved, searched
        (chosen,) = [choice for choice in found.choices if choice.plan.same_work_as(after)]
        assert chosen.ratios != half.ratios
        solved: list[Solved] = []

        async def post_and_wait(stimulus: object) -> None:
            assert isinstance(stimulus, Solved)
            solved.append(stimulus)

        monkeypatch.setattr(controller._loop, "post_and_wait", post_and_wait)
        schedule = schedule_after(state.job.progress.schedule, after)
        progress = replace(state.job.progress, plan=after, schedule=schedule)
        controller._loop.state = replace(state, job=replace(state.job, progress=progress))
        controller._freezing.solve_again()
        assert controller._freezing._solving is not None
        await controller._freezing._solving
        assert [each.solution.plan.ratios for each in solved] == [chosen.ratios]

    run(tmp_path, monkeypatch, check, freeze=FREEZE, job={"steps": 100}, **MEASURED)


def test_what_would_pay_if_it_lasted_is_decided_again_once_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def too_soon(*given: Any, **more: object) -> MoveDecision:
        *_, forecast = given
        asked.append(forecast.lasting_steps)
        return replace(MOVES, plan=None, too_soon=True)

    async def check(controller: Controller) -> None:
        monkeypatch.setattr(live, "decide", too_soon)
        state = controller._loop.state
        assert isinstance(state, Training)
        for step in range(1, 60):
            progress = replace(state.job.progress, step=step)
            controller._loop.state = replace(state, job=replace(state.job, progress=progress))
            await see(controller, [step], 1.0, 3.0)
            if controller._adaptation._deciding is not None:
                await controller._adaptation._deciding
        # Each time after as long as the speeds have lasted by then.
        assert 3 <= len(asked) <= 6

    run(tmp_path, monkeypatch, check, **MEASURED)


PAST = Past(
    changed=((0, 0), (1, 3)),
    before=((1, 1.0),),
    slow_steps=((20, 2.4), (30, 2.6)),
    fast_steps=((3, 2.5),),
    slower=True,
    factor=2.5,
    watched=((0, 0.02, 3), (1, 0.03, 1)),
)


@pytest.mark.parametrize(("past", "slow_steps"), [(PAST, [20, 30, 4]), (None, [4])])
def test_the_next_controller_knows_what_this_one_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past: Past | None, slow_steps: list[int]
) -> None:
    """Also from a log that does not tell the past."""

    async def check(controller: Controller) -> None:
        known = SpeedsChanged(
            step=5, slowdowns=((0, 1.0), (1, 2.5)), changes=(), lasting_steps=200, since=3, past=past
        )
        controller._record(known)
        planning = controller._runtime.planning
        snapshot = JobView.from_json(controller._view.to_json())
        after = Adaptation(
            controller._setup,
            controller._loop,
            lambda: snapshot,
            planning,
            controller._reshaping.migrate,
            PlannerBeside(
                lambda: live_start(controller._setup, snapshot), controller._loop.post, controller._loop.spawn
            ),
        )
        after.go_on()
        assert planning.known.of((0, 1)) == (1.0, 2.5)
        controller._adaptation = after
        # The first step warms up; from then on one measurement per rank is enough.
        await see(controller, range(6, 9), 1.0, 1.0)
        changed = [event for event in told(controller) if isinstance(event, SpeedsChanged)]
        assert [each.changes[0] for each in changed] == [
            "rank 1 is 2.50 times faster since step 7 (2.50 -> 1.00)"
        ]
        told_past = changed[0].past
        assert told_past is not None
        assert [steps for steps, _ in told_past.slow_steps] == slow_steps
        assert not told_past.slower
        assert told_past.factor == pytest.approx(2.5)
        assert told_past.fast_steps == (() if past is None else past.fast_steps)
        assert dict(told_past.changed)[1] == 7

    run(tmp_path, monkeypatch, check, **MEASURED)
