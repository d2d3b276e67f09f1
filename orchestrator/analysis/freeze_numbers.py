"""The gain and the cost of freezing, in the paper's numbers, from a run's view."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from orchestrator.history.job_view import JobView
from orchestrator.history.phase_bands import phases_of
from planner.freeze.time_to_accuracy import (
    anything_frozen,
    average_effective_update,
    kappa,
    time_to_accuracy_ratio,
    warning,
)
from planner.freezing import AUTO, Phase, has_program, is_reference, prefix_rule, works_above_prefix
from workers.protocol.reports import StepReport

Side = Literal["unfrozen", "frozen"]
FEWEST, NEWEST = 5, 25
"""Reference steps that a kappa takes at least, and at most."""


@dataclass(frozen=True, kw_only=True)
class FreezeNumbers:
    """The numbers of a run; None where it has no such number (yet). Where a freeze program works above a prefix, they
    compare with steps that freeze the prefix alone."""

    method: str
    average_freeze_ratio: float | None
    """Share of frozen scalars, mean over all steps, actions and scalars (TimelyFreeze, section 4.2)."""
    kappa: float | None
    """Median measured step with full freezing over median step with none (TimelyFreeze eq. 12), for as many samples."""
    predicted_kappa: float | None
    """The same, as the freeze program predicted it."""
    p_eff: float | None
    """Share of gradient energy that reached the weights in the steps with full freezing (definition D.8); below a
    prefix none does."""
    progress: float | None
    """Share of a step's progress that is left, as the freeze program predicted it with r_max = auto."""
    chosen: bool
    """Whether the job chose the method itself, and goes on choosing."""
    above_prefix: bool
    """Whether a freeze program works above a prefix."""
    predicted_left: float | None
    """Share of a step's progress that the time to accuracy goes by, as predicted; None: it goes by `p_eff`."""
    time_to_accuracy: float | None
    """Predicted time to the same accuracy over that without freezing: kappa / p_eff (eq. 13), or with r_max = auto
    kappa / progress; infinite if nothing is left."""

    @property
    def warning(self) -> str | None:
        """A warning for people while freezing costs more than it gains; with r_max = auto the job freezes less."""
        if self.kappa is None or self.p_eff is None or self.progress is not None or self.chosen:
            return None
        return warning(self.kappa, self.p_eff, self.method)


def freeze_numbers(run: JobView) -> FreezeNumbers | None:
    """The numbers of `run`; None if its method is `none`."""
    freeze = run.freeze_section
    method = str(freeze.get("method", "none"))
    if method == "none":
        return None
    unfrozen, full = compared(run)
    solved = run.freeze.solved
    measured = measured_kappa(map(paced_s, full), map(paced_s, unfrozen))
    automatic = freeze.get("r_max") == AUTO and phases_of(freeze) is not None
    above = works_above_prefix(method)
    if automatic:
        measured = _paired_kappa(unfrozen, full)
    elif above:  # steps with nothing frozen are those of fewer frozen layers
        measured = None
    newest = run.freeze.newest
    control = None if newest is None else newest.control
    predicted = solved.kappa if solved is not None and has_program(method) else None
    p_eff = None
    if full:
        p_eff = average_effective_update(
            [step.effective_update for step in full], [step.gradient_energy for step in full]
        )
    best = measured if measured is not None else predicted
    progress = solved.progress if solved is not None and automatic else None
    predicted_left = solved.p_eff if above and solved is not None and progress is None else progress
    left = p_eff if predicted_left is None else predicted_left
    return FreezeNumbers(
        method=method,
        average_freeze_ratio=run.freeze.average_ratio(run.step),
        kappa=measured,
        predicted_kappa=predicted,
        p_eff=p_eff,
        progress=progress,
        chosen=control is not None and control.chosen,
        above_prefix=above,
        predicted_left=predicted_left,
        time_to_accuracy=time_to_accuracy_ratio(best, left)
        if best is not None and p_eff is not None and left is not None
        else None,
    )


def compared(run: JobView) -> tuple[Sequence[StepReport], Sequence[StepReport]]:
    """Steps with nothing frozen, and steps with full freezing, in order. Only steps with as many ranks as the newest
    count: the number of ranks changes a step's time, whatever is frozen."""
    freeze, start = run.freeze_section, run.freeze.start
    ranks = {each.number: len(each.members) for each in run.recovery.generations}
    method, prefix = str(freeze.get("method")), run.freeze.prefix
    # A freeze program above a prefix is judged by the steps with that prefix.
    first = prefix.step if prefix is not None and works_above_prefix(method) else 1
    ordered = [step for number, step in sorted(run.steps.items()) if number >= first]
    now = ranks.get(ordered[-1].generation) if ordered else None
    steps = [(side(step, freeze, start), step) for step in ordered if ranks.get(step.generation) == now]
    return [step for at, step in steps if at == "unfrozen"], [step for at, step in steps if at == "frozen"]


def paced_s(step: StepReport) -> float:
    """Seconds of a step per sample, by which steps are compared: the batch of some grows as layers freeze."""
    return step.step_s / max(1, step.samples)


def side(step: StepReport, freeze: Mapping[str, Any], start: int | None) -> Side | None:
    """Side of `step`; None for neither: the job's first step warms caches, and a skipped step's gradient has no finite
    energy. A step with full freezing froze something.

    Args:
        freeze: the resolved `[freeze]` section.
        start: the first step that follows solved ratios; it may be late, or never come.
    """
    if step.step <= 1 or step.step_s <= 0 or step.skipped:
        return None
    phases = phases_of(freeze)
    if phases is None:
        unfrozen = step.step <= (freeze.get("warm_up") or 0)
        full = not unfrozen
    else:
        # Another section may have been in force; below a prefix nothing ever reaches the weights.
        whole = prefix_rule(str(freeze.get("method"))) or not anything_frozen(step.effective_update)
        reference = whole and is_reference(step.step, phases, freeze.get("r_max", 0.0))
        unfrozen = reference or phases.of(step.step) is Phase.UPPER
        full = phases.of(step.step) is Phase.STABLE and start is not None and step.step >= start
    if unfrozen:
        return "unfrozen"
    return "frozen" if full and anything_frozen(step.effective_update) else None


class PairedKappa:
    """Kappa of a job that runs a step whole now and then (`planner.freezing.is_reference`): the median, over these
    steps, of those with full freezing around it."""

    def __init__(self) -> None:
        self._before_s: list[float] = []
        self._reference_s: float | None = None
        self._after_s: list[float] = []
        """Since the reference."""
        self._ratios: deque[float] = deque(maxlen=NEWEST)

    def add(self, of: Side, step: StepReport) -> bool:
        """Take the next step's time; whether there is a new kappa."""
        if of == "frozen":
            self._after_s.append(paced_s(step))
            return False
        paired = self._reference_s is not None and self._before_s and self._after_s
        if paired:
            self._ratios.append(kappa(median(self._before_s + self._after_s), self._reference_s or 0.0))
        self._before_s, self._reference_s, self._after_s = self._after_s, paced_s(step), []
        return bool(paired) and self.kappa is not None

    @property
    def kappa(self) -> float | None:
        """None before the first `FEWEST` reference steps."""
        return median(self._ratios) if len(self._ratios) >= FEWEST else None


def _paired_kappa(unfrozen: Sequence[StepReport], full: Sequence[StepReport]) -> float | None:
    pairs, whole = PairedKappa(), {step.step for step in unfrozen}
    for step in sorted((*unfrozen, *full), key=lambda each: each.step):
        pairs.add("unfrozen" if step.step in whole else "frozen", step)
    return pairs.kappa


def measured_kappa(frozen: Iterable[float], unfrozen: Iterable[float]) -> float | None:
    """Median step with full freezing over median step with none (eq. 12); None until there are both.

    Args:
        frozen, unfrozen: times of steps, as `paced_s` has them.
    """
    frozen_s, unfrozen_s = tuple(frozen), tuple(unfrozen)
    return kappa(median(frozen_s), median(unfrozen_s)) if frozen_s and unfrozen_s else None
