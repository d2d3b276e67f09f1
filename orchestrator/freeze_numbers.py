"""What freezing bought and what it cost, in the paper's numbers, from a run's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.phase_bands import phases_of
from orchestrator.run_record import RunRecord
from planner.freezing import Phase
from planner.time_to_accuracy import average_effective_update, time_to_accuracy_ratio, warning
from workers.protocol import StepReport


@dataclass(frozen=True, kw_only=True)
class FreezeNumbers:
    """None where a run has no such number (yet)."""

    method: str
    average_freeze_ratio: float | None
    """Share of scalars that was frozen, mean over all steps, actions and scalars (TimelyFreeze, section 4.2)."""
    kappa: float | None
    """Measured step time with full freezing over that with none: medians (TimelyFreeze eq. 12)."""
    predicted_kappa: float | None
    """The same as the freeze program foretold it."""
    p_eff: float | None
    """Share of gradient energy that was let through over the steps with full freezing (definition D.8)."""
    time_to_accuracy: float | None
    """Predicted time to the same accuracy over that without freezing: kappa / p_eff (eq. 13); infinite if no
    update is let through."""

    @property
    def warning(self) -> str | None:
        """What a person must know while freezing costs more than it brings."""
        if self.kappa is None or self.p_eff is None:
            return None
        return warning(self.kappa, self.p_eff)


def freeze_numbers(run: RunRecord) -> FreezeNumbers | None:
    """The numbers of `run`; None if its method is `none`."""
    freeze = run.spec.get("freeze", {})
    method = str(freeze.get("method", "none"))
    if method == "none":
        return None
    base, full = compared(run)
    solved = run.freeze.solved
    kappa = None
    if base and full:
        kappa = median(step.step_s for step in full) / median(step.step_s for step in base)
    predicted = solved.kappa if solved is not None else None
    p_eff = None
    if full:
        p_eff = average_effective_update(
            [step.effective_update for step in full], [step.gradient_energy for step in full]
        )
    best = kappa if kappa is not None else predicted
    return FreezeNumbers(
        method=method,
        average_freeze_ratio=run.freeze.average_ratio(len(run.steps)),
        kappa=kappa,
        predicted_kappa=predicted,
        p_eff=p_eff,
        time_to_accuracy=time_to_accuracy_ratio(best, p_eff)
        if best is not None and p_eff is not None
        else None,
    )


def compared(run: RunRecord) -> tuple[Sequence[StepReport], Sequence[StepReport]]:
    """Steps with nothing frozen, and steps with full freezing. In neither are the job's first step, which warms caches,
    and skipped ones, whose gradient has no finite energy."""
    freeze = run.spec.get("freeze", {})
    phases = phases_of(freeze)
    steps = [
        step
        for number, step in sorted(run.steps.items())
        if number > 1 and step.step_s > 0 and not step.skipped
    ]
    if phases is not None:
        base = [step for step in steps if phases.of(step.step) is Phase.UPPER]
        return base, [step for step in steps if phases.of(step.step) is Phase.STABLE]
    warm_up = freeze.get("warm_up") or 0
    frozen = [step for step in steps if step.step > warm_up]
    return [step for step in steps if step.step <= warm_up], frozen
