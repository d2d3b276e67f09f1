"""The schedule as data: `Action` and `Schedule`, the leaf that every other module reads.

A schedule says, for each rank, which actions it takes in which order during one window. Sends and receives
are not part of it: they follow from the actions and from the placement of the stages. This module knows no
schedule family, no cost and no device; `planner/schedule/validate.py` decides which schedules are legal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator


class ActionKind(StrEnum):
    """Kind of action on one stage and one microbatch (one minibatch for `UPDATE`)."""

    FORWARD = "F"
    """Forward pass."""
    BACKWARD = "B"
    """Full backward pass: input gradient and weight gradient at once."""
    INPUT_GRAD = "I"
    """Input gradient only; the weight gradient waits for its `WEIGHT_GRAD`."""
    WEIGHT_GRAD = "W"
    """Weight gradient that an earlier `INPUT_GRAD` deferred."""
    RECOMPUTE = "R"
    """Second forward pass, which rebuilds the activations that the first one dropped."""
    UPDATE = "U"
    """Optimizer update, only in asynchronous windows: a synchronous window's updates follow its commit."""


FREEZABLE = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)
"""The kinds that compute weight gradients, and so the kinds that freezing shortens."""
_TOKEN = re.compile(r"(\d+)([FBIWRU])(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank's program; `str()` gives its token (`2F0`), `Action.parse` reads it."""

    kind: ActionKind
    stage: int
    index: int
    """The microbatch; the minibatch for `ActionKind.UPDATE`."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.index}"

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def parse(token: str) -> Action:
        """Return the action that `token` names. Blanks around the token are allowed.

        Raises:
            ValueError: `token` is not `<stage><kind><index>`.
        """
        match = _TOKEN.fullmatch(token.strip())
        if match is None:
            raise ValueError(
                f"{token!r} is not an action: expected <stage><kind><microbatch> with a kind of F, B, I, W, R"
                " or U, such as 2F0"
            )
        stage, kind, index = match.groups()
        return Action(ActionKind(kind), int(stage), int(index))


def _parsed(text: Any) -> tuple[Action, ...]:
    if not isinstance(text, str):
        raise ValueError("a program is a text, such as 0F0 0B0")
    return tuple(map(Action.parse, text.split()))


Program = Annotated[
    tuple[Action, ...],
    PlainSerializer(lambda program: " ".join(map(str, program)), return_type=str),
    PlainValidator(_parsed),
]
"""One rank's actions in program order; in JSON their tokens, as one text."""


@dataclass(frozen=True)
class Schedule:
    """One window of a pipeline: a program per rank.

    The placement of stages on ranks is not a field: the rank whose program names a stage holds it.
    """

    name: str
    """The family, e.g. `1f1b`; for messages and reports."""
    stages: int
    microbatches: int
    programs: tuple[Program, ...] = field(hash=False)
    """`programs[rank]`. Tens of thousands of actions: each look-up in a cache of graphs would hash them all."""
    frozen_stages: int = 0
    """Number of stages, from the input up, that are wholly frozen and have no B, I or W. All of them in a forward-only
    window."""
    synchronous: bool = True
    """Whether the window is one optimizer step over all its microbatches."""

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """Stage -> rank, from the programs. A stage named by two ranks (illegal) maps to the first."""
        placement: dict[int, int] = {}
        for rank, program in enumerate(self.programs):
            for action in program:
                placement.setdefault(action.stage, rank)
        return placement

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients have actions of their own. A rank all of whose stages are frozen has none either."""
        return any(action.kind is ActionKind.WEIGHT_GRAD for program in self.programs for action in program)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(sorted({action.stage for action in self.programs[rank]}))
