"""Whether freezing pays: what it saves against what it lets through, step by step. Pure: events in, a warning out."""

from __future__ import annotations

from orchestrator.events import Event, FreezeSolved, Warned
from orchestrator.freeze_history import FreezeHistory
from planner.time_to_accuracy import RunningUpdate, warning
from workers.protocol import FreezeStarted, StepReport


class FreezeWatch:
    """Warns once when kappa is above the average effective update probability of this run's steps since freezing began
    (TimelyFreeze eq. 13, definition D.8).

    Args:
        history: of earlier runs of the job.
    """

    def __init__(self, history: FreezeHistory) -> None:
        self._kappa = history.solved.kappa if history.solved is not None else None
        self._start = history.plans[0].start if history.plans else None
        """The first step with freezing."""
        self._average = RunningUpdate()
        self._warned = False

    def take(self, event: Event) -> Warned | None:
        """Take in an event that was logged; a warning, if it is due now."""
        match event:
            case FreezeSolved(kappa=kappa):
                self._kappa = kappa
            case FreezeStarted(plan=plan) if self._start is None:
                self._start = plan.start
            case StepReport(step=step, skipped=False) if self._start is not None and step >= self._start:
                return self._judge(event)
            case _:
                pass
        return None

    def _judge(self, report: StepReport) -> Warned | None:
        self._average.add(report.effective_update, report.gradient_energy)
        if self._warned or self._kappa is None:
            return None
        text = warning(self._kappa, self._average.share)
        if text is None:
            return None
        self._warned = True
        return Warned(text=text)
