"""The batch that grows as layers freeze: when another leg of its course begins (`freeze.batch`). Pure.

It follows from the frozen prefix and the spec alone, so every rank finds the same leg after the same commit, whatever
pipelines run.
"""

from __future__ import annotations

from planner.course import Course, times_as_many
from workers.config import FreezeConfig


def course_after(course: Course, freeze: FreezeConfig, step: int, layers: int, frozen: int) -> Course:
    """The course as of `step`, whose prefix is another one than that of the step before.

    Args:
        layers: of the model.
        frozen: those that `step` freezes as a whole.
    """
    if freeze.batch == "keep":
        return course
    times = times_as_many(layers, frozen, freeze.frozen_cost)
    if times * course.legs[0].replicas <= course.at(step).replicas:
        return course
    return course.grown(step, times, freeze.lr)
