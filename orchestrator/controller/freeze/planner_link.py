"""The controller's side of the planner: sends it events, asks it what to freeze, replaces it when it dies.

A planner's failure never ends the job or makes a rank wait: without one the job trains on as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.planning.planner_process import LIVES, reason_of, start_planner
from orchestrator.controller.requests.freeze_request import GRACE_STEPS, open_question
from orchestrator.events.types import Event, FreezeSolved, PlannerStarted, Warned
from orchestrator.history.freeze_history import FreezeHistory, cut, observation
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.states import Order
from orchestrator.lifecycle.stimuli import Noted, Solved, Stimulus
from planner.actor import PlannerActor, PlannerHome
from planner.freeze.decision import FreezeDecision, FreezeQuestion
from planner.freeze.monitoring import Observation
from planner.freezing import Control, FreezePlan, Phase
from planner.ir import Schedule
from planner.plan import Plan
from workers.protocol import StepReport, TimelineReport


class PlannerLink:
    """One job's planner, whichever process it lives in. All methods run on the controller's event loop.

    Args:
        history: what the job has measured so far.
        epoch: of the controller, for its freeze plans.
        post: takes the planner's results.
        version: of the freeze plan.
        control: the settings that the plan carries; None: those of the spec.
    """

    def __init__(
        self,
        question: FreezeQuestion,
        history: FreezeHistory,
        epoch: int,
        post: Callable[[Stimulus], None],
        *,
        version: int = 1,
        control: Control | None = None,
    ) -> None:
        self._version = version
        self._control = control
        self._question = question
        self._epoch = epoch
        self._post = post
        self._observations: dict[tuple[int, int], Observation] = {}
        self._actor: Any = None
        self._answered = False
        self._waits = True
        """Whether the planner waits for timelines of all ranks to the end of monitoring."""
        for report in history.monitored_with(question.plan):
            self.take(report)

    def take(self, event: Event) -> None:
        """Pass on what the planner needs of a logged event, and keep it for the next planner."""
        phases = self._question.phases
        match event:
            case TimelineReport(step=step) if phases.of(step) in (Phase.UPPER, Phase.LOWER):
                seen = observation(event)
                self._observations[seen.step, seen.rank] = seen
                if self._actor is not None:
                    self._actor.observe.remote((seen,))
            case StepReport(step=step) if self._waits and step >= phases.monitoring + GRACE_STEPS:
                self._waits = False
                if self._actor is not None:
                    self._actor.enough.remote()
            case _:
                pass

    def serves(self, plan: Plan) -> bool:
        """Whether its observations or its decision are valid for `plan` too."""
        return self._answered or cut(plan) == cut(self._question.plan)

    def void_after(self, step: int) -> None:
        """Forget observations of later steps: those steps run again."""
        self._observations = {key: seen for key, seen in self._observations.items() if seen.step <= step}

    async def run(self, step: int) -> None:
        """Keep a planner running until cancelled; `step` steps are committed already."""
        self._waits = self._waits and step < self._question.phases.monitoring
        try:
            for life in range(1, LIVES + 1):
                try:
                    await self._live(life)
                except RayError as error:
                    self._drop()
                    self._warn(f"the planner died: {reason_of(error)}{self._consequence(life)}")
        except Exception as error:  # a bug of ours costs the freezing, not the job
            self._warn(f"the planner failed: {type(error).__name__}: {error}{self._consequence(LIVES)}")
        finally:
            self._drop()

    async def _live(self, life: int) -> None:
        """Run one planner up to the error that ends it."""
        actor = start_planner(PlannerActor, self._question)
        self._actor = actor
        # Awaited: calls may arrive out of order, and a solution must use all observations.
        await actor.observe.remote(tuple(self._observations.values()))
        home: PlannerHome = await actor.home.remote()
        self._post(Noted(PlannerStarted(life=life, node=home.node, pid=home.pid)))
        if not self._answered:
            try:
                decision, solve_s = await actor.solve.remote(wait=self._waits)
            except RayTaskError as error:
                self._warn(f"{error.cause}; the job trains on with nothing frozen")
            else:
                plan = decision.freeze_plan(
                    self._question.plan, epoch=self._epoch, version=self._version, control=self._control
                )
                self._post(Solved(solution_of(decision, plan, solve_s)))
            self._answered = True
        await actor.stay.remote()

    def _consequence(self, life: int) -> str:
        if life < LIVES:
            return "; another one takes its place"
        kept = "keeps the freeze ratios it has" if self._answered else "trains on with nothing frozen"
        return f"; no other is started, and the job {kept}"

    def _drop(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None

    def _warn(self, text: str) -> None:
        self._post(Noted(Warned(text=text)))


def solution_of(decision: FreezeDecision, plan: FreezePlan, solve_s: float) -> FreezeSolved:
    """Return `decision`, which took `solve_s` seconds, as the event that precedes its `plan`."""
    solution, bounds = decision.solution, decision.bounds
    return FreezeSolved(
        plan=plan,
        ratios=solution.ratios,
        unfrozen_s=solution.unfrozen_s,
        solved_s=solution.solved_s,
        all_frozen_s=solution.all_frozen_s,
        outside_s=bounds.outside_s,
        measured_unfrozen_s=bounds.upper_step_s,
        measured_all_frozen_s=bounds.lower_step_s,
        kappa=decision.kappa,
        mean_per_stage=solution.mean_per_stage,
        duals=solution.duals,
        critical=tuple(str(action) for action in solution.critical),
        solve_s=solve_s,
        spread=decision.spread,
    )


def link_planner(
    order: Order,
    setup: ControllerConfig,
    plan: Plan,
    schedule: Schedule,
    post: Callable[[Stimulus], None],
    *,
    view: JobView,
    version: int,
) -> PlannerLink | None:
    """Return the link to the planner of a job that trains with `plan`; None if no planner is needed.

    Args:
        view: of the whole log.
        version: of the freeze plan that the planner's answer becomes.
    """
    if order.freezing.replayed or (found := open_question(setup.config.freeze, view)) is None:
        return None
    freeze, control = found
    assert freeze.phases is not None, "only a method with a freeze program has a question"
    question = FreezeQuestion(
        plan=plan, schedule=schedule, phases=freeze.phases, r_max=freeze.r_max, profile=setup.profile
    )
    return PlannerLink(question, view.freeze_history(), order.epoch, post, version=version, control=control)
