"""The freeze program is solved again for other times and layers: each request is answered, by one solution for what is
true then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event as Gate
from typing import Any

import pytest
from bare_controller import controller_of, told
from eventful_run import migrated
from lifecycle_jobs import SOLUTION

from orchestrator.commands.freeze import Freeze
from orchestrator.controller.actor import Controller
from orchestrator.controller.freeze import freeze_control
from orchestrator.controller.freeze.freeze_watch import Costly
from orchestrator.events.types import Formed, Record, Warned
from orchestrator.lifecycle.states import Training
from orchestrator.lifecycle.stimuli import Solved
from planner.adapt.speeds import RankSlowdowns
from planner.freeze.decision import FreezeDecision, FreezeQuestion, decide
from planner.freezing import FreezePlan
from planner.simulation.slow_links import SlowLink
from workers.protocol.orders import Generation
from workers.protocol.reports import FreezeStarted, PrefixFrozen

FREEZE = {"method": "timelyfreeze", "r_max": 0.5, "warm_up": 2, "monitoring": 6, "ramp": 10}
MOVED = migrated(19)


class Solver:
    """Takes the place of the freeze program's solver: counts the questions, and answers them when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[FreezeQuestion] = []
        self.begun, self.may_answer = Gate(), Gate()
        monkeypatch.setattr(freeze_control, "decide", self._decide)

    def _decide(self, question: FreezeQuestion, observations: object) -> FreezeDecision:
        self.asked.append(question)
        self.begun.set()
        assert self.may_answer.wait(30)
        return decide(question, ())

    def slowdowns(self) -> list[tuple[int, ...]]:
        """Of the ranks, for which each question was asked; plans are made for rounded ones."""
        found: list[tuple[int, ...]] = []
        for question in self.asked:
            assert question.profile is not None
            found.append(tuple(round(device.slowdown) for device in question.profile.cluster.devices))
        return found


def run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[Controller, Solver, list[Solved]], Coroutine[Any, Any, None]],
    policy: str,
    freeze: Mapping[str, object] = FREEZE,
) -> None:
    """Have a job check that freezes a half of everything in its stable phase."""
    solver, solved = Solver(monkeypatch), list[Solved]()

    async def inside() -> None:
        async with controller_of(
            folder,
            monkeypatch,
            memory_bytes=10**9,
            freeze=freeze,
            job={"steps": 100},
            adapt={"policy": policy},
        ) as (_, controller):
            state = controller._loop.state
            assert isinstance(state, Training)
            plan = state.job.progress.plan
            ratios = ((0.5,) * plan.microbatches,) * plan.layers[-1][1]
            half = FreezePlan(epoch=1, version=1, ratios=ratios, start=7)
            controller._view.step = 20
            controller._view.fold(Record(time_s=1.0, event=FreezeStarted(plan=half)))

            async def post_and_wait(stimulus: object) -> None:
                assert isinstance(stimulus, Solved)
                solved.append(stimulus)
                controller._record(stimulus.solution)

            monkeypatch.setattr(controller._loop, "post_and_wait", post_and_wait)
            await check(controller, solver, solved)

    asyncio.run(inside())


async def answered(controller: Controller) -> None:
    """Wait until nothing is being solved."""
    solving = controller._freezing._solving
    assert solving is not None
    await solving


@pytest.mark.parametrize("policy", ["off", "measured"])
def test_a_move_whoever_asked_for_it_has_the_freeze_program_solved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    async def check(controller: Controller, solver: Solver, solved: list[Solved]) -> None:
        solver.may_answer.set()
        controller._record(MOVED)
        await answered(controller)
        (one,) = solved
        state = controller._loop.state
        assert isinstance(state, Training)
        assert one.solution.plan.stages == state.job.progress.plan.layers

    run(tmp_path, monkeypatch, check, policy)


def test_what_changes_while_the_program_is_solved_has_it_solved_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller, solver: Solver, solved: list[Solved]) -> None:
        known = controller._runtime.planning
        controller._freezing.solve_again()
        await asyncio.to_thread(solver.begun.wait, 30)
        known.set_speeds(known=RankSlowdowns(((0, 1.0), (1, 2.0))))
        controller._freezing.solve_again()
        known.set_speeds(known=RankSlowdowns(((0, 1.0), (1, 3.0))))
        controller._freezing.solve_again()
        solver.may_answer.set()
        await answered(controller)
        assert solver.slowdowns() == [(1, 1), (1, 3)]
        # The first solution was void when it was there.
        assert len(solved) == 1

    run(tmp_path, monkeypatch, check, "off")


def test_a_solution_on_its_way_to_the_ranks_is_adopted_before_the_next_is_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller, solver: Solver, solved: list[Solved]) -> None:
        solver.may_answer.set()
        controller._freezing.solve_again()
        await answered(controller)
        (first,) = solved
        known = controller._runtime.planning
        known.set_speeds(known=RankSlowdowns(((0, 3.0), (1, 1.0))))
        controller._freezing.solve_again()
        await answered(controller)
        assert len(solver.asked) == 1
        controller._record(FreezeStarted(plan=replace(first.solution.plan, start=22)))
        await answered(controller)
        assert solver.slowdowns() == [(1, 1), (3, 1)]
        assert [one.solution.plan.version for one in solved] == [1, 2]
        # That one answers all requests.
        controller._record(FreezeStarted(plan=replace(solved[1].solution.plan, start=24)))
        await answered(controller)
        assert len(solver.asked) == 2

    run(tmp_path, monkeypatch, check, "off")


def test_where_the_job_leaves_it_to_us_layers_count_by_the_gradients_of_the_monitored_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the newest solution had them, which are those of the same layers in whatever cut."""

    async def check(controller: Controller, solver: Solver, solved: list[Solved]) -> None:
        solver.may_answer.set()
        newest = controller._view.freeze.newest
        assert newest is not None
        layers = len(newest.ratios)
        energies = (100.0, *(1.0,) * (layers - 1))
        of_monitored = replace(SOLUTION, plan=newest, energies=energies, progress=0.9, confirmed=0.75)
        controller._view.freeze.fold(of_monitored)
        controller._view.freeze.fold(FreezeStarted(plan=newest))
        controller._freezing.solve_again()
        await answered(controller)
        (question,) = solver.asked
        assert (question.r_max, question.least_update) == ("auto", 0.8)
        assert question.energies == energies
        assert question.confirmed == 0.75
        for each in solved:  # solved again and again, it stays known
            assert each.solution.energies == energies
            assert each.solution.confirmed == 0.75
            assert each.solution.progress is not None
            assert each.solution.progress >= 0.8 - 1e-9

    auto = {**FREEZE, "r_max": "auto", "least_update": 0.8}
    run(tmp_path, monkeypatch, check, "off", auto)


def test_the_program_knows_the_links_that_have_become_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller, solver: Solver, solved: list[Solved]) -> None:
        solver.may_answer.set()
        controller._runtime.planning.set_speeds(
            links=(SlowLink(source=0, target=1, latency_s=0.5, bytes_per_s=1e6),)
        )
        controller._freezing.solve_again()
        await answered(controller)
        (question,) = solver.asked
        assert question.profile is not None
        assert question.profile.cluster.link(0, 1).latency_s == 0.5

    run(tmp_path, monkeypatch, check, "measured")


def test_a_bug_in_the_solver_costs_the_solution_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller, solver: Solver, solved: list[Solved]) -> None:
        def fails(*given: object) -> FreezeDecision:
            raise RuntimeError("a bug")

        monkeypatch.setattr(freeze_control, "decide", fails)
        controller._freezing.solve_again()
        await answered(controller)
        assert [event.text for event in told(controller) if isinstance(event, Warned)] == [
            "the freeze program was not solved again (RuntimeError: a bug): what is frozen stays"
        ]

    run(tmp_path, monkeypatch, check, "off")


ABOVE = {**FREEZE, "method": "timelyfreeze+prefix", "prefix": 1}


def test_a_prefix_that_moves_and_a_generation_that_forms_have_the_program_above_it_solved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the prefix is told, which is before the step that it follows; and its solution is logged even where
    ratios stay: it says what else is predicted."""

    async def check(controller: Controller, solver: Solver, solved: list[Solved]) -> None:
        solver.may_answer.set()
        for layers in (2, 1):
            controller._record(PrefixFrozen(step=22, layers=layers, bound=0.0, norms=(), names=()))
            await answered(controller)
            profile = solver.asked[-1].profile
            assert profile is not None
            assert [layer.frozen for layer in profile.model.layers].count(True) == layers
            plan = solved[-1].solution.plan
            controller._record(FreezeStarted(plan=replace(plan, start=22)))
        assert len(solved) == 2
        state = controller._loop.state
        assert isinstance(state, Training)
        generation = Generation(
            number=2, epoch=1, members=(0, 1), store_host="h", store_port=1, timeout_s=1.0
        )
        controller._freezing.fold(Formed(generation=generation, start=None, step=22))
        await answered(controller)
        assert len(solver.asked) == 3

    run(tmp_path, monkeypatch, check, "off", ABOVE)


def test_a_program_that_costs_more_than_it_brings_is_given_up_and_the_prefix_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(controller: Controller, solver: Solver, solved: list[Solved]) -> None:
        asked = list[Freeze]()

        async def change(command: Freeze, **more: object) -> str:
            asked.append(command)
            return ""

        monkeypatch.setattr(controller._freezing, "change", change)
        await controller._freezing.freeze_less(Costly("it costs", 0.99))
        assert [each.method for each in asked] == ["prefix"]

    run(tmp_path, monkeypatch, check, "off", {**ABOVE, "r_max": "auto"})
