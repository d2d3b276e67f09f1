"""The course of a job's batch, from its logged spec and the legs that its log has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.course import Course, Leg


def course_in(spec: Mapping[str, Any], legs: Sequence[Leg]) -> Course | None:
    """The course; None if the spec does not say the batch.

    Args:
        spec: resolved.
        legs: after the one that the spec says, in order.
    """
    match spec.get("pipeline"):
        case {"microbatches": int(microbatches), "microbatch_size": int(size)} as pipeline:
            return Course.of(pipeline.get("replicas", 1), microbatches, size, legs)
        case _:
            return None
