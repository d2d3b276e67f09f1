"""The numbers of disturbed jobs as lines of text. Knows no terminal."""

from __future__ import annotations

from orchestrator.analysis.interference_time import InterferenceTime, PlanChange, Trial, VisitResponse
from orchestrator.quantities import deviation, percent, seconds
from planner.wording import counted

MOST_PLANS = 20
"""Most plans shown of one job, the newest."""
HOW = (
    "Productive time: what the steps would have taken an oracle, over what they took. The oracle follows the best cut"
    " that was measured beside the neighbour from the moment that it comes, and the first cut while it is away."
)
"""Definition of the number that sums a job up."""


def lines(found: InterferenceTime) -> list[str]:
    """The report of `freshet rehearse --interference`."""
    tag = ", emulated devices" if found.emulated else ""
    text = []
    if found.undisturbed_s is not None:
        best = f", beside it {seconds(found.best_s)} with the best cut" if found.best_s is not None else ""
        text.append(f"a step without the neighbour: {seconds(found.undisturbed_s)}{best}{tag}")
    for trial in found.trials:
        text.append(_sum(trial))
        text += [f"  {_answered(answer, trial.policy != 'off')}" for answer in trial.answers]
        text += [f"  {_changed(plan)}" for plan in trial.plans[-MOST_PLANS:]]
    if found.same_state is not None:
        text.append(
            "all jobs end with the same state_sha256"
            if found.same_state
            else "the jobs end with DIFFERENT state_sha256"
        )
    text.append(f"verdict: {found.verdict}")
    return text


def _sum(trial: Trial) -> str:
    parts = [
        f"adapt.policy = {trial.policy!r}: {counted(trial.steps, 'step')} in {seconds(trial.seconds)}",
        f"productive time {percent(trial.productive)}" if trial.productive is not None else "",
        f"{seconds(trial.disturbed_s)} a step beside the neighbour" if trial.disturbed_s is not None else "",
        f"{counted(trial.steps_lost, 'committed step')} lost",
    ]
    return ", ".join(part for part in parts if part)


def _answered(answer: VisitResponse, looked: bool) -> str:
    parts = [
        noticed_text(answer) if looked else "",
        f"layers moved after {counted(answer.in_force, 'step')}" if answer.in_force is not None else "",
        f"{seconds(answer.step_s)} a step in the second half",
    ]
    return f"steps {answer.first:,} to {answer.last:,}: {', '.join(part for part in parts if part)}"


def _changed(plan: PlanChange) -> str:
    layers = f"plan after step {plan.step:,}, {' + '.join(map(str, plan.layers))} layers"
    measured = f"not measured: {plan.unmeasured}" if plan.unmeasured else "not measured"
    if plan.measured_s is not None:
        measured = f"{seconds(plan.measured_s)} measured"
    over = f" ({deviation(plan.off_by)})" if plan.off_by is not None else ""
    return f"{layers}: {seconds(plan.predicted_s)} a step predicted, {measured}{over}"


def noticed_text(answer: VisitResponse) -> str:
    """When and how the neighbour was noticed."""
    if answer.noticed is None or answer.slowdown is None:
        return "not noticed"
    when = f"after {counted(answer.noticed, 'step')}" if answer.noticed else "within the first step"
    before = f"{answer.slowdown_before:.2f} -> " if answer.slowdown_before is not None else ""
    return f"slowest rank {before}{answer.slowdown:.2f} times its expected times, noticed {when}"
