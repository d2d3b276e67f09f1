"""Schedules written out as text, one line per rank, for tests."""

from typing import Any

from planner.ir import Action, Schedule


def table(text: str, stages: int, microbatches: int, **fields: Any) -> Schedule:
    """The schedule `text` shows; not validated."""
    programs = tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())
    return Schedule("table", stages, microbatches, programs, **fields)


def text(schedule: Schedule) -> str:
    return "\n".join(" ".join(map(str, program)) for program in schedule.programs)


def lines(block: str) -> str:
    """`block` as `text` would write it."""
    return "\n".join(line.strip() for line in block.strip().splitlines())
