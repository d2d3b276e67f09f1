"""What a step with freezing takes: the monitored times of its actions, brought together as the solved ratios say, laid
out by the simulator. Pure: a run's record in, predictions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.freeze_history import observation
from orchestrator.phase_bands import phases_of
from orchestrator.run_record import RunRecord
from planner.freezing import Phases
from planner.heat_map import Shares
from planner.ir import FREEZABLE, Action, Schedule
from planner.monitoring import Bounds, Observation, measure
from planner.plan import Plan
from planner.simulate import Costs, Simulation, simulate
from workers.protocol import TimelineReport

Ranks = Mapping[int, TimelineReport]
"""What the ranks did in one step."""


@dataclass(frozen=True, kw_only=True)
class PredictedFreezing:
    """The steps of one pipeline after its monitoring phase."""

    schedule: Schedule
    phases: Phases
    bounds: Bounds
    ratios: Shares
    start: int | None
    """The first step that follows them."""
    spread: float
    """Mean step over one in which every draw takes what is expected of it."""

    def share(self, step: int) -> float:
        """The share of the ratios that `step` > T_m applies: they are followed from the commit that took them up, which
        may come late, or never."""
        return self.phases.share(step) if self.start is not None and self.start <= step else 0.0

    def frozen(self, share: float) -> Shares:
        return [(stage, microbatch, share * ratio) for stage, microbatch, ratio in self.ratios]

    def simulate(self, share: float) -> Simulation:
        """A window in which every draw takes what is expected of it."""
        return simulate(self.schedule, _interpolated(self.schedule, self.bounds, self.frozen(share)))

    def step_s(self, share: float) -> float:
        """Mean step, with what is outside the window."""
        whole_s = self.simulate(share).makespan_s + self.bounds.outside_s
        return whole_s * self.spread if share > 0 else whole_s


def predict_freezing(run: RunRecord) -> PredictedFreezing | None:
    """None where nothing was solved for, or with times that the log does not hold for the plan that stands."""
    phases, solved, plan = phases_of(run.spec.get("freeze", {})), run.freeze.solved, run.plan
    if phases is None or solved is None or solved.measured_unfrozen_s is None or plan is None:
        return None
    if solved.plan.stages not in ((), plan.layers):
        return None
    newest_first = (run.measured[step] for step in sorted(run.measured, reverse=True))
    try:
        schedule = next((found for ranks in newest_first if (found := schedule_of(plan, ranks))), None)
        if schedule is None:
            return None
        bounds = measure(schedule, phases, observations(run.measured.values()))
    except ValueError:
        # Times of a plan that a resume has changed since, or not of every action.
        return None
    return PredictedFreezing(
        schedule=schedule,
        phases=phases,
        bounds=bounds,
        ratios=solved.ratios,
        start=run.freeze.start,
        spread=solved.spread or 1.0,
    )


def schedule_of(plan: Plan, ranks: Ranks) -> Schedule | None:
    """What the first replica ran, from its own spans: a table of the user's own is no longer at hand."""
    if any(rank not in ranks or not ranks[rank].spans for rank in range(plan.pipeline_ranks)):
        return None
    programs = tuple(
        tuple(Action.parse(span.action) for span in ranks[rank].spans) for rank in range(plan.pipeline_ranks)
    )
    return Schedule(name=plan.schedule, stages=plan.stages, microbatches=plan.microbatches, programs=programs)


def observations(steps: Iterable[Ranks]) -> list[Observation]:
    """The reports of `steps` as the planner reads them."""
    return [observation(report) for ranks in steps for report in ranks.values()]


def _interpolated(schedule: Schedule, bounds: Bounds, frozen: Shares) -> Costs:
    """Every action between its longest and its shortest time, as its ratio says (TimelyFreeze eq. 4)."""
    ratios = {(stage, microbatch): ratio for stage, microbatch, ratio in frozen}
    actions = {}
    for program in schedule.programs:
        for action in program:
            longest_s = bounds.upper.of_action(action)
            if action.kind in FREEZABLE:
                shortest_s = bounds.lower.of_action(action)
                longest_s -= ratios.get((action.stage, action.index), 0.0) * (longest_s - shortest_s)
            actions[action] = longest_s
    return Costs(seconds={}, communication_s=bounds.upper.communication_s, actions=actions)
