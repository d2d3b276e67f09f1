"""Planning in `report.html`: what the plan foretold, and what it was chosen from."""

from __future__ import annotations

from html import escape
from statistics import median

from orchestrator.history.job_view import JobView
from orchestrator.quantities import counted, percent, seconds, significant, size
from orchestrator.report.parts import tile
from planner.plan import Plan
from planner.search.alternatives import Alternative
from workers.protocol import StepReport

MOST_ROWS = 20


def planning(run: JobView) -> str:
    """The whole part; empty for a plan that was not simulated, in a run that sampled nothing for the next."""
    plan = run.plan
    if plan is None or (plan.predicted_step_s is None and not run.alternatives and not run.curvature.samples):
        return ""
    parts = [_tiles(run, plan), _table(plan, run.alternatives)]
    how = f"<small>partition: {escape(plan.partition)}</small>" if plan.partition else ""
    return f"<section><h2>Plan{how}</h2>{''.join(parts)}</section>"


def _tiles(run: JobView, plan: Plan) -> str:
    entries: list[tuple[str, str, str]] = []
    if plan.predicted_step_s is not None:
        times = [step.step_s for step in _unfrozen(run)]
        detail = "with nothing frozen"
        if times:
            measured_s = median(times)
            detail += f"; measured {seconds(measured_s)}, ratio {plan.predicted_step_s / measured_s:.3f}"
        entries.append(("Predicted step", seconds(plan.predicted_step_s), detail))
    if plan.predicted_bubble is not None:
        entries.append(("Predicted bubble", percent(plan.predicted_bubble), "mean over ranks"))
    if plan.predicted_peak_memory_bytes is not None:
        peak = size(plan.predicted_peak_memory_bytes)
        entries.append(("Predicted peak memory", peak, "of the fullest rank"))
    if (estimates := run.curvature.estimates()) is not None:
        detail = f"DynPipe, from {counted(estimates.samples, 'sample')} of the running job"
        entries.append(("Smoothness L", significant(estimates.smoothness), detail))
        entries.append(("Second moment ξ²", significant(estimates.second_moment), detail))
    items = "".join(tile(*entry) for entry in entries)
    return f'<dl class="tiles">{items}</dl>' if items else ""


def _unfrozen(run: JobView) -> list[StepReport]:
    """Steps with nothing frozen but the job's first, which warms caches."""
    return [
        step
        for number, step in run.steps.items()
        if number > 1 and step.step_s > 0 and number not in run.freeze.steps
    ]


def _table(plan: Plan, alternatives: tuple[Alternative, ...]) -> str:
    """What was looked at: the one that was taken is marked and comes first, then each program's own pick for its shape,
    then what was of other shapes."""
    if not alternatives:
        return ""
    ordered = sorted(alternatives, key=lambda each: each.order(plan))
    rows = "".join(_row(plan, each) for each in ordered[:MOST_ROWS])
    left = len(ordered) - MOST_ROWS
    more = (
        f'<p class="caption">{counted(left, "more plan")} considered, in the event log.</p>'
        if left > 0
        else ""
    )
    return (
        '<div class="card scroll after" tabindex="0" role="region" aria-label="Plans considered">'
        '<table><thead><tr><th scope="col">Cut by</th><th scope="col">Schedule</th>'
        '<th class="number" scope="col">Ranks</th><th class="number" scope="col">Microbatches</th>'
        '<th scope="col">Layers per stage</th><th class="number" scope="col">Simulated step</th>'
        f'<th scope="col">Verdict</th></tr></thead><tbody>{rows}</tbody></table></div>{more}'
    )


def _row(plan: Plan, each: Alternative) -> str:
    cut = "–" if each.layers is None else " + ".join(str(stop - first) for first, stop in each.layers)
    step = "–" if each.predicted_step_s is None else seconds(each.predicted_step_s)
    verdict = '<span class="pill good">taken</span>' if each.is_of(plan) else escape(each.why_not)
    return (
        f"<tr><td>{escape(each.name or '–')}</td><td>{escape(each.schedule)}</td>"
        f'<td class="number">{each.ranks}</td><td class="number">{each.microbatches}</td>'
        f'<td class="text">{cut}</td><td class="number">{step}</td><td class="text">{verdict}</td></tr>'
    )
