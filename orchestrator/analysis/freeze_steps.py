"""The effect of freezing step by step, in the paper's numbers: predicted and measured time, kappa, effective updates.

Pure: a job's view in, a row per step out; it asks no rank.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from functools import cache
from statistics import median

from orchestrator.analysis.freeze_numbers import compared, freeze_numbers, paced_s
from orchestrator.analysis.predicted_freezing import predict_freezing
from orchestrator.history.job_view import JobView
from orchestrator.history.phase_bands import phases_of
from planner.freeze.time_to_accuracy import RunningUpdate, kappa, time_to_accuracy_ratio


@dataclass(frozen=True, kw_only=True)
class FreezeStep:
    """One step; None where a run has no such number."""

    step: int
    step_s: float
    """Measured step time."""
    predicted_step_s: float | None
    """Simulated step time, with the share of the ratios that the step applies."""
    kappa: float | None
    """`step_s` over the median measured step with nothing frozen (TimelyFreeze eq. 12)."""
    predicted_kappa: float | None
    """`predicted_step_s` over a predicted step with nothing frozen."""
    p_eff: float
    """Share of the step's gradient energy that reached the weights (definition D.7)."""
    average_p_eff: float
    """The same over the steps so far (definition D.8)."""
    time_to_accuracy: float | None
    """Predicted time to the same accuracy over that without freezing (eq. 13): median kappa of the steps so far over
    `average_p_eff`."""


def freeze_steps(run: JobView) -> tuple[FreezeStep, ...]:
    """The steps with freezing, in order: from the first that follows a solution, or, for methods without a solver,
    from the end of the warm-up."""
    start = _start(run)
    if start is None:
        return ()
    unfrozen, _ = compared(run)
    unfrozen_s = median(map(paced_s, unfrozen)) if unfrozen else None
    predicted = predict_freezing(run)
    # Few shares are distinct: those of the ramp, and 1.
    step_s = cache(predicted.step_s) if predicted is not None else None
    rows: list[FreezeStep] = []
    average, numbers = RunningUpdate(), freeze_numbers(run)
    left = None if numbers is None else numbers.predicted_left
    above = numbers is not None and numbers.above_prefix
    kappas: list[float] = []
    for number in sorted(number for number in run.steps if number >= start):
        report = run.steps[number]
        foreseen_s = foreseen = measured = None
        if predicted is not None and step_s is not None:
            windows = predicted.windows.get(report.generation)
            foreseen_s = step_s(predicted.share(number), windows)
            foreseen = kappa(foreseen_s, step_s(0.0, windows))
        if unfrozen_s is not None:
            measured = kappa(paced_s(report), unfrozen_s)
        # A prediction compares with a step that has the same prefix.
        best = foreseen if measured is None or above else measured
        # A skipped step updates nothing: neither its time nor its gradient counts.
        if not report.skipped:
            average.add(report.effective_update, report.gradient_energy)
            if best is not None:
                insort(kappas, best)
        rows.append(
            FreezeStep(
                step=number,
                step_s=report.step_s,
                predicted_step_s=foreseen_s,
                kappa=measured,
                predicted_kappa=foreseen,
                p_eff=report.effective_update,
                average_p_eff=average.share,
                time_to_accuracy=time_to_accuracy_ratio(
                    median(kappas), average.share if left is None else left
                )
                if kappas
                else None,
            )
        )
    return tuple(rows)


def _start(run: JobView) -> int | None:
    freeze = run.freeze_section
    if freeze.get("method", "none") == "none":
        return None
    return run.freeze.start if phases_of(freeze) is not None else (freeze.get("warm_up") or 0) + 1
