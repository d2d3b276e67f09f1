"""The controller's side of freezing by plan: gathers what the planner needs, and asks it once what to freeze.

Without an answer the job trains on as it is.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.planning.planner_process import PlannerGone, PlannerProcess
from orchestrator.controller.requests.freezing_in_force import GRACE_STEPS, open_question
from orchestrator.events.types import Event, FreezeSolved, Warned
from orchestrator.history.freeze_history import FreezeHistory, cut, observation
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.states import Order
from orchestrator.lifecycle.stimuli import Noted, Solved, Stimulus
from planner.actor import PlannerActor
from planner.freeze.decision import FreezeDecision, FreezeQuestion
from planner.freeze.monitoring import Observation, complete
from planner.freezing import FreezeOverrides, FreezePlan, Phase
from planner.ir import Schedule
from planner.plan import Plan
from workers.protocol.reports import PrefixFrozen, StepReport, TimelineReport

TASK = "freezing"


class PlannerLink:
    """One question of a job to its planner. All methods run on the controller's event loop.

    Args:
        planner: of the job.
        history: what the job has measured so far.
        epoch: of the controller, for its freeze plans.
        post: takes the planner's results.
        version: of the freeze plan.
        control: the settings that the plan carries; None: those of the spec.
    """

    def __init__(
        self,
        planner: PlannerProcess,
        question: FreezeQuestion,
        history: FreezeHistory,
        epoch: int,
        post: Callable[[Stimulus], None],
        *,
        version: int = 1,
        control: FreezeOverrides | None = None,
    ) -> None:
        self._planner = planner
        self._version = version
        self._control = control
        self._question = question
        self._epoch = epoch
        self._post = post
        self._observations: dict[int, dict[int, Observation]] = defaultdict(dict)
        """Step -> rank -> its observation."""
        self._enough = asyncio.Event()
        """Whether monitoring has ended: all ranks' timelines are there, or no more will come."""
        self._prefix = (
            0 if (frozen := history.prefix_after(question.phases.monitoring)) is None else frozen.layers
        )
        """Layers frozen as a whole, as far as it is known."""
        self._answered = False
        for report in history.monitored_with(question.plan):
            self.fold(report)

    def fold(self, event: Event) -> None:
        """Gather what the planner needs of a logged event."""
        phases = self._question.phases
        match event:
            case TimelineReport(step=step) if phases.of(step) in (Phase.UPPER, Phase.LOWER):
                seen = observation(event)
                self._observations[step][seen.rank] = seen
                if self._complete(step):
                    self._enough.set()
            case StepReport(step=step) if step >= phases.monitoring + GRACE_STEPS:
                self._enough.set()
            case PrefixFrozen(layers=layers):
                self._prefix = layers
            case _:
                pass

    def _complete(self, step: int) -> bool:
        """Whether all ranks' timelines are there, up to those of `step`, with which monitoring ends."""
        plan, phases = self._question.plan, self._question.phases
        return complete(self._observations[step].values(), phases, plan.world_size)

    def monitors_with(self, prefix: PrefixFrozen) -> bool:
        """Whether all monitored steps freeze `prefix`, which is the newest, as a whole."""
        return prefix.step <= self._question.phases.warm_up + 1

    def serves(self, plan: Plan) -> bool:
        """Whether its observations or its decision are valid for `plan` too."""
        return self._answered or cut(plan) == cut(self._question.plan)

    def void_after(self, step: int) -> None:
        """Forget observations of later steps: those steps run again."""
        for later in [each for each in self._observations if each > step]:
            del self._observations[later]
        if not any(map(self._complete, self._observations)):
            self._enough.clear()

    async def run(self, step: int) -> None:
        """Have the planner decide once monitoring has ended; `step` steps are committed already."""
        self._planner.keep(TASK, self._otherwise)
        if step >= self._question.phases.monitoring:
            self._enough.set()
        await self._enough.wait()
        seen = tuple(each for ranks in self._observations.values() for each in ranks.values())
        try:
            profile = self._question.profile
            question = replace(
                self._question, profile=None if profile is None else profile.with_prefix(self._prefix)
            )
            decision, solve_s = await self._planner.answer(PlannerActor.solve, question, seen)
            plan = decision.freeze_plan(
                self._question.plan, epoch=self._epoch, version=self._version, control=self._control
            )
            self._post(Solved(solution_of(decision, plan, solve_s)))
        except ValueError as error:
            self._post(Noted(Warned(text=f"{error}; the job trains on with nothing frozen")))
        except PlannerGone as error:
            self._post(Noted(Warned(text=f"no planner answers ({error}): the job {self._otherwise()}")))
        except Exception as error:  # a bug of ours costs the freezing, not the job
            text = f"the planner failed: {type(error).__name__}: {error}; the job {self._otherwise()}"
            self._post(Noted(Warned(text=text)))
        self._answered = True

    def _otherwise(self) -> str:
        return "keeps the freeze ratios it has" if self._answered else "trains on with nothing frozen"


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
        p_eff=decision.p_eff,
        progress=decision.progress,
        energies=decision.energies,
        confirmed=decision.confirmed,
    )


def link_planner(
    planner: PlannerProcess,
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
        plan=plan,
        schedule=schedule,
        phases=freeze.phases,
        r_max=freeze.r_max,
        least_update=freeze.least_update,
        adaptive=setup.config.optimizer.adaptive,
        profile=setup.profile,
    )
    return PlannerLink(
        planner, question, view.freeze_history(), order.epoch, post, version=version, control=control
    )
