"""Decisions on the ranks' speeds, each with the time of a step as predicted and as measured. Pure: a view in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.events.types import Adapted, Migrated
from orchestrator.history.adapt_record import Decided
from orchestrator.history.job_view import JobView

MEASURED_STEPS = 50
"""Most steps of which a plan's measured time is the median."""


@dataclass(frozen=True, kw_only=True)
class DecidedPlan:
    """A plan that was decided upon, once or several times in a row."""

    decisions: tuple[Adapted, ...]
    """Oldest first: one that changes the plan, or all in a row that keep it with the same best cut."""
    moves: tuple[Migrated, ...]
    """What it led to."""
    measured_s: float | None
    """Median step with the plan until the next decision, or until a neighbour came or went; None: there was no such
    step."""

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
    runs = _runs(run.adapt.decisions)
    return tuple(_decided(run, each, _end(run, runs[number:])) for number, each in enumerate(runs))


def _runs(decisions: Sequence[Decided]) -> list[list[Adapted]]:
    runs: list[list[Adapted]] = []
    for each in decisions:
        before = runs[-1][-1] if runs else None
        if before and not each.event.moves and not before.moves and before.layers == each.event.layers:
            runs[-1].append(each.event)
        else:
            runs.append([each.event])
    return runs


def _end(run: JobView, runs: Sequence[list[Adapted]]) -> int:
    """The last step of the first of `runs`: of a move, that before the next move; otherwise that before the next
    decision."""
    moves = runs[0][-1].moves
    later = [each[0].step for each in runs[1:] if each[-1].moves or not moves]
    return later[0] if later else run.step


def _regime_ends(run: JobView) -> list[int]:
    """The last steps before a neighbour came or went, of a rehearsal: other speeds than those that were decided on."""
    visits = run.disturbed.visits if run.disturbed is not None else ()
    return [step for visit in visits for step in (visit.first - 1, visit.last)]


def _decided(run: JobView, decisions: Sequence[Adapted], end: int) -> DecidedPlan:
    begin = decisions[0].step
    moves: tuple[Migrated, ...] = ()
    if decisions[-1].moves:
        moves = tuple(move for move in run.moves if begin < move.step <= end)
        begin = min((move.step for move in moves), default=begin)
    begin += 1
    end = min([end, *(last for last in _regime_ends(run) if last >= begin)])
    took = [run.steps[step].step_s for step in range(begin, end + 1)[:MEASURED_STEPS] if step in run.steps]
    return DecidedPlan(decisions=tuple(decisions), moves=moves, measured_s=median(took) if took else None)
