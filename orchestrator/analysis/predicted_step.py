"""Predicts the newest measured step by simulation, from other steps of the same run.

With a freeze solution, from the bounds of the monitoring phase and the ratios; otherwise from the mean times of the
other measured steps. Pure: a job's view in, a timeline out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from orchestrator.analysis.predicted_freezing import Ran, Ranks, observations, predict_freezing, ran_in
from orchestrator.history.job_view import MONITORING, JobView
from orchestrator.pictures.heat_map import Shares
from planner.freeze.monitoring import mean_costs, observed_outside_s
from planner.freezing import Phase
from planner.ir import Action, ActionKind
from planner.simulation.simulate import Simulation, TimedAction, simulate
from planner.wording import counted


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """One pipeline's step."""

    timeline: tuple[tuple[TimedAction, ...], ...]
    """Per rank, all windows of the step, with the action names of measured steps. Begins when measured steps begin
    their first action, after the first batch was read."""
    step_s: float
    """Including the time outside the window: first batch, exchange, commit, update."""
    frozen: Shares
    """Planned shares of weight-gradient time, as applied in this step."""
    source: str
    """Where the costs come from, for people."""


def predict_newest(run: JobView) -> PredictedStep | None:
    """Predict the step that `run.timelines` measured; None if the log has too little."""
    if run.plan is None or not run.timelines:
        return None
    ran = ran_in(run.plan, run.timelines)
    if ran is None:
        return None
    try:
        return _from_monitoring(run) or _from_others(run, ran)
    except ValueError:
        # The times are of a plan that a resume has changed since.
        return None


def forward_speed(predicted: PredictedStep, ranks: Ranks) -> float:
    """Measured over predicted time of all forwards."""
    foreseen_s = sum(
        span.end_s - span.start_s
        for spans in predicted.timeline
        for span in spans
        if span.action.kind is ActionKind.FORWARD
    )
    measured_s = sum(
        span.end_s - span.start_s
        for rank in range(len(predicted.timeline))
        for span in ranks[rank].spans
        if Action.parse(span.action).kind is ActionKind.FORWARD
    )
    return measured_s / foreseen_s if foreseen_s > 0 else 1.0


def _from_monitoring(run: JobView) -> PredictedStep | None:
    step, freezing = max(run.measured), predict_freezing(run)
    if freezing is None or freezing.phases.of(step) not in (Phase.RAMP, Phase.STABLE):
        return None
    phases, share = freezing.phases, freezing.share(step)
    monitored = [
        ranks for step, ranks in run.measured.items() if phases.of(step) in MONITORING and _timed(ranks)
    ]
    return PredictedStep(
        timeline=_shifted(freezing.simulate(share), freezing.ran, monitored),
        step_s=freezing.step_s(share),
        frozen=freezing.frozen(share),
        source=f"from the times of the monitoring phase, steps {phases.warm_up + 1:,} to {phases.monitoring:,}",
    )


def _shifted(
    simulation: Simulation, ran: Ran, measured: Sequence[Ranks]
) -> tuple[tuple[TimedAction, ...], ...]:
    begin_s = median(min(report.spans[0].start_s for report in ranks.values()) for ranks in measured)
    count = ran.window.microbatches
    return tuple(
        tuple(
            TimedAction(
                replace(span.action, index=span.action.index % count),
                begin_s + span.start_s,
                begin_s + span.end_s,
            )
            for span in spans
        )
        for spans in simulation.timeline
    )


def _timed(ranks: Ranks) -> bool:
    return all(report.spans for report in ranks.values())


def _from_others(run: JobView, ran: Ran) -> PredictedStep | None:
    newest = max(run.measured)
    others = {step: ranks for step, ranks in run.measured.items() if step != newest and _timed(ranks)}
    if not others or run.phases:
        return None
    costs = mean_costs(ran.window, observations(others.values()))
    simulation = simulate(ran.whole, costs)
    outside_s = median(observed_outside_s(observations([ranks])) for ranks in others.values())
    return PredictedStep(
        timeline=_shifted(simulation, ran, list(others.values())),
        step_s=simulation.makespan_s + outside_s,
        frozen=(),
        source=f"from the mean times of {counted(len(others), 'earlier measured step')}",
    )
