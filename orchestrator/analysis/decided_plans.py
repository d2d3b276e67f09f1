"""Decisions on the ranks' speeds, each with the time of a step as predicted and as measured. Pure: a view in.

A prediction is one for the speeds that were known. So only steps with these speeds are measured: none from the step on
in which a neighbour came or went, whenever the job noticed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.events.types import Adapted, Migrated
from orchestrator.history.adapt_record import DatedDecision
from orchestrator.history.job_view import JobView

MEASURED_STEPS = 50
"""Most steps of which a plan's measured time is the median."""
OVERTAKEN = "speeds changed"
"""Why a plan was not measured: there was no step with it at the speeds for which it was predicted."""


@dataclass(frozen=True, kw_only=True)
class DecidedPlan:
    """A plan that was decided upon, once or several times in a row at the same speeds."""

    decisions: tuple[Adapted, ...]
    """Oldest first: one that changes the plan, or all in a row that keep it with the same best cut."""
    moves: tuple[Migrated, ...]
    """Layer moves that the decisions led to."""
    measured_s: float | None
    """Median step with the plan at the speeds for which it was predicted, until the next decision; None: there was no
    such step."""
    unmeasured: str
    """Why there was none, in words; empty: it was measured, or there was no step at all."""

    @property
    def changes(self) -> bool:
        """Whether the plan changed."""
        return self.decisions[-1].moves

    @property
    def predicted_s(self) -> float:
        """A step with the plan that is in force from then on."""
        newest = self.decisions[-1]
        return newest.then_s if newest.moves else newest.now_s

    @property
    def off_by(self) -> float | None:
        """Measured over predicted step, less 1."""
        if self.measured_s is None or self.predicted_s <= 0:
            return None
        return self.measured_s / self.predicted_s - 1


def decided_plans(run: JobView) -> tuple[DecidedPlan, ...]:
    """The plans that `run` decided upon, oldest first."""
    runs = _runs(run)
    return tuple(_decided(run, each, _end(run, runs[number:])) for number, each in enumerate(runs))


def _runs(run: JobView) -> list[list[DatedDecision]]:
    runs: list[list[DatedDecision]] = []
    for each in run.adapt.decisions:
        before = runs[-1][-1] if runs else None
        if before is not None and _repeats(run, before, each):
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _repeats(run: JobView, before: DatedDecision, again: DatedDecision) -> bool:
    """Whether a decision is the one before it once more, for the same ranks at the same speeds."""
    first, second = before.event, again.event
    same = not first.moves and not second.moves and first.layers == second.layers
    return same and min((_lasts(run, before), *_formed(run, first.step))) >= second.step


def _end(run: JobView, runs: Sequence[list[DatedDecision]]) -> int:
    """The last step of the first of `runs`: of a move, that before the next move; otherwise that before the next
    decision."""
    moves = runs[0][-1].event.moves
    later = [each[0].event.step for each in runs[1:] if each[-1].event.moves or not moves]
    return later[0] if later else run.step


def _lasts(run: JobView, decided: DatedDecision) -> int:
    """The last step at the speeds that were known for the decision; it may have been before it."""
    step = decided.event.step
    noticed = [change.since - 1 for change in run.adapt.changes if change.time_s > decided.time_s]
    # A rehearsal knows also of neighbours that the job never noticed.
    visits = run.disturbed.visits if run.disturbed is not None else ()
    came_or_went = [last for visit in visits for last in (visit.first - 1, visit.last) if last >= step]
    return min((*noticed, *came_or_went), default=run.step)


def _formed(run: JobView, step: int) -> list[int]:
    """The steps from `step` on after which a generation formed, with a plan of its own."""
    return [generation.step for generation in run.recovery.generations if generation.step >= step]


def _decided(run: JobView, decided: Sequence[DatedDecision], end: int) -> DecidedPlan:
    newest = decided[-1]
    begin, changes = decided[0].event.step, newest.event.moves
    moved = [move for move in run.moves if begin < move.step <= end]
    ours = moved[:1] if changes else []
    # Other moves are requested ones, or lead away from a rank without memory.
    later = [move.step for move in moved[len(ours) :]]
    begin = ours[0].step if ours else begin
    # A move that stops training forms a generation itself.
    later += _formed(run, begin + len(ours))
    lasts = _lasts(run, newest)
    took = [
        run.steps[step].step_s
        for step in range(begin + 1, min(end, lasts, *later) + 1)[:MEASURED_STEPS]
        if step in run.steps and (ours or not changes)
    ]
    return DecidedPlan(
        decisions=tuple(each.event for each in decided),
        moves=tuple(ours),
        measured_s=median(took) if took else None,
        unmeasured=OVERTAKEN if not took and lasts < min(end, run.step) else "",
    )
