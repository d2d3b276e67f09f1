"""Checks at each step whether freezing pays: time saved against updates kept; and tells it now and again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.analysis.freeze_numbers import (
    PairedKappa,
    Side,
    freeze_numbers,
    measured_kappa,
    paced_s,
    side,
)
from orchestrator.events.types import (
    Event,
    Formed,
    FreezeMeasured,
    FreezeSolved,
    Issued,
    Submitted,
    Warned,
)
from orchestrator.history.freeze_history import FreezeHistory, cut
from orchestrator.history.job_view import JobView
from planner.freeze.time_to_accuracy import RunningUpdate, cost_text, costs, warning
from planner.freezing import AUTO, FreezePlan, has_program, works_above_prefix
from planner.plan import Plan
from workers.protocol.reports import FreezeStarted, PrefixFrozen, StepReport, SwitchReport

TOLD_EVERY = 100
"""Steps between two measurements that are logged."""
EVERY = 10
"""Frozen steps between two checks of measured times: enough that a few slow steps do not move the median."""
NEWEST = 1000
"""Number of newest steps compared."""


@dataclass(frozen=True)
class Costly:
    """Freezing that costs more than it brings, where the job leaves it to us how much to freeze."""

    reason: str
    progress: float
    """Share of a step's progress that is left."""


class FreezeWatch:
    """Warns once when kappa is above the average effective update probability of this run's steps since freezing began
    (TimelyFreeze eq. 13, definition D.8).

    Without a predicted kappa, as without a freeze program and in a replay, kappa is measured: steps with full
    freezing are compared with those without any. With r_max = auto, each step that runs whole is compared with those
    around it, and less is frozen in place of a warning.

    Args:
        history: of earlier runs of the job.
    """

    def __init__(self, history: FreezeHistory) -> None:
        self._predicted = history.solved.kappa if history.solved is not None else None
        self._progress = history.solved.progress if history.solved is not None else None
        self._p_eff = history.solved.p_eff if history.solved is not None else None
        changed = [number for number, plan in enumerate(history.plans) if plan.control is not None]
        in_force = history.plans[changed[-1] if changed else 0 :]
        solved = [plan.start for plan in in_force if plan.control is None or plan.control.solved]
        self._start = solved[0] if solved else None
        """The first step that follows solved ratios."""
        self._settings: Mapping[str, Any] = in_force[0].settings if changed else {}
        """Keys of the section that an earlier run's request replaced."""
        self._freeze: Mapping[str, Any] = {}
        """The resolved `[freeze]` section in force."""
        control = in_force[0].control if changed else None
        self._chosen = control is not None and control.chosen
        """Whether the job chose the method itself."""
        self._issued: Plan | None = None
        """The newest plan, whether or not the ranks follow it yet."""
        self._shape: object = None
        """The part of the plan in force that the time of a step depends on."""
        self._times_s = _no_times()
        """Times of the steps that are compared if no kappa was predicted, per sample."""
        self._pairs = PairedKappa()
        """Pairs of steps that are compared with r_max = auto."""
        self._frozen = 0
        """Number of frozen steps compared."""
        self._average = RunningUpdate()
        self._warned = False

    def fold(self, event: Event) -> Warned | Costly | None:
        """Process a logged event; return a warning if one is due."""
        match event:
            case Submitted(spec=spec, takeover=False):
                self._freeze = {**spec.get("freeze", {}), **self._settings}
            case Issued(plan=plan):
                self._issued = plan
            case Formed() if self._issued is not None:
                self._follow(self._issued)
            case SwitchReport(epoch=epoch, version=version) if self._issued is not None:
                if (epoch, version) == (self._issued.epoch, self._issued.version):
                    self._follow(self._issued)
            case FreezeSolved(kappa=kappa, progress=progress, p_eff=p_eff):
                self._predicted, self._progress, self._p_eff = kappa, progress, p_eff
            case FreezeStarted(plan=plan) if plan.control is not None:
                self._begin_again(plan)
            case FreezeStarted(plan=plan) if self._start is None:
                self._start = plan.start
            case PrefixFrozen() if self._above_prefix:
                self._times_s, self._pairs = _no_times(), PairedKappa()
            case StepReport(skipped=False) if not self._warned:
                return self._judge(event)
            case _:
                pass
        return None

    def catch_up(self, view: JobView, began: int) -> None:
        """Watch again what the previous controller of this run watched; it gave the warning if one was due.

        Args:
            view: of the log so far. Where its older steps are thinned, one stands for those before it.
            began: the step that the run started from.
        """
        self._freeze = view.freeze_section_at(began)
        solved, freezing = view.freeze.solved, sorted(view.freeze.plans.items())
        followed = deque(
            each for each in view.decisions if each.plan != view.plan or view.plan == view.followed
        )
        started = deque(plan for start, plan in freezing if start > began)
        moved = deque(prefix for first, prefix in sorted(view.freeze.prefixes.items()) if first > began)
        before = began
        for step, report in sorted(view.steps.items()):
            if step <= began:
                continue
            while followed and followed[0].step < step:
                self._follow(followed.popleft().plan)
            while started and (started[0].start or 0) <= step:
                self._adopt(started.popleft(), solved)
            while moved and moved[0].step <= step:
                self.fold(moved.popleft())
            self.fold(replace(report, gradient_energy=report.gradient_energy * (step - before)))
            before = step
        for plan in started:
            self._adopt(plan, solved)
        if solved is not None and solved.plan == view.freeze.proposed:
            self.fold(solved)
        self._issued = view.plan

    def _adopt(self, plan: FreezePlan, solved: FreezeSolved | None) -> None:
        if solved is not None and solved.plan.key == plan.key:
            self.fold(solved)
        self.fold(FreezeStarted(plan=plan))

    def _follow(self, plan: Plan) -> None:
        shape = (cut(plan), plan.windows, plan.shares)
        if shape != self._shape:
            # Step times change with the plan, whatever is frozen.
            self._times_s, self._pairs = _no_times(), PairedKappa()
        self._shape = shape

    def _begin_again(self, plan: FreezePlan) -> None:
        """Judge the settings of `plan` by the steps from its start on."""
        assert plan.control is not None
        settings = {**self._freeze, **plan.settings}
        if settings == self._freeze and self._start is not None:  # the same program, solved for other times
            return
        self._freeze, self._chosen = settings, plan.control.chosen
        if plan.control.phases is None:
            self._predicted = None
        self._start = plan.start if plan.control.solved else None
        self._average, self._warned = RunningUpdate(), False
        self._times_s["frozen"].clear()
        self._pairs, self._frozen = PairedKappa(), 0

    @property
    def _above_prefix(self) -> bool:
        return works_above_prefix(str(self._freeze.get("method")))

    @property
    def _automatic(self) -> bool:
        """Whether the job leaves it to us how much to freeze."""
        return self._freeze.get("r_max") == AUTO and has_program(str(self._freeze.get("method")))

    def _judge(self, report: StepReport) -> Warned | Costly | None:
        if self._automatic:
            return self._judge_in_pairs(report)
        if self._chosen or not self._counts(report):  # what the job chose it weighs again and again
            return None
        self._average.add(report.effective_update, report.gradient_energy)
        kappa = self._predicted if self._predicted is not None else self._measured()
        if kappa is None:
            return None
        # Above a prefix both compare with a step that freezes it alone.
        share = self._p_eff if self._above_prefix else self._average.share
        text = None if share is None else warning(kappa, share, str(self._freeze.get("method")))
        if text is None:
            return None
        self._warned = True
        return Warned(text=text)

    def _judge_in_pairs(self, report: StepReport) -> Costly | None:
        of = side(report, self._freeze, self._start)
        if of is None:
            return None
        if of == "frozen":
            self._average.add(report.effective_update, report.gradient_energy)
        kappa = self._pairs.kappa if self._pairs.add(of, report) else None
        progress = self._average.share if self._progress is None else self._progress
        if kappa is None or not costs(kappa, progress):
            return None
        self._pairs = PairedKappa()  # it is told again if this comes to nothing
        return Costly(cost_text(kappa, progress, "a step's progress is left"), progress)

    def _counts(self, report: StepReport) -> bool:
        """Whether the step counts for the average; also keeps the step's time if needed."""
        if self._predicted is not None:
            return self._start is not None and report.step >= self._start
        of = side(report, self._freeze, self._start)
        if of is not None:
            self._times_s[of].append(paced_s(report))
        self._frozen += of == "frozen"
        return of == "frozen"

    def _measured(self) -> float | None:
        if self._frozen % EVERY:
            return None
        return measured_kappa(self._times_s["frozen"], self._times_s["unfrozen"])


def outcome(event: Event, view: JobView) -> FreezeMeasured | None:
    """Gain and cost of freezing by the steps so far, if it is due to tell them at `event`, the newest of `view`."""
    if not isinstance(event, StepReport) or event.step % TOLD_EVERY:
        return None
    if view.freeze.method == "none":
        return None
    numbers, solved = freeze_numbers(view), view.freeze.solved
    if numbers is None or numbers.kappa is None or numbers.p_eff is None:
        return None
    foreseen = None if solved is None or numbers.predicted_kappa is None else solved.p_eff
    return FreezeMeasured(
        step=event.step,
        method=numbers.method,
        kappa=numbers.kappa,
        predicted_kappa=numbers.predicted_kappa,
        p_eff=numbers.p_eff,
        # Above a prefix it is a share of what the prefix leaves.
        predicted_p_eff=None if numbers.above_prefix else foreseen,
        progress=numbers.progress,
        above_prefix=numbers.above_prefix,
    )


def _no_times() -> dict[Side, deque[float]]:
    return {"unfrozen": deque(maxlen=NEWEST), "frozen": deque(maxlen=NEWEST)}
