"""Schedules written out as text, one line per rank, for tests."""

from typing import Any

from planner.ir import Action, Schedule
from planner.schedule.passes import freeze_stages


def table(text: str, stages: int, microbatches: int, **fields: Any) -> Schedule:
    """The schedule that `text` shows, without validation."""
    programs = tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())
    return Schedule("table", stages, microbatches, programs, **fields)


def text(schedule: Schedule) -> str:
    return "\n".join(" ".join(map(str, program)) for program in schedule.programs)


def lines(block: str) -> str:
    """`block` in the form in which `text` returns it."""
    return "\n".join(line.strip() for line in block.strip().splitlines())


def forwards_of(schedule: Schedule) -> Schedule:
    """The forward-only window with the forwards of `schedule`: all its stages are frozen."""
    return freeze_stages(schedule, schedule.stages)
