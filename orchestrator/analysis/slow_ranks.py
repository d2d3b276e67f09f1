"""How much slower each rank computes than it did: what a straggler shows. Pure: a job's view in, ratios out."""

from __future__ import annotations

from orchestrator.history.job_view import JobView
from planner.ir import Action, Kind
from workers.protocol import TimelineReport


def slowdowns(view: JobView) -> dict[int, float]:
    """Place -> time of its forwards in the newest measured step over the shortest such time in earlier measured steps
    with the same layers. Forwards, because freezing changes the time of backwards. Without places that were not
    measured before."""
    measured = [ranks for step, ranks in sorted(view.measured.items()) if step > view.measured_since]
    if len(measured) < 2:
        return {}
    *earlier, newest = [{rank: forward_s(report) for rank, report in ranks.items()} for ranks in measured]
    ratios = {}
    for rank, now_s in newest.items():
        before_s = [times[rank] for times in earlier if times.get(rank, 0.0) > 0]
        if before_s:
            ratios[rank] = now_s / min(before_s)
    return ratios


def forward_s(report: TimelineReport) -> float:
    """Seconds that a rank's forwards took."""
    return sum(
        span.end_s - span.start_s for span in report.spans if Action.parse(span.action).kind is Kind.FORWARD
    )
