"""Microbatches in flight: what each action adds to its stage's memory and what it frees, as counts.

The only place for this rule: the partition programs, the simulated memory and the command line all read it. Knows no
bytes and no time.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.ir import Action, ActionKind, Program, Schedule


class Counts(NamedTuple):
    """Contents of one stage's memory, in microbatches."""

    activations: int = 0
    """Microbatches between the start of their forward and the end of their input gradient."""
    rebuilt: int = 0
    """Microbatches whose recomputed activations live, until the end of their input gradient."""
    waiting: int = 0
    """Microbatches between the end of their input gradient and the end of their weight gradient."""
    gradients: int = 0
    """1 for a stage that forms weight gradients: their sums stay in their memory from step to step."""


class Changes(NamedTuple):
    """Changes of a stage's counts by one action."""

    start: Counts = Counts()
    end: Counts = Counts()


_CHANGES = {
    ActionKind.FORWARD: Changes(start=Counts(activations=1)),
    ActionKind.RECOMPUTE: Changes(start=Counts(rebuilt=1)),
    ActionKind.BACKWARD: Changes(end=Counts(activations=-1, rebuilt=-1)),
    ActionKind.INPUT_GRAD: Changes(end=Counts(activations=-1, rebuilt=-1, waiting=1)),
    ActionKind.WEIGHT_GRAD: Changes(end=Counts(waiting=-1)),
    ActionKind.UPDATE: Changes(),
}
_FROZEN_FORWARD = Changes(start=Counts(activations=1), end=Counts(activations=-1))


def changes_of(action: Action, frozen_stages: int) -> Changes:
    """The changes by `action` in a schedule whose first `frozen_stages` stages only go forward."""
    return _changes_of(action.kind, action.stage, frozen_stages)


def _changes_of(kind: ActionKind, stage: int, frozen_stages: int) -> Changes:
    if kind is ActionKind.FORWARD and stage < frozen_stages:
        return _FROZEN_FORWARD
    return _CHANGES[kind]


def largest_counts(schedule: Schedule, stage: int) -> tuple[Counts, ...]:
    """The counts that `stage` reaches and that no other counts of it exceed.

    Every backward and input gradient counts as if its recompute ran right before it, where `add_recompute` puts it.
    """
    changes = {
        kind: (
            _changes_of(kind, stage, schedule.frozen_stages),
            kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD),
        )
        for kind in ActionKind
        if kind is not ActionKind.RECOMPUTE
    }
    reached: set[tuple[int, int, int]] = set()
    activations = rebuilt = waiting = gradients = 0
    for action in schedule.programs[schedule.rank_of_stage[stage]]:
        if action.stage != stage or action.kind is ActionKind.RECOMPUTE:
            continue
        (start, end), rebuilds = changes[action.kind]
        activations += start.activations
        rebuilt += start.rebuilt + rebuilds
        waiting += start.waiting
        gradients |= action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)
        reached.add((activations, rebuilt, waiting))
        activations += end.activations
        rebuilt += end.rebuilt
        waiting += end.waiting
        reached.add((activations, rebuilt, waiting))
    largest: list[Counts] = []
    most_waiting: dict[int, int] = {}
    # In descending order, counts follow all those that exceed them, which have at least as many activations.
    for kept, again, waits in sorted(reached, reverse=True):
        if not any(waits <= most and again <= other for other, most in most_waiting.items()):
            largest.append(Counts(kept, again, waits, gradients))
            most_waiting[again] = waits
    return tuple(largest)


def in_flight(schedule: Schedule, *, until_weight_grad: bool = True) -> tuple[int, ...]:
    """Per rank, the most pairs (stage, microbatch) in flight at once.

    A pair is in flight from the start of its forward: to the end of its weight gradient, which needs each matrix's
    input; or, without `until_weight_grad`, to the end of its input gradient. On a frozen stage a pair is in flight
    during its forward only. A pair that recomputes counts all the time, although it keeps only its input.
    """
    return tuple(
        _most_in_flight(program, schedule.frozen_stages, until_weight_grad) for program in schedule.programs
    )


def _most_in_flight(program: Program, frozen_stages: int, until_weight_grad: bool) -> int:
    current = most = 0
    for action in program:
        for change in changes_of(action, frozen_stages):
            current += change.activations + (change.waiting if until_weight_grad else 0)
            most = max(most, current)
    return most
