"""Passes: pure functions Schedule -> Schedule. They do not change their input, and they validate each result."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from planner.ir import Action, ActionKind, Program, Schedule
from planner.schedule.validate import ScheduleError, validate


def add_recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Insert an R right before the B or I of every microbatch on each of `stages`.

    A frozen stage has no backward and gets no R.

    Raises:
        ScheduleError: a stage is out of range or recomputes already.
    """
    for stage in sorted(stages):
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(
                f"{schedule.name}: cannot recompute stage {stage}, stages are 0..{schedule.stages - 1}"
            )

    def expand(program: Program) -> Program:
        result: list[Action] = []
        for action in program:
            if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD) and action.stage in stages:
                result.append(Action(ActionKind.RECOMPUTE, action.stage, action.index))
            result.append(action)
        return tuple(result)

    recomputing = replace(schedule, programs=tuple(map(expand, schedule.programs)))
    validate(recomputing)
    return recomputing


def freeze_stages(schedule: Schedule, stages: int) -> Schedule:
    """Leave the first `stages` stages their forwards alone: their B, I and W go, and the R before them.

    What is left keeps its order, so the other stages add up their gradients as before. Stages that are frozen already
    stay so.

    Raises:
        ScheduleError: the schedule has fewer stages.
    """
    if not 0 <= stages <= schedule.stages:
        raise ScheduleError(
            f"{schedule.name}: cannot freeze the first {stages} stages, it has {schedule.stages}"
        )
    if stages <= schedule.frozen_stages:
        return schedule
    frozen = replace(
        schedule,
        programs=tuple(
            tuple(
                action
                for action in program
                if action.stage >= stages or action.kind in (ActionKind.FORWARD, ActionKind.UPDATE)
            )
            for program in schedule.programs
        ),
        frozen_stages=stages,
    )
    validate(frozen)
    return frozen


def with_stage_ranks(schedule: Schedule, stage_ranks: Sequence[int]) -> Schedule:
    """Have other ranks run the programs, so that stage s is on rank `stage_ranks[s]`.

    Raises:
        ScheduleError: that is not an exchange of whole programs.
    """
    now = tuple(schedule.rank_of_stage[stage] for stage in range(schedule.stages))
    if now == tuple(stage_ranks):
        return schedule
    target = dict(zip(now, stage_ranks, strict=True))
    if sorted(target.values()) != list(range(schedule.ranks)) or tuple(target[rank] for rank in now) != tuple(
        stage_ranks
    ):
        raise ScheduleError(
            f"{schedule.name}: its stages are on ranks {list(now)}, and cannot be on {list(stage_ranks)}: only whole"
            " programs can change ranks"
        )
    source = {new: old for old, new in target.items()}
    placed = replace(
        schedule, programs=tuple(schedule.programs[source[rank]] for rank in range(schedule.ranks))
    )
    validate(placed)
    return placed


def repeat(schedule: Schedule, times: int) -> Schedule:
    """Repeat the window `times` times with consecutive microbatch numbers; no rank waits between windows.

    Raises:
        ScheduleError: `times` is below 1.
    """
    count = schedule.microbatches
    repeated = replace(
        schedule,
        microbatches=count * times,
        programs=tuple(
            tuple(
                replace(action, index=action.index + window * count)
                for window in range(times)
                for action in program
            )
            for program in schedule.programs
        ),
    )
    validate(repeated)
    return repeated
