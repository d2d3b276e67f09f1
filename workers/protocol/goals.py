"""Past validations of a job, and what they say of its goals: whether one is reached, and whether it still gets better.
Pure; no torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.wording import counted
from workers.protocol.target import Target, better, parse_target

KEPT = 1000
"""Newest validations that a job remembers, beside the best one; a job's patience is not longer."""


@dataclass(frozen=True, kw_only=True)
class PastValidation:
    """A validation of a job."""

    step: int
    """The step that it came after."""
    values: Mapping[str, float]
    """Loss and metrics."""


@dataclass(frozen=True, kw_only=True)
class Goals:
    """Goals of a job that validations decide."""

    target: Target | None
    """The metric at which it is done."""
    patience: int | None
    """Validations without a better value after which it is done."""
    watched: str
    """The metric that is to get better."""

    @staticmethod
    def of(*, stop_at: str | None, patience: int | None, keep_best: str | None) -> Goals:
        """The goals by `job.stop_at`, `job.patience` and `checkpoint.keep_best`."""
        target = None if stop_at is None else parse_target(stop_at)
        watched = keep_best or ("loss" if target is None else target.metric)
        return Goals(target=target, patience=patience, watched=watched)

    def reached(self, past: Sequence[PastValidation], step: int) -> str:
        """The metric with its value by which the validation after `step` reached the target; empty: it did not."""
        values = next((each.values for each in past if each.step == step), {})
        return "" if self.target is None or not self.target.met(values) else self.target.told(values)

    def plateau(self, past: Sequence[PastValidation], step: int) -> str:
        """The best value, in words, if the newest validation is that after `step` and the job's patience is over with
        it; else empty."""
        if self.patience is None or not past or past[-1].step != step:
            return ""
        best = best_validation(past, self.watched)
        if sum(each.step > (0 if best is None else best.step) for each in past) < self.patience:
            return ""
        during = f"in {counted(self.patience, 'validation')}"
        if best is None:
            return f"no finite {self.watched} {during}"
        return f"no better than {self.watched} {best.values[self.watched]:.4g} of step {best.step} {during}"


def best_validation(past: Iterable[PastValidation], metric: str) -> PastValidation | None:
    """The validation with the best value of `metric`, the first of equal ones; None where none has one."""
    best: PastValidation | None = None
    for each in past:
        value = each.values.get(metric)
        known = None if best is None else best.values[metric]
        if value is not None and better(metric, value, known):
            best = each
    return best


def with_next(
    past: Sequence[PastValidation], found: PastValidation, watched: str
) -> tuple[PastValidation, ...]:
    """`past` and a later validation: the newest `KEPT`, and the one with the best value of `watched`."""
    known = (*past, found)
    older = best_validation(known[:-KEPT], watched)
    return (*((older,) if older else ()), *known[-KEPT:])


def told_together(told: Iterable[Iterable[PastValidation]], step: int) -> tuple[PastValidation, ...]:
    """The validations after steps up to `step` that anyone tells, each once and in order."""
    known = {each.step: each for of_one in told for each in of_one if each.step <= step}
    return tuple(known[number] for number in sorted(known))
