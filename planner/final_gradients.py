"""When the gradients that a rank sums in a window are final while the window goes on, so that they may leave.

A leaf: pure, and the same for the rank and for its simulation. They leave only when the rank has no more activations or
gradients of activations to send to other ranks: those have others wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from planner.ir import FREEZABLE, Action, ActionKind, Program


class FinalGradients(NamedTuple):
    """By position in the rank's program."""

    before: Mapping[int, tuple[int, ...]]
    """Action -> stages whose gradients may leave before it begins."""
    during: frozenset[int]
    """Actions after whose work on a layer that layer's gradients may leave."""


def final_gradients(
    program: Program, *, rank: int, stages: int, frozen_stages: int, rank_of_stage: Mapping[int, int]
) -> FinalGradients:
    """Final gradients of `rank`. Those of stages that neither field names leave after the window."""

    def sends(action: Action) -> bool:
        match action.kind:
            case ActionKind.FORWARD:
                target = action.stage + 1
            case ActionKind.BACKWARD | ActionKind.INPUT_GRAD if action.stage > frozen_stages:
                target = action.stage - 1
            case _:
                return False
        return target < stages and rank_of_stage[target] != rank

    last_send = next((number for number in reversed(range(len(program))) if sends(program[number])), -1)
    last_weights = {action.stage: number for number, action in enumerate(program) if action.kind in FREEZABLE}
    before: dict[int, tuple[int, ...]] = defaultdict(tuple)
    during: set[int] = set()
    for stage, number in sorted(last_weights.items(), reverse=True):
        if number > last_send:
            during.add(number)
        elif last_send + 1 < len(program):
            before[last_send + 1] += (stage,)
    return FinalGradients(dict(before), frozenset(during))
