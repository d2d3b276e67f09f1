"""Compute slowdown of each rank against its own past: a metric for other systems.

Pure: a job's view in, ratios out. `planner/adapt/` moves layers away from slow ranks.
"""

from __future__ import annotations

from orchestrator.history.job_view import JobView
from planner.ir import Action, Kind
from workers.protocol import TimelineReport


def slowdowns(view: JobView) -> dict[int, float]:
    """Place -> time of its forwards in the newest measured step over the shortest such time in earlier measured steps
    with the same layers and as many forwards: a pipeline also runs the replicas of one that was lost. Forwards,
    because freezing changes the time of backwards. Without places that were not measured before."""
    measured = [ranks for step, ranks in sorted(view.measured.items()) if step > view.measured_since]
    if len(measured) < 2:
        return {}
    *earlier, newest = [{rank: forwards(report) for rank, report in ranks.items()} for ranks in measured]
    ratios = {}
    for rank, (now_s, count) in newest.items():
        before_s = [
            seconds
            for seconds, as_many in (times[rank] for times in earlier if rank in times)
            if seconds > 0 and as_many == count
        ]
        if before_s:
            ratios[rank] = now_s / min(before_s)
    return ratios


def forwards(report: TimelineReport) -> tuple[float, int]:
    """Seconds that a rank's forwards took, and how many there were."""
    lengths = [
        span.end_s - span.start_s for span in report.spans if Action.parse(span.action).kind is Kind.FORWARD
    ]
    return sum(lengths), len(lengths)
