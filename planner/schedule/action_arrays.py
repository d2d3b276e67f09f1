"""A schedule's actions as arrays, and which one awaits which: what checks, graphs and memory read of large schedules.

Node numbers are those of the execution graph: rank by rank, in program order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.ir import ActionKind, Schedule

Integers = NDArray[np.int64]
KINDS = tuple(ActionKind)
"""A kind's number is its place here."""
NUMBER_OF = {kind: number for number, kind in enumerate(KINDS)}
NONE = -1
"""In place of a node: there is none."""


@dataclass(frozen=True)
class ActionArrays:
    """The actions of a schedule, by node; int64[A] each."""

    schedule: Schedule
    ranks: Integers
    kinds: Integers
    """Numbers of kinds, see `KINDS`."""
    stages: Integers
    indices: Integers

    @staticmethod
    def of(schedule: Schedule) -> ActionArrays:
        """The arrays of any schedule whose programs hold nothing but actions.

        Raises:
            AttributeError, KeyError, TypeError, OverflowError: something is no action.
        """
        actions = [action for program in schedule.programs for action in program]
        lengths = [len(program) for program in schedule.programs]
        return ActionArrays(
            schedule,
            np.repeat(np.arange(len(lengths)), lengths),
            np.array([NUMBER_OF[action.kind] for action in actions], dtype=np.int64),
            np.array([action.stage for action in actions], dtype=np.int64),
            np.array([action.index for action in actions], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def node_of(self) -> Integers:
        """int64[kinds, stages, microbatches]: the node of each action, or `NONE`. Stages and microbatches must be in
        range, and of an action that is there twice it is the last."""
        schedule = self.schedule
        nodes = np.full((len(KINDS), schedule.stages, schedule.microbatches), NONE)
        nodes[self.kinds, self.stages, self.indices] = np.arange(len(self))
        return nodes

    def nodes(self, kind: ActionKind) -> Integers:
        """int64[stages, microbatches], of one kind, or `NONE`."""
        return self.node_of[NUMBER_OF[kind]]

    @cached_property
    def backwards(self) -> Integers:
        """int64[stages, microbatches]: the backward or input gradient, or `NONE`."""
        whole = self.nodes(ActionKind.BACKWARD)
        return np.where(whole != NONE, whole, self.nodes(ActionKind.INPUT_GRAD))

    @cached_property
    def inputs(self) -> Integers:
        """int64[A]: the node of another stage whose output each action awaits, or `NONE`; as `graph.awaited`."""
        awaited = np.full(len(self), NONE)
        forward = (self.kinds == NUMBER_OF[ActionKind.FORWARD]) & (self.stages > 0)
        awaited[forward] = self.nodes(ActionKind.FORWARD)[self.stages[forward] - 1, self.indices[forward]]
        back = np.isin(self.kinds, [NUMBER_OF[ActionKind.BACKWARD], NUMBER_OF[ActionKind.INPUT_GRAD]])
        back &= self.stages + 1 < self.schedule.stages
        awaited[back] = self.backwards[self.stages[back] + 1, self.indices[back]]
        return awaited
