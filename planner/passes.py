"""Passes: pure functions Schedule -> Schedule. The input stays as it is, each result is validated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from planner.ir import Action, Kind, Program, Schedule
from planner.validate import ScheduleError, validate


def add_recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """An R right before the B or I of every microbatch on each of `stages`.

    A frozen stage has no backward and gets no R.

    Raises:
        ScheduleError: a stage out of range, or one that recomputes already.
    """
    for stage in sorted(stages):
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(
                f"{schedule.name}: cannot recompute stage {stage}, stages are 0..{schedule.stages - 1}"
            )

    def expand(program: Program) -> Program:
        result: list[Action] = []
        for action in program:
            if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and action.stage in stages:
                result.append(Action(Kind.RECOMPUTE, action.stage, action.index))
            result.append(action)
        return tuple(result)

    return _validated(replace(schedule, programs=tuple(map(expand, schedule.programs))))


def forward_only(schedule: Schedule, microbatches: int | None = None) -> Schedule:
    """Only the forwards, in the schedule's own order, of the first `microbatches` (None: of all).

    For validation and sampling. The result has all its stages frozen: no gradient reaches any of them.

    Raises:
        ScheduleError: `microbatches` is not in 1..the schedule's.
    """
    count = schedule.microbatches if microbatches is None else microbatches
    if not 1 <= count <= schedule.microbatches:
        raise ScheduleError(
            f"{schedule.name}: cannot run the first {count} microbatches: it has 1..{schedule.microbatches}"
        )
    programs = tuple(
        tuple(action for action in program if action.kind is Kind.FORWARD and action.index < count)
        for program in schedule.programs
    )
    return _validated(replace(schedule, programs=programs, microbatches=count, frozen_stages=schedule.stages))


def _validated(schedule: Schedule) -> Schedule:
    validate(schedule)
    return schedule
