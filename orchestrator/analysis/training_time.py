"""Share of a job's time that went into progress that stands. Pure: a job's view in, a share out.

Not the ratio of a rehearsal, which knows the nodes and divides their seconds by cause: `effective_time.py`.
"""

from __future__ import annotations

from orchestrator.history.job_view import JobView


def training_time_ratio(view: JobView) -> float | None:
    """Effective training time ratio of the newest start: time in committed steps that stand over all time since its
    first step began, up to the newest event. Pauses, recoveries and the time that steps took longer because ranks stood
    still count as time without progress. None before the first step."""
    if view.first_step_s is None:
        return None
    stretches = [each for each in view.recovery.stretches() if each.end_s >= view.started_s]
    if not stretches:
        return None
    begin_s = max(stretches[0].start_s, view.started_s)
    whole_s = max(view.last_s, stretches[-1].end_s) - begin_s
    trained_s = sum(
        each.end_s - max(each.start_s, begin_s) - each.stalled_s for each in stretches if each.stands
    )
    return min(1.0, max(0.0, trained_s / whole_s)) if whole_s > 0 else None
