"""Idle time by cause of a measured step and of its prediction, with the times that the run's profile or its other steps
lead to expect. Pure: a job's view in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.analysis.idle_causes import IdleCauses, idle_causes
from orchestrator.analysis.predicted_freezing import Ran, ran_in
from orchestrator.analysis.predicted_step import PredictedStep
from orchestrator.history.job_view import JobView
from orchestrator.pictures.heat_map import Shares
from orchestrator.pictures.spans import Timeline
from planner.freeze.program import layer_ratios
from planner.plan import Plan
from planner.profile import Profile
from planner.simulation.costs import action_costs
from planner.simulation.simulate import Simulation

EXPECTED_FROM = {
    "profile": "the profile's times",
    "prediction": "the predicted times",
    "step": "each stage's median times in this step",
}
"""Sources of expected times, for people."""


def measured_causes(
    run: JobView,
    profile: Profile | None,
    predicted: PredictedStep | None,
    measured: Timeline,
    frozen: Shares,
) -> tuple[IdleCauses, str] | None:
    """The newest measured step of `run`, and where its expected times come from, in words.

    They come from the profile if it fits, otherwise from the prediction, otherwise from the step itself. None if the
    step did not follow the plan, or a rank's timeline is missing.

    Args:
        frozen: shares of weight-gradient time that its backward passes skipped.
    """
    plan = run.plan
    ran = ran_in(plan, run.timelines) if plan is not None else None
    if plan is None or ran is None or len(measured) % plan.pipeline_ranks:
        return None
    pipelines = len(measured) // plan.pipeline_ranks
    source, expected_s = _expected(profile, predicted, plan, ran, frozen)
    try:
        found = idle_causes(
            ran.whole,
            measured,
            None if expected_s is None else [*expected_s] * pipelines,
        )
    except ValueError:
        # Another pipeline's rank did not report, or reported other actions.
        return None
    return found, EXPECTED_FROM[source]


def predicted_causes(run: JobView, predicted: PredictedStep) -> IdleCauses | None:
    """The prediction of the newest measured step: it expects its own times. None if it did not follow the plan."""
    ran = ran_in(run.plan, run.timelines) if run.plan is not None else None
    if ran is None:
        return None
    return idle_causes(ran.whole, predicted.timeline, _lengths(predicted.timeline))


def simulated_causes(simulation: Simulation) -> IdleCauses:
    """A simulated step: it expects its own times."""
    return idle_causes(simulation.schedule, simulation.timeline, _lengths(simulation.timeline))


def _expected(
    profile: Profile | None,
    predicted: PredictedStep | None,
    plan: Plan,
    ran: Ran,
    frozen: Shares,
) -> tuple[str, Sequence[Sequence[float]] | None]:
    """(source, seconds of every action of one pipeline); None: the step's own medians."""
    if profile is not None:
        try:
            ratios = layer_ratios(frozen, plan) if frozen else None
            costs = action_costs(profile, plan, ran.window, ratios)
            window = [[costs.of_action(action) for action in program] for program in ran.window.programs]
            return "profile", [program * ran.windows for program in window]
        except ValueError:
            # The plan now has more devices than the profile.
            pass
    return ("step", None) if predicted is None else ("prediction", _lengths(predicted.timeline))


def _lengths(timeline: Timeline) -> list[list[float]]:
    return [[span.end_s - span.start_s for span in spans] for spans in timeline]
