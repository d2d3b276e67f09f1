"""The use of the ranks' memory over one step: bytes from the run's profile, times from the step. Ranks
measure only their peaks (`orchestrator/report/run/rank_memory.py`). Pure: a job's view in, levels out.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from orchestrator.analysis.predicted_freezing import ran_in
from orchestrator.events.log import open_regular
from orchestrator.history.folder import PROFILE
from orchestrator.history.job_view import JobView
from orchestrator.pictures.heat_map import Shares
from orchestrator.pictures.spans import Timeline
from orchestrator.prepare.planning import as_followed
from orchestrator.spec.job_spec import Spec
from planner.freeze.program import layer_ratios
from planner.freezing import Ratios
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile, ProfileError
from planner.simulation.memory import OverTime, memory_over_time
from planner.simulation.simulate import Simulation


def profile_beside(log: Path) -> Profile | None:
    """The profile of the run whose event log is `log`; None if there is none or it cannot be read."""
    try:
        with open_regular(log.with_name(PROFILE)) as file:
            return Profile.from_json(file.read().decode())
    except (OSError, UnicodeDecodeError, RecursionError, ProfileError):
        return None


def step_memory(
    run: JobView, profile: Profile | None, timeline: Timeline, frozen: Shares
) -> tuple[OverTime, ...]:
    """The memory use of each lane's rank in `timeline`. Empty if no profile fits the plan, if the step did not follow
    the plan, or if it had several windows.

    Args:
        timeline: the newest measured step, measured or predicted: of one pipeline or of all.
        frozen: shares of weight-gradient time that its backward passes skip.
    """
    plan = run.plan
    ran = ran_in(plan, run.timelines) if plan is not None else None
    if profile is None or plan is None or ran is None or ran.windows != 1:
        return ()
    counts = [len(program) for program in ran.window.programs]
    pipelines = len(timeline) // len(counts)
    if [len(spans) for spans in timeline] != counts * pipelines or not pipelines:
        return ()
    try:
        planned = as_followed(profile, Spec.model_validate(run.spec), run.freeze)
        ratios = layer_ratios(frozen, plan) if frozen else None
        return tuple(
            chain.from_iterable(
                _of_pipeline(planned, plan, ran.window, timeline[first : first + len(counts)], ratios)
                for first in range(0, len(timeline), len(counts))
            )
        )
    except ValueError:
        # The plan now has more devices than the profile, or the log is of another version.
        return ()


def _of_pipeline(
    profile: Profile, plan: Plan, window: Schedule, timeline: Timeline, ratios: Ratios | None
) -> tuple[OverTime, ...]:
    spans = tuple(chain.from_iterable(timeline))
    laid_out = Simulation(
        schedule=window,
        start_s=tuple(span.start_s for span in spans),
        end_s=tuple(span.end_s for span in spans),
        busy_s=tuple(sum(span.end_s - span.start_s for span in rank) for rank in timeline),
        on_link=(),
    )
    return memory_over_time(profile, plan, laid_out, ratios)
