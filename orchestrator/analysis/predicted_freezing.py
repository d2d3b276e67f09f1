"""Predicts the time of a step with freezing: combines the monitored times of its actions by the solved ratios and
simulates them. Pure: a job's view in, predictions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from orchestrator.history.freeze_history import observation
from orchestrator.history.job_view import JobView
from orchestrator.history.phase_bands import phases_of
from orchestrator.pictures.heat_map import Shares
from planner.freeze.monitoring import Bounds, Observation, measure
from planner.freezing import Budget, Phases, is_reference
from planner.ir import FREEZABLE, Action, Program, Schedule
from planner.plan import Plan
from planner.schedule.passes import repeat
from planner.schedule.table_format import frozen_prefix
from planner.schedule.validate import ScheduleError, validate
from planner.simulation.simulate import Costs, Simulation, simulate
from workers.protocol.reports import TimelineReport

Ranks = Mapping[int, TimelineReport]
"""Rank -> its timeline of one step."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The schedule that one pipeline ran in a step."""

    window: Schedule
    """Schedule of one replica."""
    windows: int
    """Number of windows in a row: one for each of the pipeline's replicas."""

    @cached_property
    def whole(self) -> Schedule:
        """All windows, with consecutive microbatch numbers."""
        return self.window if self.windows == 1 else repeat(self.window, self.windows)


@dataclass(frozen=True, kw_only=True)
class PredictedFreezing:
    """The steps of one pipeline after its monitoring phase."""

    ran: Ran
    """Schedule of the newest step."""
    windows: Mapping[int, int]
    """Generation -> windows in a row, from the number of its ranks."""
    phases: Phases
    r_max: Budget
    bounds: Bounds
    ratios: Shares
    start: int | None
    """The first step that follows the ratios."""
    spread: float
    """Mean step over a step in which every draw takes its expectation."""
    confirmed: float
    """Share of the simulated saving that the monitored steps show."""

    def share(self, step: int) -> float:
        """The share of the ratios that `step` > T_m applies: 0 until the commit that adopted them, which may be late
        or never come."""
        if self.start is None or step < self.start or is_reference(step, self.phases, self.r_max):
            return 0.0
        return self.phases.share(step)

    def frozen(self, share: float) -> Shares:
        return [(stage, microbatch, share * ratio) for stage, microbatch, ratio in self.ratios]

    def simulate(self, share: float, windows: int | None = None) -> Simulation:
        """Simulate all windows of a step, with consecutive microbatch numbers; every draw takes its expectation.

        Args:
            windows: number of windows; None: as many as in the newest step.
        """
        whole = self.ran.whole if windows is None else repeat(self.ran.window, windows)
        costs = _interpolated(whole, self.ran.window.microbatches, self.bounds, self.frozen(share))
        return simulate(whole, costs)

    def step_s(self, share: float, windows: int | None = None) -> float:
        """Mean step, including the time outside the windows; see `simulate`."""
        unfrozen_s = self.simulate(0.0, windows).makespan_s
        if share <= 0:
            return unfrozen_s + self.bounds.outside_s
        saved_s = self.confirmed * (unfrozen_s - self.simulate(share, windows).makespan_s)
        return (unfrozen_s - saved_s + self.bounds.outside_s) * self.spread


def predict_freezing(run: JobView) -> PredictedFreezing | None:
    """Predict the steps of `run`; None without a solution, or if the log lacks its times for the current plan."""
    section, solved, plan = run.freeze_section_at(run.step), run.freeze.solved, run.plan
    phases = phases_of(section)
    if phases is None or solved is None or solved.measured_unfrozen_s is None or plan is None:
        return None
    if solved.plan.stages not in ((), plan.layers):
        return None
    newest_first = (run.measured[step] for step in sorted(run.measured, reverse=True))
    try:
        ran = next((found for ranks in newest_first if (found := ran_in(plan, ranks))), None)
        if ran is None:
            return None
        bounds = measure(ran.window, phases, observations(run.measured.values()))
    except ValueError:
        # The times are of a plan that a resume has changed since, or not of every action.
        return None
    return PredictedFreezing(
        ran=ran,
        windows=_windows(run, plan),
        phases=phases,
        r_max=section.get("r_max", 0.0),
        bounds=bounds,
        ratios=solved.ratios,
        start=run.freeze.start,
        spread=solved.spread or 1.0,
        confirmed=solved.confirmed,
    )


def ran_in(plan: Plan, ranks: Ranks) -> Ran | None:
    """Schedule that the first pipeline ran, from its own spans, because a user's own table is no longer available. None
    if they are not whole windows of `plan`."""
    programs: list[Program] = []
    windows: set[int] = set()
    for rank in range(plan.pipeline_ranks):
        actions = tuple(Action.parse(span.action) for span in ranks[rank].spans) if rank in ranks else ()
        times = actions.count(actions[0]) if actions else 1
        window = actions[: len(actions) // times]
        if not window or window * times != actions:
            return None
        programs.append(window)
        windows.add(times)
    if len(windows) != 1:
        return None
    window = _window(plan.schedule, plan.stages, plan.microbatches, tuple(programs))
    return None if window is None else Ran(window=window, windows=windows.pop())


@lru_cache(maxsize=16)
def _window(name: str, stages: int, microbatches: int, programs: tuple[Program, ...]) -> Schedule | None:
    """The schedule of `programs`; None if it is not a legal one. Cached, as every picture of a step asks for it."""
    schedule = Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        programs=programs,
        frozen_stages=frozen_prefix(programs),
    )
    try:
        validate(schedule)
    except ScheduleError:
        return None
    return schedule


def observations(steps: Iterable[Ranks]) -> list[Observation]:
    """The reports of `steps` as the planner reads them."""
    return [observation(report) for ranks in steps for report in ranks.values()]


def _windows(run: JobView, plan: Plan) -> dict[int, int]:
    """Generation -> windows in a row, assuming pipelines with as many ranks as those of `plan`."""
    pipelines = {
        generation.number: len(generation.members) // plan.pipeline_ranks
        for generation in run.recovery.generations
    }
    return {number: replace(plan, pipelines=count).windows for number, count in pipelines.items() if count}


def _interpolated(schedule: Schedule, microbatches: int, bounds: Bounds, frozen: Shares) -> Costs:
    """Interpolate every action between its longest and shortest time by its ratio (TimelyFreeze eq. 4).

    Args:
        microbatches: microbatches of one window.
    """
    ratios = {(stage, microbatch): ratio for stage, microbatch, ratio in frozen}
    actions = {}
    for program in schedule.programs:
        for action in program:
            longest_s = bounds.upper.of_action(action)
            if action.kind in FREEZABLE:
                shortest_s = bounds.lower.of_action(action)
                longest_s -= ratios.get((action.stage, action.index % microbatches), 0.0) * (
                    longest_s - shortest_s
                )
            actions[action] = longest_s
    return Costs(seconds={}, communication_s=bounds.upper.communication_s, actions=actions)
